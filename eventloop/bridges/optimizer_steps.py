"""Emit events around the optimizer steps of another engine (the host), and measure the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from eventloop.bridges.driven import DrivenTrainer
from eventloop.events import AfterOptimizerStep, BeforeOptimizerStep
from eventloop.optim.optimizers import each_optimizer, hookable


@contextmanager
def announced_steps(trainer: DrivenTrainer) -> Iterator[Callable[[], None]]:
    """Emit `before_optimizer_step` and `after_optimizer_step` around each step of the trainer's optimizers.

    The time of a step counts in the optimizer phase, and its learning rate is logged. This ends with the
    block. The block receives a function, which it must call whenever the trainer's optimizers have changed.
    """
    # `waits.seconds` is the total of all waits so far, such as for a checkpoint. It is subtracted from both
    # times, so that a wait within the step is no part of the step's time
    began, waits = 0.0, trainer.clock.waits
    # kept up to date by the bus; looked up once, which saves two calls a step (`benchmarks.bridges`)
    has_subscribers = trainer.bus.wanted(BeforeOptimizerStep, AfterOptimizerStep)

    def before(optimizer: Any, *_: Any) -> None:
        """Begin a step: log its learning rate, emit `before_optimizer_step`, and start the clock after it."""
        nonlocal began
        trainer.record_rates(optimizer)
        if has_subscribers[BeforeOptimizerStep]:
            trainer.announce(BeforeOptimizerStep)
        began = perf_counter() - waits.seconds

    def after(*_: Any) -> None:
        """End a step: count its time in the optimizer phase, and emit `after_optimizer_step`."""
        trainer.clock.charge("optimizer", perf_counter() - waits.seconds - began)
        if has_subscribers[AfterOptimizerStep]:
            trainer.announce(AfterOptimizerStep)

    handles: list[Any] = []

    def remove_hooks() -> None:
        """Remove all hooks from the optimizers that have them."""
        while handles:
            handles.pop().remove()

    def register_hooks() -> None:
        """Register `before` and `after` at the present optimizers, and remove them from the former ones."""
        remove_hooks()
        for wrapper in each_optimizer(trainer.optimizer):
            optimizer = hookable(wrapper) or wrapper  # Accelerate's wrapper of an optimizer calls no hooks
            handles.extend(
                [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            )

    register_hooks()
    try:
        yield register_hooks
    finally:
        remove_hooks()
