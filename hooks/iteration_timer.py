"""A hook that times the iterations after a warm-up, and logs the speed of a training at its end."""

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
    """Time the iterations after a warm-up, and log a summary at the end, as detectron2 and Pet do.

        IterationTimer(warmup_iter=3)

    This hook replaces `IterTimerHook`, and records the same metrics `time`, `data_time`, `step_time` and
    `hook_time`. At the end it emits two texts named `timing`, in the format that scripts for detectron2
    search for:

        Overall training speed: 47 iterations in 0:00:09 (0.198211 s / it)
        Total training time: 0:00:12 (0:00:02 on hooks, 0:00:01 on evaluations)

    The speed includes loading and the training step: `data_time + step_time`. The total time is measured from
    the end of the warm-up to this hook's `after_train`, which has the lowest priority. The time on hooks is
    all time except loading, training steps and evaluations, so it includes the loop.

    Args:
        warmup_iter: the number of iterations at the start of a training, also of a resumed one, that are not
            timed.
        ignore_warmup_time: False times the warm-up iterations too.

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
        self._warmup_done = self._iterations = 0  # the iterations of the warm-up, and the timed ones
        self._seconds = 0.0  # of loading and the training step in the timed iterations
        self._start_time = 0.0  # the `perf_counter` at the end of the warm-up
        self._evaluations_at_start = 0.0  # the seconds of all evaluations until then

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start the timing and the warm-up."""
        self._warmup_done = 0
        self._start(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record the times of this iteration as metrics, unless it belongs to the warm-up."""
        if self._warmup_done < self._warmup:
            self._warmup_done += 1
            self._start(trainer)
            return
        super().after_train_iter(trainer, event)
        clock = trainer.clock
        self._seconds += clock.data + clock.forward + clock.backward + clock.optimizer
        self._iterations += 1

    @on(priority=Priority.LOWEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log the speed and the total time."""
        total = perf_counter() - self._start_time
        evaluations = trainer.clock.evaluations - self._evaluations_at_start
        hooks = max(0.0, total - evaluations - self._seconds)
        if self._iterations and self._seconds > 0:
            log_text(
                trainer,
                "timing",
                f"Overall training speed: {self._iterations} iterations in {_clock_text(self._seconds)} "
                f"({self._seconds / self._iterations:.6f} s / it)",
            )
        parts = f"{_clock_text(hooks)} on hooks"
        if evaluations:
            parts += f", {_clock_text(evaluations)} on evaluations"
        log_text(trainer, "timing", f"Total training time: {_clock_text(total)} ({parts})")

    def _start(self, trainer: Trainer) -> None:
        """Start the timing anew, with the next iteration as the first one."""
        self._iterations, self._seconds = 0, 0.0
        self._start_time = self._last_call = perf_counter()
        self._evaluations_at_start = self._evaluations_at_last_call = trainer.clock.evaluations


def _clock_text(seconds: float) -> str:
    """Format whole seconds as `0:01:40`."""
    return str(timedelta(seconds=int(seconds)))
