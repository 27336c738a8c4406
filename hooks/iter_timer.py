"""How long iterations take, and on what."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.events import AfterTrainIter, AfterVal, BeforeTrainEpoch, BeforeVal
from eventloop.hooks.hook import Hook, on
from eventloop.priority import Priority

if TYPE_CHECKING:
    from eventloop.trainer import Trainer


class IterTimerHook(Hook):
    """Puts, in seconds per iteration, `time` and its parts: `data_time + step_time + hook_time == time`.

    `time` runs from this hook's place in one iteration to the same place in the next, so nothing falls between.
    `data_time` is the wait for the loader, measured there; `step_time` forward, backward and the optimizer;
    `hook_time` the rest: all other hooks, those after this one too, and the loop. A validation in between
    belongs to none of them.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._last = 0.0
        self._validation_began = 0.0

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Start the clock."""
        self._last = perf_counter()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Put the times of this iteration."""
        now = perf_counter()
        clock, put = trainer.clock, trainer.metrics.put_scalar
        total = now - self._last
        self._last = now
        step = clock.forward + clock.optimize
        put("time", total)
        put("data_time", clock.data)
        put("step_time", step)
        put("hook_time", total - clock.data - step)

    @on(priority=Priority.HIGHEST)
    def before_val(self, trainer: Trainer, event: BeforeVal) -> None:
        """Stop the clock, before any other hook of the validation."""
        self._validation_began = perf_counter()

    @on(priority=Priority.LOWEST)
    def after_val(self, trainer: Trainer, event: AfterVal) -> None:
        """Let it go on, after all of them, as if there had been no validation."""
        self._last += perf_counter() - self._validation_began
