"""A hook that goes back to a checkpoint after a spike of a metric, and skips the batches before the spike."""

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
"""An unusual value exceeds the RANK-th largest of the last usual values; `RollbackHook` says why."""


class RollbackHook(Hook):
    """Go back to a checkpoint from before a spike of the loss, and skip the batches that led to the spike.

        hooks=[CheckpointHook(interval=500, by_epoch=False), RollbackHook(spike=3.0, margin=100)]

    PaLM was trained like this by hand (arXiv 2204.02311, section 5.1): the authors restarted some 100 steps
    before a spike, and skipped 200 to 500 batches before and during the spike. The hook calls
    `trainer.rollback`, after which the run continues like a new process that has resumed from the checkpoint.

    A value is unusual if it is NaN or infinite; or if it is above `spike` times the median of the last
    `window` usual values, and above the third largest of them. The second condition adapts to the noise: the
    loss of small batches is often three times its median. `consecutive` unusual values in a row are a spike,
    so a single bad batch is no spike. If the values of a healthy run are independent and of one distribution,
    five in a row exceed the third largest of the 100 values before them once in 4.6 million iterations: the
    probability is C(7, 5) / C(105, 5). Until there are `window` values, only NaN and infinite ones are
    unusual.

    The values are read in the background, when the logger's interval ends, so a spike is found up to an
    interval late. Only the last iteration of a training waits for a value. The values of rank 0 decide for
    all ranks. The rollbacks are recorded as commands in `commands.jsonl`, and a repetition of the run applies
    them again.

    If no checkpoint is old enough, the hook logs a warning, once, and the run goes on; but if the metric is
    NaN or infinite, the hook raises an error, so that no checkpoint with lost weights is saved. After
    `max_rollbacks` rollbacks the next spike makes the run go back to a checkpoint and stop there.

    Args:
        monitor: a metric that is logged in each training iteration, such as "loss" or "grad_norm".
        spike: the factor of the median above which a value may be unusual.
        window: the number of values from which the median and the third largest value are taken.
        margin: the least number of iterations from the checkpoint to the first unusual value.
        max_rollbacks: the number of rollbacks after which the next spike stops the run; rollbacks before a
            resume count too.
        skip: True skips the batches from the checkpoint to the last unusual value that was found; False
            trains on them again.
        scale_lr: a factor that each rollback applies to the learning rates and their schedules; None does not
            change them.
        consecutive: the number of unusual values in a row that make a spike.

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
        self._margin, self._max_rollbacks, self._skip = margin, max_rollbacks, skip
        self._scale_lr = 1.0 if scale_lr is None else scale_lr
        self._detector = self._new_detector(())
        self._requested = False  # whether a rollback is requested
        self._warned = False  # whether the warning of a refused rollback was logged

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer without a logger or checkpoints, or with a CheckInvalidLossHook.

        Raises:
            ValueError: the trainer has no LoggerHook or no CheckpointHook, or it has a CheckInvalidLossHook.
        """
        if trainer.fast_dev_run:
            return
        needed = ((LoggerHook, "logs what it monitors"), (CheckpointHook, "saves where it goes"))
        for hook_class, purpose in needed:
            if not any(isinstance(hook, hook_class) for hook in trainer.hooks):
                raise ValueError(
                    f"RollbackHook needs a {hook_class.__name__}, which {purpose}: the trainer has none"
                )
        if any(isinstance(hook, CheckInvalidLossHook) for hook in trainer.hooks):
            raise ValueError(
                "expected RollbackHook or CheckInvalidLossHook, got both: CheckInvalidLossHook ends the run "
                "at a loss from which RollbackHook goes back; remove CheckInvalidLossHook"
            )
        if trainer.rank == 0:
            trainer.metrics.followers.append(partial(self._receive, trainer))

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start a detector with the usual values of the last training, or of the checkpoint.

        A rollback that was requested in the last training is withdrawn, because its iterations are abandoned.
        """
        self._detector = self._new_detector(self._detector.values)
        self._requested = False
        commands = trainer.stops.commands
        for command in list(commands):
            if command.source == self.name:
                commands.remove(command)

    @on(priority=Priority.LOW)
    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Read the remaining values in the last iteration, so that a spike at the end is found too."""
        if self.is_last_train_iter(trainer) and trainer.rank == 0:
            trainer.metrics.read_pending()

    def command_refused(self, trainer: Trainer, event: CommandRefused) -> None:
        """Log a warning if this hook's rollback was refused, for example because no checkpoint is old enough.

        Raises:
            FloatingPointError: the metric is NaN or infinite.
        """
        if event.source != self.name or trainer.stops.goes_back:
            return
        if decided_by_rank_0(lambda: self._detector.lost):
            raise FloatingPointError(
                f"{event.arguments.get('reason')}, and the run cannot go back: {event.reason}; save more "
                "often, or lower RollbackHook(margin=...)"
            )
        if not self._warned:
            logger.warning("RollbackHook does not go back: %s", event.reason)
        self._warned = True
        self._detector, self._requested = self._new_detector(()), False

    def state_dict(self) -> dict[str, Any]:
        """Return the last usual values of the metric."""
        return {"values": [*self._detector.values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the usual values of a checkpoint.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        saved = read_as(_State, state, "RollbackHook cannot take its state")
        self._detector = self._new_detector(saved.values)

    # --- in the background ---------------------------------------------------------------------------------

    def _receive(self, trainer: Trainer, rows: list[Row]) -> None:
        """Add the metric's values to the detector, and request a rollback after a spike.

        The metrics call this method on the thread that has read the values.

        Args:
            rows: the metrics of one iteration each.
        """
        detector = self._detector
        for row in rows:
            if self._monitor in row.name_set.names and row.phase.mode == "train":
                detector.add(row.iteration, row.scalars()[self._monitor])
        is_requested = self._requested or trainer.stops.goes_back
        if not detector.is_spike or is_requested or trainer.commands.repeating or not trainer.running:
            return
        self._requested = True
        with suppress(RuntimeError):  # the run has just ended
            self._request_rollback(trainer, detector)

    def _request_rollback(self, trainer: Trainer, detector: _SpikeDetector) -> None:
        """Request that the training thread goes back, and after `max_rollbacks` also stops the run."""
        applied = [command for command in trainer.applied_commands if command.source == self.name]
        stops = len(applied) >= self._max_rollbacks
        reason = f"{self._monitor} {detector.text}"
        if stops:
            reason += f", and max_rollbacks={self._max_rollbacks} are used up"
        logger.warning("RollbackHook: %s; going back to a checkpoint", reason)
        trainer.commands.request(
            "rollback",
            source=self.name or "",
            before=max(1, detector.begin - self._margin + 1),
            until=detector.end + 1,
            skip="seen" if self._skip else 0,
            scale_lr=self._scale_lr,
            stop=stops,
            reason=reason,
        )

    def _new_detector(self, values: Iterable[float]) -> _SpikeDetector:
        return _SpikeDetector(values, self._spike, self._window, self._consecutive)


class _SpikeDetector:
    """Find a spike in the values of one training, which are added in order.

    Args:
        values: the last usual values of an earlier training, or of a checkpoint.
        spike, window, consecutive: see `RollbackHook`.
    """

    def __init__(self, values: Iterable[float], spike: float, window: int, consecutive: int) -> None:
        self.values = deque(values, window)
        """The last usual values; the training thread copies them for a checkpoint."""
        self._sorted = sorted(self.values)  # the same values in ascending order
        self._spike, self._window, self._consecutive = spike, window, consecutive
        self._unusual: list[float] = []
        """The unusual values since the last usual one."""
        self.begin = 0
        """The iteration of the first unusual value since the last usual one."""
        self.end = 0
        """The iteration of the last unusual value."""

    @property
    def is_spike(self) -> bool:
        """True once enough values in a row are unusual."""
        return len(self._unusual) >= self._consecutive

    @property
    def lost(self) -> bool:
        """True if there is a spike whose last value is NaN or infinite, so that the weights may be lost."""
        return self.is_spike and not isfinite(self._unusual[-1])

    @property
    def text(self) -> str:
        """A description of the spike for messages, such as "was NaN or infinite in iteration 7, ..."."""
        several = f"s {self.begin} to" if self.begin < self.end else ""
        iterations = f"in iteration{several} {self.end}"
        last = self._unusual[-1]
        if self.lost:
            return f"was NaN or infinite {iterations}, at last {last}"
        return (
            f"was above {self._spike:g} times its median {self._median:.4g} {iterations}, at last {last:.4g}"
        )

    def add(self, iteration: int, value: float) -> None:
        """Add the value of an iteration to the unusual values in a row, or to the last usual values.

        A usual value ends the row, unless the row is a spike: then the spike stays until a rollback, for
        which `RollbackHook` makes a new detector.
        """
        if self._is_unusual(value):
            if not self._unusual:
                self.begin = iteration
            self._unusual.append(value)
            self.end = iteration
        elif not self.is_spike:
            # the unusual values before this one are too few for a spike, so they too become usual ones
            for finite in filter(isfinite, (*self._unusual, value)):
                self._append(finite)
            self._unusual.clear()

    @property
    def _median(self) -> float:
        """The median of the last usual values."""
        return self._sorted[len(self._sorted) // 2]

    def _is_unusual(self, value: float) -> bool:
        """Return whether a value is not finite, or unusually high as `RollbackHook` defines it."""
        if not isfinite(value):
            return True
        if len(self._sorted) < self._window:
            return False
        return value > self._sorted[-RANK] and value > self._spike * self._median

    def _append(self, value: float) -> None:
        """Append a usual value, and drop the oldest one if the window is full."""
        if len(self.values) == self._window:
            del self._sorted[bisect_left(self._sorted, self.values[0])]
        self.values.append(value)
        insort(self._sorted, value)


class _State(msgspec.Struct):
    values: Sequence[float]
