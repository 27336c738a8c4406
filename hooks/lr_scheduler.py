"""detectron2's and Pet's scheduler hook: it says the learning rate of each iteration, and steps."""

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

BEFORE_THE_LOGGER = 59


class LRScheduler(ParamSchedulerHook):
    """Puts `lr` in each iteration, as the rate it was trained with, then steps the schedulers; takes the place of the
    default param_scheduler hook.

        hooks=[LRScheduler(scheduler=MultiStepLR(optimizer, [600, 900]))]

    The rate is that of the largest param group, in parameters; where every group has one parameter, of the first
    with the most common initial rate. With several optimizers there is a `lr/<name>` of each. It has no smoothing
    hint: what is logged is the rate, not a mean, and of every iteration, a record each. The default hook puts none; with
    that the logger logs the rate as often as it logs.

    Args:
        optimizer: whose rate is put; by default the trainer's.
        scheduler: stepped and saved with the trainer's schedulers; a scheduler, or a config.
        by_epoch, monitor: as `ParamSchedulerHook`.

    Raises:
        TypeError, ValueError: as `ParamSchedulerHook`, when the trainer is built.
    """

    puts_lr = True

    def __init__(
        self, optimizer: Any = None, scheduler: Any = None, by_epoch: bool = False, monitor: str = "loss"
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, monitor)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._shown: list[tuple[str, Group]] = []

    def attach(self, bus: Bus) -> None:
        """Subscribe; the rate is put before the logger collects, the schedulers step after it."""
        super().attach(bus)
        bus.subscribe(
            self._put_lr, AfterTrainIter, priority=BEFORE_THE_LOGGER, name=f"{type(self).__name__}.put_lr",
            budget_us=self.budget_us,
        )  # fmt: skip

    def check(self, trainer: Trainer) -> None:
        """Give the trainer the scheduler, and refuse what would never be stepped.

        Raises:
            TypeError, ValueError: as `ParamSchedulerHook`, or there is no optimizer.
        """
        if self._optimizer is None and trainer.optimizer is None:
            raise ValueError(
                "LRScheduler has no optimizer to put the lr of: pass optimizer=... to the Trainer"
            )
        if self._scheduler is not None and not any(self._scheduler is known for known in trainer.schedulers):
            trainer.schedulers.append(self._scheduler)
        super().check(trainer)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Choose the groups; loading a checkpoint has made new ones of them."""
        super().before_train(trainer, event)
        given = self._optimizer if self._optimizer is not None else trainer.optimizer
        self._shown = [
            (name, representative_group(each.param_groups)) for name, each in named_values("lr", given)
        ]

    def _optimizers(self, trainer: Trainer) -> list[Any]:
        return [*super()._optimizers(trainer), *each_optimizer(self._optimizer)]

    def _put_lr(self, trainer: Trainer, event: AfterTrainIter) -> None:
        for name, group in self._shown:
            trainer.metrics.put_scalar(name, group["lr"], False)  # by its place: a keyword is a tenth of it


def representative_group(groups: list[Group]) -> Group:
    """The group whose rate stands for all: the first with the most parameters; if all have one, the first with the
    most common initial rate. The heuristic of detectron2 and Pet."""
    largest = max(groups, key=lambda group: len(group["params"]))
    if len(largest["params"]) > 1:
        return largest
    rates = [float(group["initial_lr" if "initial_lr" in group else "lr"]) for group in groups]
    common = Counter(rates).most_common(1)[0][0]
    return groups[rates.index(common)]
