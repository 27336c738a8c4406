"""mmcv's momentum policies, the counterparts of the learning rate policies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eventloop.events.priority import Priority
from eventloop.hooks.lr_cycles import refuse_by_epoch
from eventloop.hooks.lr_updater import ParamUpdaterHook
from eventloop.optim.formulas import (
    Cycles,
    Minimum,
    OneCycle,
    Steps,
    annealing_cos,
    annealing_linear,
    check_given,
    per_group,
)
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import Group, groups_of, initial_value, number, write_value

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class MomentumUpdaterHook(ParamUpdaterHook):
    """Set the momentum from `get_momentum`; the base of mmcv's momentum policies.

        class LessMomentumUpdaterHook(MomentumUpdaterHook):
            def get_momentum(self, trainer, base_momentum):
                return base_momentum * 0.9 ** trainer.epoch

    It sets `momentum`, or the first of `betas` if the optimizer has those, from `initial_momentum` of each
    param group. It works as `LrUpdaterHook`, except that a warm-up divides by its factor, so it starts with
    more momentum.

    Args:
        by_epoch, warmup, warmup_iters, warmup_by_epoch: see `LrUpdaterHook`.
        warmup_ratio: in (0, 1], the divisor of the momentum at the start of the warm-up.

    Raises:
        TypeError, ValueError: see `LrUpdaterHook`.

    Warns:
        UserWarning: the warm-up starts with a momentum of 1 or more, with which no training converges.
    """

    priority = Priority.HIGH
    param_name = "momentum"

    def __init__(
        self, by_epoch: bool = True, warmup: str | None = None, warmup_iters: int = 0,
        warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        own, base = type(self), MomentumUpdaterHook
        if own.get_momentum is base.get_momentum and own._value_without_warmup is base._value_without_warmup:
            raise TypeError(
                f"{own.__name__} has no get_momentum(trainer, base_momentum): define it, or use a subclass "
                "that does"
            )
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer that the hook cannot serve, and warn of a warm-up with a momentum of 1 or more.

        Raises:
            ValueError: see `LrUpdaterHook.check`.
        """
        super().check(trainer)
        if self.warmup is None:
            return
        first = (
            max(initial_value(group, "momentum") for group in groups_of(trainer.optimizer))
            / self.warmup_ratio
        )
        if first >= 1:
            warnings.warn(
                f"{type(self).__name__} divides the momentum by {self.warmup_ratio} at the start of the "
                f"warm-up, which makes it {first:.3g}: with 1 or more the velocity only grows; raise "
                "warmup_ratio",
                UserWarning,
                stacklevel=2,
            )

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return the momentum of a group whose initial momentum is `base_momentum`, without warm-up."""
        raise NotImplementedError

    def _value_without_warmup(self, trainer: Trainer, group: Group) -> float:
        return self.get_momentum(trainer, group["initial_momentum"])

    def _apply_warmup(self, value: float, factor: float) -> float:
        return value / factor


class StepMomentumUpdaterHook(MomentumUpdaterHook):
    """Multiply the momentum by `gamma` at each step, but not below `min_momentum`.

        hooks=[StepMomentumUpdaterHook(step=[16, 22], gamma=0.9)]

    `step` is an interval, or a list of epochs or iterations.

    Raises:
        TypeError, ValueError: see `StepLrUpdaterHook`.
    """

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.5, min_momentum: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._steps = Steps(step)
        self._gamma = number("gamma", gamma, above=0)
        self._min = 0.0 if min_momentum is None else number("min_momentum", min_momentum, least=0)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return max(base_momentum gamma^n, min_momentum) after n steps."""
        value: float = base_momentum * self._gamma ** self._steps.decays(self.progress(trainer))
        return max(value, self._min)


class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """Lower the momentum to the minimum along half a cosine.

        hooks=[CosineAnnealingMomentumUpdaterHook(min_momentum=0.85)]

    Args:
        min_momentum, min_momentum_ratio: the minimum, or its ratio to the initial momentum; exactly one of
            the two.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    reaches_end = True

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_momentum", min_momentum, min_momentum_ratio)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return min + (base - min) (1 + cos(pi p / P)) / 2."""
        return annealing_cos(base_momentum, self._minimum.of(base_momentum), self.done(trainer))


class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """Lower the momentum to the minimum along a line.

        hooks=[LinearAnnealingMomentumUpdaterHook(min_momentum_ratio=0.9)]

    Args:
        min_momentum, min_momentum_ratio: see `CosineAnnealingMomentumUpdaterHook`.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    reaches_end = True

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_momentum", min_momentum, min_momentum_ratio)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return base + (min - base) p / P."""
        return annealing_linear(base_momentum, self._minimum.of(base_momentum), self.done(trainer))


class CyclicMomentumUpdaterHook(MomentumUpdaterHook):
    """Lower the momentum while `CyclicLrUpdaterHook` raises the rate, and the other way round.

        hooks=[CyclicLrUpdaterHook(cyclic_times=3), CyclicMomentumUpdaterHook(cyclic_times=3)]

    Args:
        target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma: see `CyclicLrUpdaterHook`; the
            factors (lowest, end) apply to the initial momentum.

    Raises:
        TypeError, ValueError: see `CyclicLrUpdaterHook`.
    """

    reaches_end = True

    def __init__(
        self, by_epoch: bool = False, target_ratio: float | Sequence[float] = (0.85 / 0.95, 1.0),
        cyclic_times: int = 1, step_ratio_up: float = 0.4, anneal_strategy: str = "cos", gamma: float = 1.0,
        *,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        refuse_by_epoch(type(self).__name__, by_epoch)
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._cycles = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)

    def max_progress(self, trainer: Trainer) -> int:
        """Return the iterations of the run.

        Raises:
            ValueError: they are fewer than the cycles.
        """
        total = super().max_progress(trainer)
        self._cycles.check(total)
        return total

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return the momentum of the current iteration; `Cycles` has the formula."""
        return self._cycles.value(base_momentum, self.progress(trainer), self.max_progress(trainer))


class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """Lower the momentum while `OneCycleLrUpdaterHook` raises the rate, then raise it again.

        hooks=[
            OneCycleLrUpdaterHook(max_lr=0.1),
            OneCycleMomentumUpdaterHook(base_momentum=0.85, max_momentum=0.95),
        ]

    It starts and ends at `max_momentum`, and is `base_momentum` where the rate has its peak, as in PyTorch's
    OneCycleLR.

    Args:
        base_momentum, max_momentum: one number, one per param group, or a dict of these by the optimizer's
            name if there are several.
        pct_start, anneal_strategy, three_phase: see `OneCycleLrUpdaterHook`.

    Raises:
        TypeError, ValueError: see `OneCycleLrUpdaterHook`.
    """

    reaches_end = True

    def __init__(
        self,
        base_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.85,
        max_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.95,
        pct_start: float = 0.3, anneal_strategy: str = "cos", three_phase: bool = False, *,
        by_epoch: bool = False,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        refuse_by_epoch(type(self).__name__, by_epoch)
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        check_given("base_momentum", base_momentum)
        check_given("max_momentum", max_momentum)
        self._low, self._high = base_momentum, max_momentum
        self._cycle = OneCycle(pct_start, anneal_strategy, three_phase=three_phase)

    def _set_initial_values(self, trainer: Trainer) -> None:
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            lows = per_group("base_momentum", self._low, name, optimizer)
            highs = per_group("max_momentum", self._high, name, optimizer)
            for group, low, high in zip(optimizer.param_groups, lows, highs, strict=True):
                group["base_momentum"], group["max_momentum"] = low, high
                write_value(group, "momentum", high)
                group["initial_momentum"] = high

    def _value_without_warmup(self, trainer: Trainer, group: Group) -> float:
        if "max_momentum" not in group:  # a group that was added during the run
            group["base_momentum"] = group["max_momentum"] = group["initial_momentum"]
        low, high = group["base_momentum"], group["max_momentum"]
        return self._cycle.value(high, low, high, self.progress(trainer), self.max_progress(trainer))
