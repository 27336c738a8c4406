"""Shorten a trainer's run to prove that a script runs: `Trainer(fast_dev_run=True)`.

The trainer is built as for the whole run, so that schedules, hooks and their options are checked against its
real length. Then the run is shortened.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

from eventloop.data.limits import Limits
from eventloop.registry import find_class
from eventloop.util.checks import at_least, check_path

logger = logging.getLogger("eventloop")

SILENT_HOOKS = ("CheckpointHook", "EarlyStoppingHook")
"""Hooks that are built and checked in a dev run, and not attached."""


class ShortenedTrainer(Protocol):
    """The parts of a trainer that `shorten` reads and sets."""

    fast_dev_run: int
    limits: Limits
    max_epochs: int | None
    max_iters: int | None
    train_loader: Iterable[Any] | None

    @property
    def by_epoch(self) -> bool:
        """True when the run is measured in epochs."""


def batches_of(fast_dev_run: object) -> int:
    """Return the number of batches of a dev run; 0 if the run is a normal one.

    Raises:
        TypeError, ValueError: the argument is not a bool, nor a number of batches.
    """
    if isinstance(fast_dev_run, bool):
        return int(fast_dev_run)
    if not isinstance(fast_dev_run, int):
        raise TypeError(
            f"fast_dev_run must be True, False or a number of batches (an int), got {fast_dev_run!r}"
        )
    at_least("fast_dev_run", fast_dev_run, 0)
    return fast_dev_run


def make_temporary_dir(trainer: ShortenedTrainer, work_dir: object) -> Path:
    """Create a directory for the files of a dev run, which is removed together with the trainer.

    Each of several ranks has one of its own: no rank removes a directory in which another still writes.

    Args:
        work_dir: the directory of the whole run, of which only the type is checked.
    """
    if work_dir is not None:
        check_path("work_dir", work_dir)
    path = Path(tempfile.mkdtemp(prefix="eventloop-fast-dev-run-"))
    finalize(trainer, shutil.rmtree, path, ignore_errors=True)
    return path


def shorten(trainer: ShortenedTrainer) -> None:
    """Limit a trainer's run, and each pass over a loader, to the batches of its dev run."""
    batches = trainer.fast_dev_run
    trainer.limits = Limits(batches)
    if trainer.by_epoch:
        trainer.max_epochs, trainer.max_iters = 1, trainer.limits.length("train", trainer.train_loader)
    else:
        trainer.max_iters = batches
    logger.warning(
        "fast_dev_run=%d: a run of %d batches in the temporary directory of trainer.work_dir, without "
        "checkpoints, early stopping and writers, except a ConsoleWriter",
        batches,
        batches,
    )


def is_omitted(part: object) -> bool:
    """Return whether a hook or writer is not attached in a dev run: it would stop early, or leave files."""
    if hasattr(part, "write"):
        return not isinstance(part, find_class("ConsoleWriter"))
    return isinstance(part, tuple(map(find_class, SILENT_HOOKS)))
