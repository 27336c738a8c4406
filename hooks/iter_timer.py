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
    """Record the seconds of each iteration as the metric `time`, and its three parts as metrics.

        default_hooks=dict(timer=IterTimerHook())    # in every trainer; None removes it
        trainer.metrics.latest()["data_time"].value

    `time` is measured from this hook's call in one iteration to its call in the next one, so it includes all
    time but that of evaluations. It is the sum of three parts. `data_time` is the wait for the loader,
    `step_time` is forward, backward and the optimizer, and `hook_time` is the rest: the loop, all other
    hooks, and waits such as those for a checkpoint.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._last_call = 0.0  # the `perf_counter` of the last call
        self._evaluations_at_last_call = 0.0  # seconds of all evaluations until then

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Measure the first iteration of an epoch from here, not from the end of the epoch before."""
        self._last_call, self._evaluations_at_last_call = perf_counter(), trainer.clock.evaluations

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record the times of this iteration as metrics."""
        now, clock = perf_counter(), trainer.clock
        evaluations = clock.evaluations - self._evaluations_at_last_call
        total = now - self._last_call - evaluations
        self._last_call, self._evaluations_at_last_call = now, clock.evaluations
        step_time = clock.forward + clock.backward + clock.optimizer
        hook_time = total - clock.data - step_time
        trainer.metrics.put_floats(TIMES, [total, clock.data, step_time, hook_time])
