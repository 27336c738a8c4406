"""Read the record of a hook's checkpoints from the state that a checkpoint has of the hook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eventloop.state.schema import Count, read_as
from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name

Values = tuple[float | None, str, str]
"""The fields of a `Best`, as a checkpoint stores them."""


class RecordState(msgspec.Struct):
    """What a hook saves: its checkpoints, the best ones of each metric, and the last validation."""

    kept: list[str]
    bests: dict[str, Values]
    bests_behind: dict[str, list[Values]] = {}
    metrics: dict[str, float] = {}
    validated_at: Count | None = None
    watched: list[str] | None = None


def _check_names(saved: RecordState, directory: Path) -> None:
    behind = [best for several in saved.bests_behind.values() for best in several]
    for name in (*saved.kept, *(best[1] for best in (*saved.bests.values(), *behind))):
        if not is_plain_name(name):
            raise CheckpointError(
                f"the checkpoint lists {name!r} among the checkpoints that CheckpointHook keeps: expected "
                f"the name of a folder in {directory}, got a path"
            )


def read_state(state: Mapping[str, Any], directory: Path) -> RecordState:
    """Read what a hook has saved.

    Args:
        state: what the hook has saved.
        directory: the directory of the checkpoints, for errors.

    Raises:
        CheckpointError: the state lacks a field or has another one's type, or names a checkpoint by a path,
            which pruning would remove.
    """
    saved = read_as(RecordState, state, "CheckpointHook cannot take its state")
    _check_names(saved, directory)
    return saved
