"""Keeps the run's cost record in its directory, for `eventloop report`."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from eventloop.costs.records import RunCosts, read_costs, write_costs
from eventloop.events import AfterRun, AfterTrainEpoch, AfterTrainIter, BeforeRun
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.reporting.summary import run_costs

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

_FIRST_SECONDS = 2.0
"""Until the first write; each of the next ones waits twice as long, up to the interval."""
_JOIN_SECONDS = 1.0
"""How long the end of a run waits for a write that hangs."""


class CostsHook(Hook):
    """Writes `costs.json` into the work dir: what each handler and each subscriber cost, and the phases of the
    iterations with their trend. Every trainer has it; `default_hooks=dict(costs=None)` does without.

        default_hooks=dict(costs=dict(interval=300))

    It is written when the run has ended and everything was delivered, however it ended, and meanwhile by a thread of
    its own, so that a run that is killed has a record too: after 2, 6, 14 seconds, and so on. A run that was resumed
    writes its own part; one that trains nothing, such as a validation, leaves the record of a training as it is.

    Args:
        interval: seconds from one write to the next while the run goes on, at most; `float("inf")` for the end only.

    Raises:
        TypeError, ValueError: `interval` is no number above 0.
    """

    priority = Priority.LOWEST

    def __init__(self, interval: float = 30.0) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int | float):
            raise TypeError(f"interval must be a number of seconds, got {interval!r}")
        if not interval > 0:
            raise ValueError(f"interval must be above 0 seconds, got {interval}")
        self._interval = interval
        self._wait = self._due = 0.0
        self._outcome = ""
        self._writing: threading.Thread | None = None

    @on(priority=Priority.VERY_HIGH)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Count the seconds from here, and write at the very end."""
        self._wait = min(_FIRST_SECONDS, self._interval) if isfinite(self._interval) else self._interval
        self._due = monotonic() + self._wait
        self._outcome = ""
        if trainer.rank == 0:
            trainer.during_run.callback(self._write_last, trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Write when it is time to."""
        if monotonic() >= self._due:
            self._write(trainer)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """The same: epochs may be short, and iterations long."""
        if monotonic() >= self._due:
            self._write(trainer)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Note how it ended."""
        self._outcome = event.reason if event.error is None else f"{event.reason}: {event.error}"

    def _write(self, trainer: Trainer) -> None:
        """Take the record here, where counts are exact, and write it elsewhere: no step waits for a file system. A
        write that hangs is left to itself, and not followed by another."""
        self._wait = min(2 * self._wait, self._interval)
        self._due = monotonic() + self._wait
        if trainer.rank != 0 or (self._writing is not None and self._writing.is_alive()):
            return
        writing = threading.Thread(
            target=_try_to_write, args=(trainer, run_costs(trainer)), name="eventloop costs", daemon=True
        )
        with suppress(RuntimeError):  # there is none left: the next write has it all
            writing.start()
            self._writing = writing

    def _write_last(self, trainer: Trainer) -> None:
        if self._writing is not None:
            self._writing.join(_JOIN_SECONDS)
        _try_to_write(trainer, run_costs(trainer, complete=True, outcome=self._outcome))


def _try_to_write(trainer: Trainer, costs: RunCosts) -> None:
    try:
        if costs.phases.iterations or not _has_iterations(trainer.work_dir):
            write_costs(trainer.work_dir, costs)
    except OSError as error:
        logger.warning("the cost record of the run was not written: %s", error)


def _has_iterations(directory: Path) -> bool:
    """True where there is the record of a training."""
    try:
        return read_costs(directory).phases.iterations > 0
    except (FileNotFoundError, ValueError):
        return False
