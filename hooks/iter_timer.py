"""A hook that measures how long iterations and their parts take."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.costs.step_clock import TIMES
from eventloop.events import AfterTrainIter, BeforeTrainEpoch
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class IterTimerHook(Hook):
    """Record the seconds per iteration as the metric `time`, and the parts that add up to it.

        default_hooks=dict(timer=IterTimerHook())    # in every trainer; None removes it
        trainer.metrics.latest()["data_time"].value

    `time` runs from this hook's call in one iteration to its call in the next, so no time is left out. `time`
    is the sum of three parts. `data_time` is the wait for the loader, `step_time` is forward, backward and
    the optimizer, and `hook_time` is the rest: the loop, waits such as those for a checkpoint, and all other
    hooks, including those after this one.
    None of the metrics includes evaluations.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._last = 0.0
        self._excluded = 0.0

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Start the clock before the first iteration of an epoch."""
        self._last, self._excluded = perf_counter(), trainer.clock.evaluations

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record the times of this iteration as metrics."""
        now, clock = perf_counter(), trainer.clock
        total = now - self._last - (clock.evaluations - self._excluded)
        self._last, self._excluded = now, clock.evaluations
        step = clock.forward + clock.backward + clock.optimizer
        rest = total - clock.data - step
        trainer.metrics.put_floats(TIMES, [total, clock.data, step, rest])
