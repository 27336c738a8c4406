"""A hook that goes back to a checkpoint when a metric diverges, and skips the batches that led there."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from eventloop.events import AfterTrainIter, BeforeTrain, CommandRefused
from eventloop.events.priority import Priority
from eventloop.hooks.check_invalid_loss import CheckInvalidLossHook
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.hook import Hook, on
from eventloop.hooks.logger import LoggerHook
from eventloop.state.exchange import decided_by_rank_0
from eventloop.state.schema import read_as
from eventloop.util.checks import at_least, check_bools, check_metric, number, positive

if TYPE_CHECKING:
    from eventloop.metrics.rows import Row
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

RANK = 3
"""The value of the window, counted from the largest one, above which a value is unusual."""


class RollbackHook(Hook):
    """Go back to a checkpoint from before a spike of the loss, and skip the batches that led to it.

        hooks=[CheckpointHook(interval=500, by_epoch=False), RollbackHook(spike=3.0, margin=100)]

    This is what was done by hand for PaLM (arXiv 2204.02311, section 5.1): restart some 100 steps before the
    spike, and skip 200 to 500 batches, those before and in it. The hook calls `trainer.rollback` for it, so
    the run goes on as a new process would that has resumed from the checkpoint.

    A value belongs to a spike if it is NaN or infinite; or if it is above `spike` times the median of the
    last `window` values, and above the third largest of them. The second condition follows the noise: the
    loss of small batches is often three times its median. `consecutive` such values in a row are a spike.
    So a single bad batch is no spike. Whatever the distribution of healthy values is, five in a row that are
    independent of the others are among the seven largest of 105 in one of 4.6 million iterations (21 of the
    96,560,646 places of five). Before there are `window` values only NaN and infinite ones count.

    The values are read in the background, when the logger's interval ends, so a spike is found an interval
    late; no iteration but the last one of a training waits for a value. The values of rank 0 decide for all
    ranks. Its commands are recorded in `commands.jsonl`, and a repetition of the run applies them again.

    Without a checkpoint that is old enough the hook says so once, and goes on; if the metric is NaN or
    infinite, it raises an error, so that no checkpoint of lost weights is saved. After `max_rollbacks` it
    goes back a last time and stops the run there, with its checkpoint.

    Args:
        monitor: a metric that is logged in each training iteration, such as "loss" or "grad_norm".
        spike: the multiple of the median.
        window: the number of values whose median and third largest value are compared.
        margin: the least number of iterations from the checkpoint to the begin of the spike.
        max_rollbacks: the number of rollbacks after which the next spike stops the run; those before a resume
            count too.
        skip: skip the batches from the checkpoint through those of the spike that were found; False trains on
            them again.
        scale_lr: a factor of the learning rates and their schedules at each rollback; None leaves them.
        consecutive: the number of values in a row that are a spike.

    Raises:
        TypeError, ValueError: an option is of the wrong type or out of range.
    """

    owns = "going back to a checkpoint"

    def __init__(
        self,
        monitor: str = "loss",
        spike: float = 3.0,
        window: int = 100,
        margin: int = 10,
        max_rollbacks: int = 3,
        skip: bool = True,
        scale_lr: float | None = None,
        *,
        consecutive: int = 5,
    ) -> None:
        check_metric("monitor", monitor)
        number("spike", spike, above=1)
        at_least("window", window, RANK)
        at_least("margin", margin, 0)
        at_least("max_rollbacks", max_rollbacks, 0)
        check_bools(skip=skip)
        if scale_lr is not None:
            number("scale_lr", scale_lr, above=0)
        positive("consecutive", consecutive)
        self._monitor, self._spike, self._window, self._consecutive = monitor, spike, window, consecutive
        self._margin, self._most, self._skip = margin, max_rollbacks, skip
        self._scale_lr = 1.0 if scale_lr is None else scale_lr
        self._watch = self._new_watch(())
        self._requested = self._warned = False

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer without a logger or checkpoints, or with a CheckInvalidLossHook.

        Raises:
            ValueError: the trainer has no LoggerHook or no CheckpointHook, or it has a CheckInvalidLossHook.
        """
        if trainer.fast_dev_run:
            return
        for needed, why in ((LoggerHook, "logs what it monitors"), (CheckpointHook, "saves where it goes")):
            if not any(isinstance(hook, needed) for hook in trainer.hooks):
                raise ValueError(f"RollbackHook needs a {needed.__name__}, which {why}: the trainer has none")
        if any(isinstance(hook, CheckInvalidLossHook) for hook in trainer.hooks):
            raise ValueError(
                "expected RollbackHook or CheckInvalidLossHook, got both: the one ends the run at a loss "
                "from which the other goes back; remove CheckInvalidLossHook"
            )
        if trainer.rank == 0:
            trainer.metrics.followers.append(partial(self._follow, trainer))

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Begin to watch, with the healthy values from before or of the checkpoint."""
        self._watch = self._new_watch(self._watch.values)
        self._requested = False
        for command in list(waiting := trainer.stops.commands):
            if command.source == self.name:  # a spike that was found meanwhile is of abandoned iterations
                waiting.remove(command)

    @on(priority=Priority.LOW)
    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Read the values that are left at the end of a training, so that a spike there is found as well."""
        if self.is_last_train_iter(trainer) and trainer.rank == 0:
            trainer.metrics.read_pending()

    def command_refused(self, trainer: Trainer, event: CommandRefused) -> None:
        """Say that the run cannot go back.

        Raises:
            FloatingPointError: the metric is NaN or infinite.
        """
        if event.source != self.name or trainer.stops.goes_back:
            return
        if decided_by_rank_0(lambda: self._watch.lost):
            raise FloatingPointError(
                f"{event.arguments.get('reason')}, and the run cannot go back: {event.reason}; save more "
                "often, or lower RollbackHook(margin=...)"
            )
        if not self._warned:
            logger.warning("RollbackHook does not go back: %s", event.reason)
        self._warned = True
        self._watch, self._requested = self._new_watch(()), False

    def state_dict(self) -> dict[str, Any]:
        """Return the last healthy values that were read."""
        return {"values": [*self._watch.values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the healthy values of a checkpoint.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        saved = read_as(_State, state, "RollbackHook cannot take its state")
        self._watch = self._new_watch(saved.values)

    # --- in the background ---------------------------------------------------------------------------------

    def _follow(self, trainer: Trainer, rows: list[Row]) -> None:
        """Judge the values that were read, and have the training thread go back after a spike."""
        watch = self._watch
        for row in rows:
            if self._monitor in row.name_set.names and row.phase.mode == "train":
                watch.add(row.iteration, row.scalars()[self._monitor])
        waiting = self._requested or trainer.stops.goes_back or trainer.commands.repeating
        if watch.is_spike and trainer.running and not waiting:
            self._requested = True
            with suppress(RuntimeError):  # the run has just ended
                self._request(trainer, watch)

    def _request(self, trainer: Trainer, watch: _Watch) -> None:
        applied = [each for each in trainer.applied_commands if each.source == self.name]
        stops = len(applied) >= self._most
        reason = f"{self._monitor} {watch.text}"
        if stops:
            reason += f", and max_rollbacks={self._most} are used up"
        logger.warning("RollbackHook: %s; going back to a checkpoint", reason)
        trainer.commands.request(
            "rollback",
            source=self.name or "",
            before=max(1, watch.begin - self._margin + 1),
            until=watch.end + 1,
            skip="seen" if self._skip else 0,
            scale_lr=self._scale_lr,
            stop=stops,
            reason=reason,
        )

    def _new_watch(self, values: Iterable[float]) -> _Watch:
        return _Watch(values, self._spike, self._window, self._consecutive)


class _Watch:
    """Judge the values of one training in their order.

    Args:
        values: healthy values from before.
        spike, window, consecutive: those of `RollbackHook`.
    """

    def __init__(self, values: Iterable[float], spike: float, window: int, consecutive: int) -> None:
        self.values = deque(values, window)
        """The last healthy values, which another thread may copy."""
        self._ordered = sorted(self.values)
        self._spike, self._window, self._consecutive = spike, window, consecutive
        self._unusual: list[float] = []  # the last values, in a row
        self.begin = 0
        """The iteration of the first of the unusual values in a row."""
        self.end = 0
        """The iteration of the last of them."""

    @property
    def is_spike(self) -> bool:
        """Whether enough values in a row are unusual."""
        return len(self._unusual) >= self._consecutive

    @property
    def lost(self) -> bool:
        """Whether the spike ends with a value that is NaN or infinite."""
        return self.is_spike and not isfinite(self._unusual[-1])

    @property
    def text(self) -> str:
        """What was found, for reports."""
        several = f"s {self.begin} to" if self.begin < self.end else ""
        at = f"in iteration{several} {self.end}"
        if self.lost:
            return f"was NaN or infinite {at}, at last {self._unusual[-1]}"
        middle = self._ordered[len(self._ordered) // 2]
        return (
            f"was above {self._spike:g} times its median {middle:.4g} {at}, at last {self._unusual[-1]:.4g}"
        )

    def add(self, iteration: int, value: float) -> None:
        """Judge the value of an iteration."""
        if self._is_unusual(value):
            if not self._unusual:
                self.begin = iteration
            self._unusual.append(value)
            self.end = iteration
        elif not self.is_spike:
            for healthy in filter(isfinite, (*self._unusual, value)):
                self._append(healthy)
            self._unusual.clear()

    def _is_unusual(self, value: float) -> bool:
        if not isfinite(value):
            return True
        ordered = self._ordered
        if len(ordered) < self._window or value <= ordered[-RANK]:
            return False
        return value > self._spike * ordered[len(ordered) // 2]

    def _append(self, value: float) -> None:
        if len(self.values) == self._window:
            del self._ordered[bisect_left(self._ordered, self.values[0])]
        self.values.append(value)
        insort(self._ordered, value)


class _State(msgspec.Struct):
    values: Sequence[float]
