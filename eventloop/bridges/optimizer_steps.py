"""Emit events around the steps of a host's optimizers, and measure the steps, by PyTorch's hooks."""

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
    """Emit `before_optimizer_step` and `after_optimizer_step` around each step within the block.

    The time of a step counts as the optimizer phase, and its learning rate is logged. The function that the
    block gets is called when the trainer has another optimizer.
    """
    began, waits = 0.0, trainer.clock.waits
    wanted = trainer.bus.wanted(
        BeforeOptimizerStep, AfterOptimizerStep
    )  # saves two calls a step (`benchmarks.bridges`)

    def before(optimizer: Any, *_: Any) -> None:
        nonlocal began
        trainer.record_rates(optimizer)
        if wanted[BeforeOptimizerStep]:
            trainer.announce(BeforeOptimizerStep)
        began = perf_counter() - waits.seconds

    def after(*_: Any) -> None:
        trainer.clock.charge("optimizer", perf_counter() - waits.seconds - began)
        if wanted[AfterOptimizerStep]:
            trainer.announce(AfterOptimizerStep)

    handles: list[Any] = []

    def release() -> None:
        while handles:
            handles.pop().remove()

    def follow() -> None:
        release()
        for each in each_optimizer(trainer.optimizer):
            optimizer = hookable(each) or each  # Accelerate's wrapper calls no hooks
            handles.extend(
                [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            )

    follow()
    try:
        yield follow
    finally:
        release()
