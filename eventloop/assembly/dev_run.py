"""Shorten a trainer's run to a few batches that try out a script: `Trainer(fast_dev_run=True)`.

This is a dev run. The trainer is built as for the whole run, so that schedules, hooks and their options are
checked against its real length. Then the run is shortened.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import finalize

from eventloop.data.limits import Counting, Limits
from eventloop.registry import HOOKS, WRITERS
from eventloop.util.checks import at_least, check_path

logger = logging.getLogger("eventloop")

SILENT_HOOKS = ("AsyncValidationHook", "CheckpointHook", "EarlyStoppingHook")
"""The hooks that are built and checked, but not attached, in a dev run and in an evaluator."""


def batches_of(fast_dev_run: object) -> int:
    """Return the number of batches of a dev run, from the trainer's argument; 0 for no dev run.

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


def make_temporary_dir(trainer: object, work_dir: object) -> Path:
    """Create a directory for a dev run or an evaluator, which is removed together with the trainer.

    Each rank creates a directory of its own, so that no rank removes one in which another still writes.

    Args:
        trainer: the trainer with which the directory is removed.
        work_dir: the trainer's argument, of which only the type is checked.
    """
    if work_dir is not None:
        check_path("work_dir", work_dir)
    path = Path(tempfile.mkdtemp(prefix="eventloop-"))
    finalize(trainer, shutil.rmtree, path, ignore_errors=True)
    return path


def shorten(
    batches: int, by_epoch: bool, train_loader: Iterable[Any] | None, counting: Counting
) -> tuple[Limits, int | None, int | None]:
    """Log that a run is a dev run of `batches` batches; return its `Limits`, `max_epochs` and `max_iters`."""
    logger.warning(
        "fast_dev_run=%d: a run of %d batches in the temporary directory of trainer.work_dir, without "
        "checkpoints, early stopping and writers, except a ConsoleWriter",
        batches,
        batches,
    )
    limits = Limits(batches)
    length = limits.length("train", train_loader) if by_epoch else batches
    return limits, 1 if by_epoch else None, counting.iterations(length)


def is_omitted(part: object) -> bool:
    """Return whether a hook or writer is left out of a dev run, as it would stop it or write files."""
    if hasattr(part, "write"):
        return not WRITERS.holds("ConsoleWriter", part)
    return any(HOOKS.holds(name, part) for name in SILENT_HOOKS)
