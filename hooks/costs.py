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
"""Seconds from the start of a run to the first write; the wait then doubles, up to `interval_seconds`."""
_JOIN_SECONDS = 1.0
"""Seconds for which the end of a run waits for a write that has not returned."""


class CostsHook(Hook):
    """Write `costs.json`: the costs of handlers and subscribers, and the phases of iterations.

    Each rank writes its own file into the run's directory: rank 0 `costs.json`, rank 1 `costs.rank1.json`.

        default_hooks=dict(costs=dict(interval_seconds=300))
        default_hooks=dict(costs=dict(log_seconds=30))    # shares as curves

    The hook emits `loader_stall`, at most once a run, if the train loader is the bottleneck when the file is
    written.

    Every trainer has this hook; `default_hooks=dict(costs=None)` removes it. The file has the time of each
    phase (data, forward, backward, optimizer, hooks), also over the course of the run. It is written when the
    run has ended, for whatever reason, and the writers have received every event. During the run a thread
    writes it too, after 2, 6, 14 seconds and so on, so that a killed run has a record. A resumed run records
    only the time since the resume. A run that trains nothing, such as a validation, does not replace the
    record of a training.

    With `log_seconds` the writers receive fractions, 0 to 1, of the time of the iterations since the last
    log, as scalars: `cost/data_share` for the wait for data, `cost/hooks_share` for the hooks phase, and
    `cost/<handler>` for each handler, such as `cost/EMAHook.after_train_iter`. The share of `OptimizerHook`
    does not include backward and the optimizer step, which are phases of their own. The shares are those of
    rank 0. They are not in `trainer.metrics`, and the console does not show them.

    Args:
        interval_seconds: the most seconds between two writes during the run; `float("inf")` writes only at
            the end.
        log_seconds: seconds between two logs of the shares; None logs no shares.

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
        self._next_log = -inf  # the time of `monotonic`, as is `_next_write`
        self._costs_at_last_log: RunCosts | None = None
        self._wait_seconds = self._next_write = 0.0
        self._outcome = ""  # the reason for which the run ended
        self._stall_emitted = False
        self._writing: threading.Thread | None = None

    def attach(self, bus: Bus) -> None:
        """Subscribe the hook's event methods, and `log_shares` if `log_seconds` is set."""
        super().attach(bus)
        if self._log_seconds is not None:
            # runs before all other handlers, so the costs are those of whole iterations
            bus.subscribe(self.log_shares, BeforeTrainIter, priority=Priority.HIGHEST)

    @on(priority=Priority.VERY_HIGH)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Schedule the first write of the record, and a last write at the end of the run."""
        self._wait_seconds = min(_FIRST_SECONDS, self._interval) if isfinite(self._interval) else inf
        self._next_write = monotonic() + self._wait_seconds
        self._outcome, self._stall_emitted = "", False
        self._next_log, self._costs_at_last_log = -inf, None
        trainer.during_run.callback(self._write_last, trainer)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Remove this rank's record of an earlier training, except on rank 0, which overwrites it."""
        if trainer.rank:
            with suppress(OSError):
                costs_path(trainer.work_dir, trainer.rank).unlink(missing_ok=True)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Write the cost record if a write is due."""
        if monotonic() >= self._next_write:
            self._write(trainer)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Write the cost record if a write is due."""
        if monotonic() >= self._next_write:
            self._write(trainer)

    def log_shares(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Emit the shares since the last log as `scalars_logged`, if a log is due and a writer takes them."""
        now = monotonic()
        if now < self._next_log or self._log_seconds is None or not trainer.bus.wants(ScalarsLogged):
            return
        self._next_log = now + self._log_seconds
        costs = RunCosts(phases=trainer.clock.phases, handlers=trainer.bus.handler_costs())
        costs_before, self._costs_at_last_log = self._costs_at_last_log, costs
        if costs_before is not None and (shares := shares_between(costs_before, costs)):
            # not in trainer.metrics, which may be reduced over the ranks: each rank logs at its own time
            scalars = {f"{SCALARS}{name}": value for name, value in shares.items()}
            trainer.announce(ScalarsLogged, mode="train", step=trainer.iter, scalars=scalars)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Store the reason for which the run ended, with its error, for the last write."""
        self._outcome = event.reason if event.error is None else f"{event.reason}: {event.error}"

    def _write(self, trainer: Trainer) -> None:
        """Collect the costs on the training thread, where counts are exact, and write them on another thread.

        No step waits for the file system. Nothing is written while an earlier write is still running.
        """
        self._wait_seconds = min(2 * self._wait_seconds, self._interval)
        self._next_write = monotonic() + self._wait_seconds
        if self._writing is not None and self._writing.is_alive():
            return
        costs = run_costs(trainer)
        self._report_slow_loader(trainer, costs)
        writing = threading.Thread(
            target=_try_to_write, args=(trainer, costs), name="eventloop costs", daemon=True
        )
        with suppress(RuntimeError):  # no thread can be started; the next write includes these costs
            writing.start()
            self._writing = writing

    def _report_slow_loader(self, trainer: Trainer, costs: RunCosts) -> None:
        """Emit `loader_stall` on rank 0, once a run, if the train loader is the bottleneck."""
        if trainer.rank == 0 and not self._stall_emitted and (advice := slow_loader(costs)) is not None:
            self._stall_emitted = True
            trainer.announce(LoaderStall, share=data_share(costs), advice=advice.text)

    def _write_last(self, trainer: Trainer) -> None:
        """Write the record of the whole run, when all events are delivered and a running write has ended."""
        if self._writing is not None:
            with waiting("background", "the file of CostsHook"):
                self._writing.join(_JOIN_SECONDS)
        _try_to_write(trainer, run_costs(trainer, complete=True, outcome=self._outcome))


def _check_seconds(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless the value is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be above 0 seconds, got {value}")


def _try_to_write(trainer: Trainer, costs: RunCosts) -> None:
    """Write a cost record, except over a training's if this run trained nothing; warn if it fails."""
    if not trainer.ownership.may_write:  # this run evaluates in the directory of a training that runs now
        return
    try:
        replaces_training = not costs.phases.iterations and _has_iterations(trainer.work_dir, costs.rank)
        if not replaces_training:
            write_costs(trainer.work_dir, costs)
    except OSError as error:
        logger.warning("the cost record of the run was not written: %s", error)


def _has_iterations(directory: Path, rank: int) -> bool:
    """Return True if `directory` has a cost record of this rank with train iterations."""
    try:
        return read_costs(directory, rank).phases.iterations > 0
    except (FileNotFoundError, ValueError):
        return False
