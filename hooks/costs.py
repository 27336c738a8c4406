"""A hook that keeps the cost record of a run in its directory, for `eventloop report`."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from eventloop.costs.records import RunCosts, costs_path, read_costs, write_costs
from eventloop.costs.shares import SCALARS, shares_between
from eventloop.costs.waits import waiting
from eventloop.events import (
    AfterRun,
    AfterTrainEpoch,
    AfterTrainIter,
    BeforeRun,
    BeforeTrain,
    BeforeTrainIter,
    LoaderStall,
    ScalarsLogged,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.migration.names import knowing_others
from eventloop.reporting.advice import data_share, slow_loader
from eventloop.reporting.summary import run_costs

if TYPE_CHECKING:
    from eventloop.bus import Bus
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

_FIRST_SECONDS = 2.0
"""Seconds from the begin of a run to the first write; the wait then doubles, up to `interval_seconds`."""
_JOIN_SECONDS = 1.0
"""Seconds that the end of a run waits for a write that hangs."""


class CostsHook(Hook):
    """Write `costs.json`: the costs of handlers and subscribers, and the phases of iterations.

    Each rank writes its own file into the run's directory: rank 0 `costs.json`, rank 1 `costs.rank1.json`.

        default_hooks=dict(costs=dict(interval_seconds=300))
        default_hooks=dict(costs=dict(log_seconds=30))    # shares as curves

    The hook emits `loader_stall`, at most once a run, if the train loader is the bottleneck when the file is
    written.

    Every trainer has this hook; `default_hooks=dict(costs=None)` removes it. The file has the phases and
    their trend over the run. It is written when the run has ended, for whatever reason, and every event is
    delivered. During the run a thread also writes it, after 2, 6, 14 seconds and so on, so that a killed run
    has a record. A resumed run writes only its own part. A run that trains nothing, such as a validation,
    does not replace the record of a training.

    With `log_seconds` the writers receive shares, 0 to 1, of the time of the iterations since the last log,
    as scalars: `cost/data_share` for the wait for data, `cost/hooks_share` for the hooks phase, and
    `cost/<handler>` for each handler, such as `cost/EMAHook.after_train_iter`. A handler's share leaves out
    phases that it runs itself, such as backward. The shares are those of rank 0. They are not in
    `trainer.metrics`, and the console does not show them.

    Args:
        interval_seconds: the most seconds between two writes while the run goes on; `float("inf")` writes at
            the end only.
        log_seconds: seconds between two logs of the shares; None logs none.

    Raises:
        TypeError, ValueError: `interval_seconds` or `log_seconds` is not a number above 0.
    """

    priority = Priority.LOWEST

    @knowing_others
    def __init__(self, interval_seconds: float = 30.0, *, log_seconds: float | None = None) -> None:
        _check_seconds("interval_seconds", interval_seconds)
        if log_seconds is not None:
            _check_seconds("log_seconds", log_seconds)
        self._interval, self._log_seconds = interval_seconds, log_seconds
        self._log_at = -inf
        self._logged: RunCosts | None = None  # the costs at the last log of shares
        self._wait = self._due = 0.0
        self._outcome = ""
        self._stalled = False  # whether `loader_stall` was emitted
        self._writing: threading.Thread | None = None

    def attach(self, bus: Bus) -> None:
        """Subscribe the hook's event methods, and `log_shares` if `log_seconds` is set."""
        super().attach(bus)
        if self._log_seconds is not None:
            # runs before all other handlers, so the costs are those of whole iterations
            bus.subscribe(self.log_shares, BeforeTrainIter, priority=Priority.HIGHEST)

    @on(priority=Priority.VERY_HIGH)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Schedule the first write of the record, and the last write for the end of the run."""
        self._wait = min(_FIRST_SECONDS, self._interval) if isfinite(self._interval) else self._interval
        self._due = monotonic() + self._wait
        self._outcome, self._stalled = "", False
        self._log_at, self._logged = -inf, None
        trainer.during_run.callback(self._write_last, trainer)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Remove this rank's file of an earlier training; rank 0 overwrites its file instead."""
        if trainer.rank:
            with suppress(OSError):
                costs_path(trainer.work_dir, trainer.rank).unlink(missing_ok=True)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Write the cost record if a write is due."""
        if monotonic() >= self._due:
            self._write(trainer)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Write the cost record if a write is due; this matters where iterations are long."""
        if monotonic() >= self._due:
            self._write(trainer)

    def log_shares(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Emit the shares of the iterations since the last log, if they are due and have a subscriber."""
        now = monotonic()
        if now < self._log_at or self._log_seconds is None or not trainer.bus.wants(ScalarsLogged):
            return
        self._log_at = now + self._log_seconds
        costs = RunCosts(phases=trainer.clock.phases, handlers=trainer.bus.handler_costs())
        before, self._logged = self._logged, costs
        if before is not None and (shares := shares_between(before, costs)):
            # not through the metrics: ranks log at different times, and a reduction would wait for all
            scalars = {f"{SCALARS}{name}": value for name, value in shares.items()}
            trainer.announce(ScalarsLogged, mode="train", step=trainer.iter, scalars=scalars)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Record why the run ended."""
        self._outcome = event.reason if event.error is None else f"{event.reason}: {event.error}"

    def _write(self, trainer: Trainer) -> None:
        """Make the record on the training thread, where counts are exact, and write it on another thread.

        So no step waits for the file system. No write is started while the former one is still running.
        """
        self._wait = min(2 * self._wait, self._interval)
        self._due = monotonic() + self._wait
        if self._writing is not None and self._writing.is_alive():
            return
        costs = run_costs(trainer)
        if trainer.rank == 0 and not self._stalled and (found := slow_loader(costs)) is not None:
            self._stalled = True
            trainer.announce(LoaderStall, share=data_share(costs), advice=found.text)
        writing = threading.Thread(
            target=_try_to_write, args=(trainer, costs), name="eventloop costs", daemon=True
        )
        with suppress(RuntimeError):  # no thread can be started; the next write covers this one's costs, too
            writing.start()
            self._writing = writing

    def _write_last(self, trainer: Trainer) -> None:
        if self._writing is not None:
            with waiting("background", "the file of CostsHook"):
                self._writing.join(_JOIN_SECONDS)
        _try_to_write(trainer, run_costs(trainer, complete=True, outcome=self._outcome))


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be above 0 seconds, got {value}")


def _try_to_write(trainer: Trainer, costs: RunCosts) -> None:
    if not trainer.ownership.may_write:  # an evaluation beside another run's training
        return
    try:
        if costs.phases.iterations or not _has_iterations(trainer.work_dir, costs.rank):
            write_costs(trainer.work_dir, costs)
    except OSError as error:
        logger.warning("the cost record of the run was not written: %s", error)


def _has_iterations(directory: Path, rank: int) -> bool:
    """Return True if `directory` has a cost record of this rank with train iterations."""
    try:
        return read_costs(directory, rank).phases.iterations > 0
    except (FileNotFoundError, ValueError):
        return False
