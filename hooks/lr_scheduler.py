"""A hook that steps schedulers and records each iteration's learning rate, as in detectron2 and Pet."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, BeforeTrain
from eventloop.hooks.param_scheduler import ParamSchedulerHook
from eventloop.optim.optimizers import each_optimizer, named_values
from eventloop.optim.param_groups import Group

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

BEFORE_LOGGER = 59
"""A priority just before `LoggerHook`'s, which is 60."""


class LRScheduler(ParamSchedulerHook):
    """Record the learning rate of each iteration as the metric `lr`, then step the schedulers.

        hooks=[LRScheduler(scheduler=MultiStepLR(optimizer, [600, 900]))]

    This hook replaces the default `param_scheduler` hook. It records the rate with which the iteration was
    trained, of the param group with the most parameters. If every group has one parameter, it takes the first
    group with the most common initial rate. With several optimizers the metrics are `lr/<name>`. The rate of
    each iteration is logged, not a mean over the interval. With the default hook the logger logs only the
    rate of the last iteration of each interval.

    Args:
        optimizer: the optimizer whose rate is recorded; by default the trainer's.
        scheduler: a scheduler, or a config, to step and save with the trainer's schedulers.
        by_epoch, monitor: see `ParamSchedulerHook`.

    Raises:
        TypeError, ValueError: see `ParamSchedulerHook`; raised when the trainer is built.
    """

    puts_lr = True  # so LoggerHook does not record the rate

    def __init__(
        self, optimizer: Any = None, scheduler: Any = None, by_epoch: bool = False, monitor: str = "loss"
    ) -> None:
        super().__init__(by_epoch, monitor)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._groups: list[tuple[str, Group]] = []  # each with the name of its metric

    def attach(self, bus: Bus) -> None:
        """Subscribe the recording of the rate before the logger, and the step of the schedulers after it."""
        super().attach(bus)
        bus.subscribe(
            self._put_lr,
            AfterTrainIter,
            priority=BEFORE_LOGGER,
            name=f"{type(self).__name__}.put_lr",
            budget_us=self.budget_us,
        )

    def check(self, trainer: Trainer) -> None:
        """Add the scheduler to the trainer's schedulers, and refuse schedulers that would never be stepped.

        Raises:
            TypeError, ValueError: see `ParamSchedulerHook.check`, or there is no optimizer.
        """
        if self._optimizer is None and trainer.optimizer is None:
            raise ValueError(
                "LRScheduler has no optimizer to put the lr of: pass optimizer=... to the Trainer"
            )
        if self._scheduler is not None and not any(self._scheduler is known for known in trainer.schedulers):
            trainer.schedulers.append(self._scheduler)
        super().check(trainer)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Choose the param groups whose rates are recorded; a resume may have replaced the groups."""
        super().before_train(trainer, event)
        given = self._optimizer if self._optimizer is not None else trainer.optimizer
        optimizers = named_values("lr", given)
        self._groups = [(name, representative_group(each.param_groups)) for name, each in optimizers]

    def _optimizers(self, trainer: Trainer) -> list[Any]:
        return [*super()._optimizers(trainer), *each_optimizer(self._optimizer)]

    def _put_lr(self, trainer: Trainer, event: AfterTrainIter) -> None:
        for name, group in self._groups:
            # smoothing_hint=False; as a keyword it would make the call a tenth slower
            trainer.metrics.put_scalar(name, group["lr"], False)


def representative_group(groups: list[Group]) -> Group:
    """Return the param group whose rate is recorded for the optimizer, as in detectron2 and Pet.

    It is the first group with the most parameters. If every group has one parameter, it is the first group
    with the most common initial rate.
    """
    largest = max(groups, key=lambda group: len(group["params"]))
    if len(largest["params"]) > 1:
        return largest
    rates = [float(group["initial_lr" if "initial_lr" in group else "lr"]) for group in groups]
    most_common = Counter(rates).most_common(1)[0][0]
    return groups[rates.index(most_common)]
