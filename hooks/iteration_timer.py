"""How fast a training was, said at its end."""

from __future__ import annotations

from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.events.priority import Priority
from eventloop.hooks.hook import on
from eventloop.hooks.iter_timer import IterTimerHook
from eventloop.hooks.report import report
from eventloop.migration.arguments import knowing_others
from eventloop.util.checks import at_least, check_bools

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class IterationTimer(IterTimerHook):
    """detectron2's and Pet's timer: `IterTimerHook` less a warm-up, and a summary. It takes that hook's place.

        IterationTimer(warmup_iter=3)

    Puts `time`, `data_time`, `step_time` and `hook_time` as `IterTimerHook` does, and at the end says, as a text
    `timing`, in the words that scripts of theirs look for:

        Overall training speed: 47 iterations in 0:00:09 (0.198211 s / it)
        Total training time: 0:00:12 (0:00:02 on hooks, 0:00:01 on evaluations)

    The speed is that of loading and stepping: `data_time + step_time`. The total is what went by since the warm-up,
    to the last handler of `after_train`; what is neither that nor an evaluation went to hooks, those after this one
    too, and to the loop.

    Args:
        warmup_iter: iterations at the start of a training, of a resumed one too, that are left out.
        ignore_warmup_time: False counts and puts them like all others.

    Raises:
        TypeError, ValueError: `warmup_iter` is no int of at least 0, or `ignore_warmup_time` no bool.
    """

    @knowing_others
    def __init__(self, warmup_iter: int = 3, ignore_warmup_time: bool = True) -> None:
        super().__init__()
        check_bools(ignore_warmup_time=ignore_warmup_time)
        at_least("warmup_iter", warmup_iter, 0)
        self._warmup = warmup_iter if ignore_warmup_time else 0
        self._left_out = self._counted = 0
        self._worked = self._began = self._excluded_at_start = 0.0

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start the clock."""
        self._left_out = 0
        self._start(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Put the times of this iteration, after the warm-up."""
        if self._left_out < self._warmup:
            self._left_out += 1
            self._start(trainer)
            return
        super().after_train_iter(trainer, event)
        clock = trainer.clock
        self._worked += clock.data + clock.forward + clock.backward + clock.optimizer
        self._counted += 1

    @on(priority=Priority.LOWEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Say it."""
        total = perf_counter() - self._began
        evaluations = trainer.clock.excluded - self._excluded_at_start
        if self._counted and self._worked > 0:
            report(
                trainer,
                "timing",
                f"Overall training speed: {self._counted} iterations in {_whole(self._worked)} "
                f"({self._worked / self._counted:.6f} s / it)",
            )
        hooks = f"{_whole(max(0.0, total - evaluations - self._worked))} on hooks"
        others = f", {_whole(evaluations)} on evaluations" if evaluations else ""
        report(trainer, "timing", f"Total training time: {_whole(total)} ({hooks}{others})")

    def _start(self, trainer: Trainer) -> None:
        self._counted, self._worked = 0, 0.0
        self._began = self._last = perf_counter()
        self._excluded_at_start = self._excluded = trainer.clock.excluded


def _whole(seconds: float) -> str:
    """`0:01:40`."""
    return str(timedelta(seconds=int(seconds)))
