"""Declare the parts of a trainer that a resume needs, beyond those that all packages share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from eventloop.checkpoint.saving.overlapped_copy import SavingTrainer
from eventloop.commands.messages import Applied
from eventloop.data.position import LoaderPosition


class ResumableTrainer(SavingTrainer, Protocol):
    """A trainer as a resume sees it: the parts that a checkpoint holds, and those that are compared."""

    config: dict[str, Any]
    schedulers: list[Any]
    position: LoaderPosition
    autocast: Callable[[], AbstractContextManager[Any]]
    checkpoint: dict[str, Any] | None
    checkpoint_dir: Path
    applied_commands: list[Applied]
    compile_options: Any
    writers: list[Any]
    schedule: Any  # of `evaluation.schedule`, a package above this one
    monitored: Any  # of `evaluation.monitored_metrics`, as well
