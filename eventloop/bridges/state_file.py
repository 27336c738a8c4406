"""Keep the states of our hooks in a file of their own in a checkpoint of another engine (the host)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eventloop.checkpoint import CheckpointError
from eventloop.util.append_file import replacing

FILE_NAME = "eventloop.pt"


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write the state of an `Attachment` to the file `eventloop.pt` in the host's checkpoint folder."""
    with replacing(checkpoint / FILE_NAME) as file:
        torch.save(dict(state), file)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state of an `Attachment` from the host's checkpoint folder; `{"hooks": {}}` without the file.

    Raises:
        CheckpointError: the file cannot be read, or does not contain states of hooks.
    """
    path = checkpoint / FILE_NAME
    if not path.exists():
        return {"hooks": {}}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; remove the file to resume without the states of the hooks"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("hooks"), dict):
        raise CheckpointError(f"{path} has no states of hooks: no bridge of eventloop has written it")
    return state
