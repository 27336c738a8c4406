"""Read a hook's record of its checkpoints from the state of the hook that a checkpoint contains."""

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
    """The state of a hook in a checkpoint: its checkpoints, the best ones, and the last validation.

    Attributes:
        kept: the names of the regular checkpoints, oldest first.
        bests: the best checkpoint of each metric.
        bests_behind: the other checkpoints that are kept for each metric, best first.
        metrics, validated_at: the scores and the iteration of the last validation.
        watched: the metrics that the hook watched, if there were several.
    """

    kept: list[str]
    bests: dict[str, Values]
    bests_behind: dict[str, list[Values]] = {}
    metrics: dict[str, float] = {}
    validated_at: Count | None = None
    watched: list[str] | None = None


def _check_names(saved: RecordState, directory: Path) -> None:
    """Raise CheckpointError if a checkpoint is not named by the plain name of a folder in `directory`."""
    behind = [best for several in saved.bests_behind.values() for best in several]
    for name in (*saved.kept, *(best[1] for best in (*saved.bests.values(), *behind))):
        if not is_plain_name(name):
            raise CheckpointError(
                f"the checkpoint lists {name!r} among the checkpoints that CheckpointHook keeps: expected "
                f"the name of a folder in {directory}, got a path"
            )


def read_state(state: Mapping[str, Any], directory: Path) -> RecordState:
    """Read the state of a hook, and check the names in it.

    Args:
        state: the result of the hook's `state_dict`, as a checkpoint contains it.
        directory: the directory of the checkpoints, for errors.

    Raises:
        CheckpointError: a field is missing or has another type, or a checkpoint is named by a path. A later
            save would remove such a path.
    """
    saved = read_as(RecordState, state, "CheckpointHook cannot take its state")
    _check_names(saved, directory)
    return saved
