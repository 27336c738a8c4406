"""Hooks that set the momentum during training by one of mmcv's policies, such as cosine or cyclic."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eventloop.events.priority import Priority
from eventloop.hooks.lr_updater import ParamUpdaterHook
from eventloop.optim import policies
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import Group, groups_of, initial_value, write_value
from eventloop.optim.policies import Formula

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class MomentumUpdaterHook(ParamUpdaterHook):
    """Set the momentum from `get_momentum`; the base of mmcv's momentum policies.

        class LessMomentumUpdaterHook(MomentumUpdaterHook):
            def get_momentum(self, trainer, base_momentum):
                return base_momentum * 0.9 ** trainer.epoch

    The hook sets `momentum`, or the first of `betas` if the optimizer has betas, from `initial_momentum` of
    each param group. It works like `LrUpdaterHook`, except that its warm-up divides by the factor, so a
    training starts with more momentum.

    Args:
        by_epoch, warmup, warmup_iters, warmup_by_epoch: see `LrUpdaterHook`.
        warmup_ratio: in (0, 1], the divisor of the momentum at the start of the warm-up.

    Raises:
        TypeError, ValueError: see `LrUpdaterHook`.

    Warns:
        UserWarning: the warm-up starts with a momentum of 1 or more, so the training would diverge.
    """

    priority = Priority.HIGH
    param_name, getter = "momentum", "get_momentum"

    warmup_ratio: float = 0.9

    def __init__(
        self,
        by_epoch: bool = True,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)

    def check(self, trainer: Trainer) -> None:
        """Check the trainer, and warn if the warm-up would start with a momentum of 1 or more.

        Raises:
            ValueError: see `LrUpdaterHook.check`.
        """
        super().check(trainer)
        if self.warmup is None:
            return
        largest = max(initial_value(group, "momentum") for group in groups_of(trainer.optimizer))
        at_start = largest / self.warmup_ratio
        if at_start >= 1:
            warnings.warn(
                f"{type(self).__name__} divides the momentum by {self.warmup_ratio} at the start of the "
                f"warm-up, which makes it {at_start:.3g}: with 1 or more the velocity only grows; raise "
                "warmup_ratio",
                UserWarning,
                stacklevel=2,
            )

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Return the current momentum of a group with initial momentum `base_momentum`, without warm-up."""
        return self.from_formula(trainer, base_momentum)

    def _apply_warmup(self, value: float, factor: float) -> float:
        return value / factor


@dataclass(eq=False, repr=False)
class StepMomentumUpdaterHook(policies.Step, MomentumUpdaterHook):
    """Multiply the momentum by `gamma` every `step` epochs or at listed epochs, down to `min_momentum`.

        hooks=[StepMomentumUpdaterHook(step=[16, 22], gamma=0.9)]

    With `by_epoch=False`, `step` counts iterations.

    Raises:
        TypeError, ValueError: see `StepLrUpdaterHook`.
    """

    gamma: float = 0.5
    min_momentum: float | None = None


@dataclass(eq=False, repr=False)
class CosineAnnealingMomentumUpdaterHook(policies.CosineAnnealing, MomentumUpdaterHook):
    """Lower the momentum to a minimum along half a cosine.

        hooks=[CosineAnnealingMomentumUpdaterHook(min_momentum=0.85)]

    Args:
        min_momentum, min_momentum_ratio: the minimum, or its ratio to the initial momentum; exactly one of
            the two.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    min_momentum: float | None = None
    min_momentum_ratio: float | None = None


@dataclass(eq=False, repr=False)
class LinearAnnealingMomentumUpdaterHook(policies.LinearAnnealing, MomentumUpdaterHook):
    """Lower the momentum to a minimum along a line.

        hooks=[LinearAnnealingMomentumUpdaterHook(min_momentum_ratio=0.9)]

    The arguments and their errors are those of `CosineAnnealingMomentumUpdaterHook`.
    """

    min_momentum: float | None = None
    min_momentum_ratio: float | None = None


@dataclass(eq=False, repr=False)
class CyclicMomentumUpdaterHook(policies.Cyclic, MomentumUpdaterHook):
    """Lower the momentum while `CyclicLrUpdaterHook` raises the rate, and raise it while the rate falls.

        hooks=[CyclicLrUpdaterHook(cyclic_times=3), CyclicMomentumUpdaterHook(cyclic_times=3)]

    Args:
        target_ratio: the lowest and the end value of a cycle, as factors of the initial momentum.
        cyclic_times, step_ratio_up, anneal_strategy, gamma: see `CyclicLrUpdaterHook`.

    Raises:
        TypeError, ValueError: see `CyclicLrUpdaterHook`.
    """

    target_ratio: float | Sequence[float] = (0.85 / 0.95, 1.0)


@dataclass(eq=False, repr=False)
class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """Lower the momentum while `OneCycleLrUpdaterHook` raises the rate, then raise it again.

        hooks=[
            OneCycleLrUpdaterHook(max_lr=0.1),
            OneCycleMomentumUpdaterHook(base_momentum=0.85, max_momentum=0.95),
        ]

    The momentum starts and ends at `max_momentum`, and is `base_momentum` when the rate is at its peak, as in
    PyTorch's OneCycleLR.

    Args:
        base_momentum, max_momentum: one number or one per param group; with several optimizers also a dict of
            such values by the optimizers' names.
        pct_start, anneal_strategy, three_phase: see `OneCycleLrUpdaterHook`.

    Raises:
        TypeError, ValueError: see `OneCycleLrUpdaterHook`.
    """

    reaches_end = True
    counts_iterations = True

    base_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.85
    max_momentum: float | Sequence[float] | Mapping[str, float | Sequence[float]] = 0.95
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    three_phase: bool = False
    by_epoch: bool = field(default=False, kw_only=True)

    def formula(self) -> Formula:
        """Check the arguments and store the cycle; return a formula without effect.

        `_value_without_warmup` computes the momentum, because the ends of the cycle differ by param group.
        """
        policies.check_given("base_momentum", self.base_momentum)
        policies.check_given("max_momentum", self.max_momentum)
        self._cycle = policies.one_cycle(self.pct_start, self.anneal_strategy, three_phase=self.three_phase)
        return lambda base, p, total: base

    def _set_initial_values(self, trainer: Trainer) -> None:
        """Set the lowest and the highest momentum of each group; the cycle begins at the highest."""
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            lowest_values = policies.per_group("base_momentum", self.base_momentum, name, optimizer)
            highest_values = policies.per_group("max_momentum", self.max_momentum, name, optimizer)
            for group, lowest, highest in zip(
                optimizer.param_groups, lowest_values, highest_values, strict=True
            ):
                group["base_momentum"], group["max_momentum"] = lowest, highest
                write_value(group, "momentum", highest)
                group["initial_momentum"] = highest

    def _value_without_warmup(self, trainer: Trainer, group: Group) -> float:
        """Return the momentum in the cycle, which falls while the learning rate rises."""
        highest: float = group["initial_momentum"]
        # a group added during the run has no "base_momentum", so its momentum stays the same
        lowest: float = group.get("base_momentum", highest)
        return self._cycle(highest, lowest, highest, self.progress(trainer), self.max_progress(trainer))
