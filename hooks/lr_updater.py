"""Define the base classes of mmcv's policies, which set learning rate or momentum from the run's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from eventloop.events import COMPLETED, AfterTrain, BeforeRun, BeforeTrainEpoch, BeforeTrainIter
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import (
    FACTORS,
    Group,
    check_has_value,
    groups_of,
    initial_value,
    multiplied,
    read_value,
    write_value,
)
from eventloop.optim.policies import Policy
from eventloop.optim.schedulers import build_schedulers
from eventloop.util.checks import check_bools, check_choice, number, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

WARMUPS = ("constant", "linear", "exp")


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class ParamUpdaterHook(Policy, Hook):
    """Set the rate or momentum of every param group from its initial value and the counters of the run.

    This is the base class of `LrUpdaterHook` and `MomentumUpdaterHook`. The dataclass fields of a subclass
    are its arguments.
    """

    getter: ClassVar[str] = "get_lr"
    """The name of the method with which a subclass computes the value."""

    by_epoch: bool = True
    warmup: str | None = None
    warmup_iters: int = 0
    warmup_ratio: float = 0.1
    warmup_by_epoch: bool = False

    # for a subclass that is no dataclass: a generated constructor would take the arguments by keyword only
    def __init__(
        self,
        by_epoch: bool = True,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:
        self.by_epoch, self.warmup, self.warmup_iters = by_epoch, warmup, warmup_iters
        self.warmup_ratio, self.warmup_by_epoch = warmup_ratio, warmup_by_epoch
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the arguments, and store the formula; refuse a class with neither formula nor getter."""
        check_bools(by_epoch=self.by_epoch, warmup_by_epoch=self.warmup_by_epoch)
        if self.counts_iterations and self.by_epoch:
            raise ValueError(f"{type(self).__name__} counts iterations, got by_epoch=True: leave it out")
        if self.warmup is not None:
            check_choice("warmup", self.warmup, WARMUPS)
            positive("warmup_iters", self.warmup_iters)
            number("warmup_ratio", self.warmup_ratio, above=0, most=1)
        self._initial_name = f"initial_{self.param_name}"
        self._initial_values: list[float] = []
        self._values_when_built: list[float] = []
        self._has_run = False
        self._formula = self.formula()
        if self._formula is None and not self._overrides_getter():
            raise TypeError(
                f"{type(self).__name__} has no {self.getter}(trainer, base_{self.param_name}): define it, or "
                "use a subclass that does"
            )

    def _overrides_getter(self) -> bool:
        """Return whether a subclass of LrUpdaterHook or MomentumUpdaterHook has its own getter.

        The getters of these two classes call the formula.
        """
        classes = type(self).__mro__
        owner = next(cls for cls in classes if self.getter in vars(cls) or cls is Hook)
        return ParamUpdaterHook not in owner.__bases__

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the policy: all public attributes that `Hook` does not have."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and not hasattr(Hook, name)
        }

    def check(self, trainer: Trainer) -> None:
        """Store the param groups' initial values, and refuse a trainer with which the hook cannot work.

        Raises:
            ValueError: there is no optimizer, the hook counts epochs and the run does not, or another hook or
                scheduler sets the same value.
        """
        name = type(self).__name__
        if trainer.optimizer is None:
            raise ValueError(
                f"{name} has no optimizer to set {self.param_name} of: pass optimizer=... to the Trainer"
            )
        if self.by_epoch and not trainer.by_epoch:
            raise ValueError(
                f"{name} counts epochs, and a run measured in iterations has none: give it by_epoch=False"
            )
        self._refuse_second(trainer)
        for optimizer in named_optimizers(trainer.optimizer).values():
            check_has_value(optimizer, self.param_name)
        self._set_initial_values(trainer)
        groups = groups_of(trainer.optimizer)
        self._initial_values = [initial_value(group, self.param_name) for group in groups]
        self._values_when_built = [float(read_value(group, self.param_name)) for group in groups]
        if trainer.train_loader is not None:
            self._warmup_length(trainer)  # raises if the warm-up counts epochs of unknown length
            if self.reaches_end and self._formula is not None:
                self._formula(1.0, 0, self.max_progress(trainer))  # raises if the run has the wrong length

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Replace initial values if the param groups were edited since the trainer was built, as in mmcv.

        Groups without an initial value, as from some checkpoints, get that of the built trainer.
        """
        groups = groups_of(trainer.optimizer)
        if trainer.iter == 0 and not self._has_run:
            for group, value_when_built in zip(groups, self._values_when_built, strict=False):
                if (value := read_value(group, self.param_name)) != value_when_built:
                    group[self._initial_name] = float(value)
        self._has_run = True
        for group, value in zip(groups, self._initial_values, strict=False):
            group.setdefault(self._initial_name, value)

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Set the value for this epoch, if the policy counts epochs."""
        if self.by_epoch:
            self._set(trainer)

    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Set the value for this iteration, if the policy counts iterations or is in its warm-up."""
        # <=, because the iteration after the warm-up must set the value without the warm-up's factor
        if not self.by_epoch or (self.warmup is not None and trainer.iter <= self._warmup_length(trainer)):
            self._set(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Set the value after the last epoch or iteration, if the policy depends on the run's length."""
        if self.reaches_end and event.reason == COMPLETED:
            self._set(trainer)

    # --- for policies --------------------------------------------------------------------------------------

    def progress(self, trainer: Trainer) -> int:
        """Return the current epoch, or the iteration with `by_epoch=False`."""
        return trainer.epoch if self.by_epoch else trainer.iter

    def done(self, trainer: Trainer) -> float:
        """Return the completed fraction of the run, from 0 to 1."""
        return min(self.progress(trainer) / self.max_progress(trainer), 1.0)

    def from_formula(self, trainer: Trainer, base: float) -> float:
        """Return the formula's current value for a group whose initial value is `base`."""
        assert self._formula is not None
        progress, total = self.progress(trainer), 0
        if self.reaches_end:
            total = self.max_progress(trainer)
            progress = min(progress, total)
        return self._formula(base, progress, total)

    def max_progress(self, trainer: Trainer) -> int:
        """Return the number of epochs in the run, or of iterations with `by_epoch=False`.

        Raises:
            ValueError: the number of iterations is not known.
        """
        if self.by_epoch:
            assert trainer.max_epochs is not None
            return trainer.max_epochs
        if trainer.max_iters is not None:
            return trainer.max_iters
        remedy = "give the Trainer max_iters in place of max_epochs"
        return (trainer.max_epochs or 0) * self._epoch_length(trainer, "by_epoch=False", remedy)

    def _value_without_warmup(self, trainer: Trainer, group: Group) -> float:
        """Return the policy's value for a param group, before the warm-up is applied."""
        value: float = getattr(self, self.getter)(trainer, group[self._initial_name])
        return value

    def _apply_warmup(self, value: float, factor: float) -> float:
        """Apply a warm-up factor, in (0, 1], to a value."""
        return value * factor

    def _set_initial_values(self, trainer: Trainer) -> None:
        """Set the param groups' initial values, in policies that do not start from the optimizer's values."""

    # --- setting the values --------------------------------------------------------------------------------

    def _set(self, trainer: Trainer) -> None:
        """Set the current value in every param group."""
        # runs in every iteration of some policies, so plain floats, the usual case, are set without a call
        name, initial = self.param_name, self._initial_name
        warmup_factor = None if self.warmup is None else self._warmup_factor(trainer)
        for group in groups_of(trainer.optimizer):
            if type(group.get(initial)) is not float:  # a group that was added during the run
                initial_value(group, name)
            value = self._value_without_warmup(trainer, group)
            if warmup_factor is not None:
                value = self._apply_warmup(value, warmup_factor)
            if FACTORS in group:  # set by a command such as `eventloop tell RUN set "lr*=0.5"`
                value = multiplied(group, name, value)
            if type(group.get(name)) is float:
                group[name] = value
            else:
                write_value(group, name, value)

    def _warmup_factor(self, trainer: Trainer) -> float | None:
        """Return the current factor of the warm-up, or None after the warm-up."""
        length, ratio = self._warmup_length(trainer), self.warmup_ratio
        if trainer.iter >= length:
            return None
        remaining = 1 - trainer.iter / length  # the fraction of the warm-up that is left
        if self.warmup == "constant":
            return ratio
        if self.warmup == "linear":
            return 1 - remaining * (1 - ratio)
        return float(ratio**remaining)

    def _warmup_length(self, trainer: Trainer) -> int:
        """Return the length of the warm-up in iterations; 0 without a warm-up."""
        if self.warmup is None:
            return 0
        if not self.warmup_by_epoch:
            return self.warmup_iters
        remedy = "leave it out and give warmup_iters in iterations"
        return self.warmup_iters * self._epoch_length(trainer, "warmup_by_epoch=True", remedy)

    def _epoch_length(self, trainer: Trainer, setting: str, remedy: str) -> int:
        """Return the number of iterations in an epoch.

        Args:
            setting: the argument of this hook that needs the number, for the error message.
            remedy: a configuration that does not need the number, for the error message.

        Raises:
            ValueError: the number is not known.
        """
        length = trainer.counting.iterations(trainer.limits.length("train", trainer.loader))
        if length is None:
            raise ValueError(
                f"{type(self).__name__} with {setting} needs the number of iterations of an epoch, and the "
                f"train loader has no length: {remedy}, or give the Trainer limit_batches, an int"
            )
        return length

    def _refuse_second(self, trainer: Trainer) -> None:
        """Refuse another hook or scheduler that sets the same value."""
        for hook in trainer.hooks:
            if isinstance(hook, ParamUpdaterHook) and hook is not self and hook.param_name == self.param_name:
                raise ValueError(
                    f"{type(self).__name__} and {type(hook).__name__} both set {self.param_name} each time, "
                    "so only the later one would have an effect: pass only one of the two"
                )
        build_schedulers(trainer.schedulers, trainer.optimizer, trainer.facts.run)
        for scheduler in trainer.schedulers:
            scheduled = {getattr(scheduler, "param_name", "lr")}
            if getattr(scheduler, "cycle_momentum", False):  # PyTorch's OneCycleLR and CyclicLR
                scheduled.add("momentum")
            if self.param_name in scheduled:
                raise ValueError(
                    f"{type(self).__name__} sets {self.param_name} each time, so {type(scheduler).__name__} "
                    "in schedulers would have no effect: pass only one of the two"
                )


class LrUpdaterHook(ParamUpdaterHook):
    """Set the learning rate from `get_lr`; the base of mmcv's learning rate policies.

        class HalveLrUpdaterHook(LrUpdaterHook):
            def get_lr(self, trainer, base_lr):
                return base_lr * 0.5 ** trainer.epoch

    The rate is set before each epoch, or with `by_epoch=False` before each iteration, in all optimizers. It
    is computed only from `initial_lr` of the param group and the trainer's counters, so a resumed run has the
    same rates as an uninterrupted one. Iterations whose optimizer step was skipped count, as in mmcv; the
    schedulers of `eventloop.optim.schedulers` do not count them.

    The warm-up lowers the rate in the first W = `warmup_iters` iterations. The factor at iteration i, with r
    = `warmup_ratio`, is r for "constant", 1 - (1 - i / W) (1 - r) for "linear" and r ** (1 - i / W) for
    "exp".

    Args:
        by_epoch: True sets the rate before each epoch, False before each iteration; a run measured in
            iterations needs False.
        warmup: None, "constant", "linear" or "exp".
        warmup_iters: the length of the warm-up in iterations, or in epochs with `warmup_by_epoch`.
        warmup_ratio: in (0, 1], the factor at the start of the warm-up.
        warmup_by_epoch: True counts `warmup_iters` in epochs.

    Raises:
        TypeError: the class has no `get_lr`, or an argument is of the wrong type.
        ValueError: `warmup` is unknown, or a number is out of range.
    """

    priority = Priority.VERY_HIGH
    owns = "the learning rate or momentum of each iteration"

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return the current rate of a param group whose initial rate is `base_lr`, without warm-up."""
        return self.from_formula(trainer, base_lr)
