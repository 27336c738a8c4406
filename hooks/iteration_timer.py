"""A hook that measures iterations after a warm-up, and logs the speed of a training at its end."""

from __future__ import annotations

from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.events.priority import Priority
from eventloop.hooks.hook import on
from eventloop.hooks.iter_timer import IterTimerHook
from eventloop.hooks.log_text import log_text
from eventloop.migration.names import knowing_others
from eventloop.util.checks import at_least, check_bools

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class IterationTimer(IterTimerHook):
    """Measure iterations after a warm-up, and log a summary at the end, as detectron2 and Pet do.

        IterationTimer(warmup_iter=3)

    This hook replaces `IterTimerHook`, and records the same metrics `time`, `data_time`, `step_time` and
    `hook_time`. At the end it emits two texts named `timing`, in the format that scripts for detectron2
    search for:

        Overall training speed: 47 iterations in 0:00:09 (0.198211 s / it)
        Total training time: 0:00:12 (0:00:02 on hooks, 0:00:01 on evaluations)

    The speed is that of loading and stepping: `data_time + step_time`. The total time runs from the end of
    the warm-up to this hook's `after_train`, which runs among the last. The time on hooks is all time except
    loading, stepping and evaluations, so it includes the loop.

    Args:
        warmup_iter: iterations to leave out at the start of a training; a resumed training leaves them out
            again.
        ignore_warmup_time: False includes the warm-up iterations.

    Raises:
        TypeError, ValueError: `warmup_iter` is not an int of at least 0, or `ignore_warmup_time` is not a
            bool.
    """

    @knowing_others
    def __init__(self, warmup_iter: int = 3, ignore_warmup_time: bool = True) -> None:
        super().__init__()
        check_bools(ignore_warmup_time=ignore_warmup_time)
        at_least("warmup_iter", warmup_iter, 0)
        self._warmup = warmup_iter if ignore_warmup_time else 0
        self._warmed_up = self._counted = 0
        self._worked = self._began = self._excluded_at_start = 0.0

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start the clock and the warm-up."""
        self._warmed_up = 0
        self._start(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record the times of this iteration as metrics, unless it belongs to the warm-up."""
        if self._warmed_up < self._warmup:
            self._warmed_up += 1
            self._start(trainer)
            return
        super().after_train_iter(trainer, event)
        clock = trainer.clock
        self._worked += clock.data + clock.forward + clock.backward + clock.optimizer
        self._counted += 1

    @on(priority=Priority.LOWEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log the speed and the total time."""
        total = perf_counter() - self._began
        evaluations = trainer.clock.evaluations - self._excluded_at_start
        if self._counted and self._worked > 0:
            log_text(
                trainer,
                "timing",
                f"Overall training speed: {self._counted} iterations in {_whole(self._worked)} "
                f"({self._worked / self._counted:.6f} s / it)",
            )
        hooks = f"{_whole(max(0.0, total - evaluations - self._worked))} on hooks"
        others = f", {_whole(evaluations)} on evaluations" if evaluations else ""
        log_text(trainer, "timing", f"Total training time: {_whole(total)} ({hooks}{others})")

    def _start(self, trainer: Trainer) -> None:
        self._counted, self._worked = 0, 0.0
        self._began = self._last = perf_counter()
        self._excluded_at_start = self._excluded = trainer.clock.evaluations


def _whole(seconds: float) -> str:
    """Format seconds as `0:01:40`."""
    return str(timedelta(seconds=int(seconds)))
