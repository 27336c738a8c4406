"""mmcv's way to a momentum: the twins of the learning rate policies."""

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
    """The base of mmcv's momentum policies: override `get_momentum`.

        class LessMomentumUpdaterHook(MomentumUpdaterHook):
            def get_momentum(self, trainer, base_momentum):
                return base_momentum * 0.9 ** trainer.epoch

    It sets `momentum`, or the first of `betas` where an optimizer has those, from `initial_momentum` of each param
    group. All is as in `LrUpdaterHook`, but that a warm-up divides by its factor: it begins with more momentum.

    Args:
        by_epoch, warmup, warmup_iters, warmup_by_epoch: as `LrUpdaterHook`.
        warmup_ratio: in (0, 1], what the momentum is divided by.

    Raises:
        TypeError, ValueError: as `LrUpdaterHook`.

    Warns:
        UserWarning: the warm-up begins with a momentum of 1 or more, with which nothing converges.
    """

    priority = Priority.HIGH
    param_name = "momentum"

    def __init__(
        self, by_epoch: bool = True, warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        own, base = type(self), MomentumUpdaterHook
        if own.get_momentum is base.get_momentum and own._regular is base._regular:
            raise TypeError(
                f"{own.__name__} has no get_momentum(trainer, base_momentum): define it, or take a policy"
            )
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer that the hook cannot serve, and warn of a warm-up that is none.

        Raises:
            ValueError: as `LrUpdaterHook`.
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
                f"{type(self).__name__} divides the momentum by {self.warmup_ratio} when the warm-up begins, which "
                f"makes it {first:.3g}: with 1 or more the velocity only grows; raise warmup_ratio",
                UserWarning,
                stacklevel=2,
            )

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """The momentum of a group that began with `base_momentum`, without warm-up."""
        raise NotImplementedError

    def _regular(self, trainer: Trainer, group: Group) -> float:
        return self.get_momentum(trainer, group["initial_momentum"])

    def _warm(self, value: float, factor: float) -> float:
        return value / factor


class StepMomentumUpdaterHook(MomentumUpdaterHook):
    """Times `gamma` every `step`, or at each of a list, and never below `min_momentum`.

        hooks=[StepMomentumUpdaterHook(step=[16, 22], gamma=0.9)]

    Raises:
        TypeError, ValueError: as `StepLrUpdaterHook`.
    """

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.5, min_momentum: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._steps = Steps(step)
        self._gamma = number("gamma", gamma, above=0)
        self._min = 0.0 if min_momentum is None else number("min_momentum", min_momentum, least=0)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """max(base_momentum gamma^n, min_momentum) after n steps."""
        value: float = base_momentum * self._gamma ** self._steps.decays(self.progress(trainer))
        return max(value, self._min)


class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """Half a cosine down to the minimum.

        hooks=[CosineAnnealingMomentumUpdaterHook(min_momentum=0.85)]

    Args:
        min_momentum, min_momentum_ratio: the minimum, or its ratio to the initial momentum; exactly one.

    Raises:
        TypeError, ValueError: both minima or neither, or one below 0.
    """

    reaches_end = True

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_momentum", min_momentum, min_momentum_ratio)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """min + (base - min) (1 + cos(pi p / P)) / 2."""
        return annealing_cos(base_momentum, self._minimum.of(base_momentum), self.done(trainer))


class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """A line down to the minimum.

        hooks=[LinearAnnealingMomentumUpdaterHook(min_momentum_ratio=0.9)]

    Args:
        min_momentum, min_momentum_ratio: as `CosineAnnealingMomentumUpdaterHook`.

    Raises:
        TypeError, ValueError: both minima or neither, or one below 0.
    """

    reaches_end = True

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_momentum", min_momentum, min_momentum_ratio)

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """base + (min - base) p / P."""
        return annealing_linear(base_momentum, self._minimum.of(base_momentum), self.done(trainer))


class CyclicMomentumUpdaterHook(MomentumUpdaterHook):
    """The inverse of `CyclicLrUpdaterHook`: down to times `target_ratio[0]` while the rate rises, and up again.

        hooks=[CyclicLrUpdaterHook(cyclic_times=3), CyclicMomentumUpdaterHook(cyclic_times=3)]

    Args:
        target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma: as `CyclicLrUpdaterHook`.

    Raises:
        TypeError, ValueError: as `CyclicLrUpdaterHook`.
    """

    reaches_end = True

    def __init__(
        self, by_epoch: bool = False, target_ratio: float | Sequence[float] = (0.85 / 0.95, 1.0),
        cyclic_times: int = 1, step_ratio_up: float = 0.4, anneal_strategy: str = "cos", gamma: float = 1.0, *,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        refuse_by_epoch(type(self).__name__, by_epoch)
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._cycles = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)

    def max_progress(self, trainer: Trainer) -> int:
        """The iterations of the run.

        Raises:
            ValueError: they are fewer than the cycles.
        """
        total = super().max_progress(trainer)
        self._cycles.check(total)
        return total

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """See `Cycles`."""
        return self._cycles.value(base_momentum, self.progress(trainer), self.max_progress(trainer))


class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """The inverse of `OneCycleLrUpdaterHook`: from `max_momentum` down to `base_momentum`, where the rate is at its peak,
    and up again; the same as PyTorch's OneCycleLR does.

        hooks=[
            OneCycleLrUpdaterHook(max_lr=0.1),
            OneCycleMomentumUpdaterHook(base_momentum=0.85, max_momentum=0.95),
        ]

    Args:
        base_momentum, max_momentum: one number, one a param group, or those by the optimizer's name where there are
            several.
        pct_start, anneal_strategy, three_phase: as `OneCycleLrUpdaterHook`.

    Raises:
        TypeError, ValueError: as `OneCycleLrUpdaterHook`.
    """

    reaches_end = True

    def __init__(
        self,
        base_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.85,
        max_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.95,
        pct_start: float = 0.3, anneal_strategy: str = "cos", three_phase: bool = False, *, by_epoch: bool = False,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.9, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        refuse_by_epoch(type(self).__name__, by_epoch)
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        check_given("base_momentum", base_momentum)
        check_given("max_momentum", max_momentum)
        self._low, self._high = base_momentum, max_momentum
        self._cycle = OneCycle(pct_start, anneal_strategy, three_phase=three_phase)

    def _begin(self, trainer: Trainer) -> None:
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            lows = per_group("base_momentum", self._low, name, optimizer)
            highs = per_group("max_momentum", self._high, name, optimizer)
            for group, low, high in zip(optimizer.param_groups, lows, highs, strict=True):
                group["base_momentum"], group["max_momentum"] = low, high
                write_value(group, "momentum", high)
                group["initial_momentum"] = high

    def _regular(self, trainer: Trainer, group: Group) -> float:
        if "max_momentum" not in group:  # of a group that was added in the run
            group["base_momentum"] = group["max_momentum"] = group["initial_momentum"]
        low, high = group["base_momentum"], group["max_momentum"]
        return self._cycle.value(high, low, high, self.progress(trainer), self.max_progress(trainer))
