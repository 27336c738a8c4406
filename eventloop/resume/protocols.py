"""Declare the parts of a trainer that a resume needs, beyond those that all packages share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from eventloop.checkpoint.saving.overlapped_copy import Copying
from eventloop.commands.messages import Applied
from eventloop.data.position import LoaderPosition
from eventloop.data.trainer_parts import TrainerParts
from eventloop.ownership.run_ownership import RunOwnership


class ResumableTrainer(TrainerParts, Protocol):
    """A trainer as a resume sees it: the parts that a checkpoint holds, and those that are compared."""

    schedulers: list[Any]
    position: LoaderPosition
    copying: Copying
    ownership: RunOwnership
    autocast: Callable[[], AbstractContextManager[Any]]
    checkpoint: dict[str, Any] | None
    checkpoint_dir: Path
    applied_commands: list[Applied]
    schedule: Any  # of `evaluation.schedule`, a package above this one
