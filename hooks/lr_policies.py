"""Set the learning rate by one of mmcv's policies; each takes the warm-up arguments of `LrUpdaterHook` too.

    hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3, warmup="linear", warmup_iters=500)]

The fields of a class are its arguments. The formulas that momentum policies use too are in
`eventloop.optim.policies`. In a formula p is the number of completed epochs, or of completed iterations with
`by_epoch=False`, P is their number in the run, and base is the initial rate. So the last epoch trains with
p = P - 1, as with PyTorch's schedulers, and after a completed run the rate is that of p = P.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from eventloop.hooks.lr_updater import LrUpdaterHook
from eventloop.optim import policies
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.policies import Formula, annealing_cos
from eventloop.util.checks import number, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class FixedLrUpdaterHook(LrUpdaterHook):
    """Keep the initial learning rate, after an optional warm-up.

        hooks=[FixedLrUpdaterHook(warmup="linear", warmup_iters=500, warmup_ratio=0.001)]

    The arguments are those of `LrUpdaterHook`.
    """

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr."""
        return base_lr


@dataclass(eq=False, repr=False)
class StepLrUpdaterHook(policies.Step, LrUpdaterHook):
    """Multiply the learning rate by `gamma` every `step` epochs or at listed epochs, down to `min_lr`.

        hooks=[StepLrUpdaterHook(step=[16, 22], gamma=0.1)]

    With `by_epoch=False`, `step` counts iterations.

    Raises:
        TypeError, ValueError: `step` is neither a positive int nor an ascending list of positive ints,
            `gamma` is not above 0, or `min_lr` is below 0.
    """

    min_lr: float | None = None


@dataclass(eq=False, repr=False)
class ExpLrUpdaterHook(LrUpdaterHook):
    """Multiply the learning rate by `gamma` every epoch, or every iteration with `by_epoch=False`.

        hooks=[ExpLrUpdaterHook(gamma=0.95)]

    Raises:
        TypeError, ValueError: `gamma` is not a number above 0.
    """

    gamma: float

    def formula(self) -> Formula:
        """Return the formula of the rate after p epochs or iterations.

        It is base * gamma^p, where base is the initial rate.
        """
        gamma = number("gamma", self.gamma, above=0)
        return lambda base, p, total: base * gamma**p


@dataclass(eq=False, repr=False)
class InvLrUpdaterHook(LrUpdaterHook):
    """Lower the learning rate as (1 + gamma p)^-power, where p is the epoch or iteration.

        hooks=[InvLrUpdaterHook(gamma=1e-4, power=0.75, by_epoch=False)]

    Raises:
        TypeError, ValueError: `gamma` or `power` is not a number above 0.
    """

    gamma: float
    power: float = 1.0

    def formula(self) -> Formula:
        """Return the formula of the rate after p epochs or iterations.

        It is base * (1 + gamma * p)^-power, where base is the initial rate.
        """
        gamma, power = number("gamma", self.gamma, above=0), number("power", self.power, above=0)
        return lambda base, p, total: base * (1 + gamma * p) ** -power


@dataclass(eq=False, repr=False)
class PolyLrUpdaterHook(LrUpdaterHook):
    """Lower the learning rate to `min_lr` as (1 - p / P)^power, where p / P is the run's completed fraction.

        hooks=[PolyLrUpdaterHook(power=0.9, min_lr=1e-4, by_epoch=False)]

    Raises:
        TypeError, ValueError: `power` is not a number above 0, or `min_lr` is below 0.
    """

    reaches_end = True

    power: float = 1.0
    min_lr: float = 0.0

    def formula(self) -> Formula:
        """Return the formula of the rate after p of P epochs or iterations.

        It is min_lr + (base - min_lr) * (1 - p / P)^power, where base is the initial rate.
        """
        power, lowest = number("power", self.power, above=0), self._lowest()
        return lambda base, p, total: lowest + (base - lowest) * (1 - p / total) ** power


@dataclass(eq=False, repr=False)
class CosineAnnealingLrUpdaterHook(policies.CosineAnnealing, LrUpdaterHook):
    """Lower the learning rate to a minimum along half a cosine.

        hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3)]

    Args:
        min_lr, min_lr_ratio: the minimum, or its ratio to the initial rate; exactly one of the two.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    min_lr: float | None = None
    min_lr_ratio: float | None = None


@dataclass(eq=False, repr=False)
class LinearAnnealingLrUpdaterHook(policies.LinearAnnealing, LrUpdaterHook):
    """Lower the learning rate to a minimum along a line.

        hooks=[LinearAnnealingLrUpdaterHook(min_lr=0.0)]

    Args:
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    min_lr: float | None = None
    min_lr_ratio: float | None = None


@dataclass(eq=False, repr=False)
class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Keep the initial learning rate for a part of the run, then lower it along half a cosine.

        hooks=[FlatCosineAnnealingLrUpdaterHook(start_percent=0.75, min_lr=0.0)]

    This is fastai's flat_cos.

    Args:
        start_percent: the fraction of the run with the initial rate, a float in [0, 1).
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: `start_percent` is not a float in [0, 1), both minima or neither are given, or
            one is below 0.
    """

    reaches_end = True

    start_percent: float = 0.75
    min_lr: float | None = None
    min_lr_ratio: float | None = None

    def formula(self) -> Formula:
        """Return the formula of the rate after p of P epochs or iterations.

        It is the initial rate for p < s = round(start_percent * P), then half a cosine from p = s to P.
        """
        start_percent, lowest = self.start_percent, self._lowest_or_ratio()
        if not isinstance(start_percent, float):
            raise TypeError(f"start_percent must be a float in [0, 1), got {start_percent!r}")
        number("start_percent", start_percent, least=0, below=1)

        def value(base: float, p: int, total: int) -> float:
            """Return the rate after p of `total` epochs or iterations, for the initial rate `base`."""
            start = round(total * start_percent)
            if p < start:
                return base
            done = (p - start) / (total - start) if total > start else 1.0
            return annealing_cos(base, lowest(base), done)

        return value


@dataclass(eq=False, repr=False)
class CosineRestartLrUpdaterHook(LrUpdaterHook):
    """Lower the learning rate along half a cosine in each of `periods`, then keep the minimum.

        hooks=[CosineRestartLrUpdaterHook(periods=[10, 20], restart_weights=[1.0, 0.5], min_lr=0.0)]

    Args:
        periods: the length of each period in epochs, or in iterations with `by_epoch=False`.
        restart_weights: a weight for each period, which starts at min + weight * (initial rate - min).
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: a period is not a positive int, there are more or fewer weights than periods,
            both minima or neither are given; or, when the trainer is built, the periods are together shorter
            than the run.
    """

    reaches_end = True

    periods: Sequence[int]
    restart_weights: Sequence[float] = (1.0,)
    min_lr: float | None = None
    min_lr_ratio: float | None = None

    def formula(self) -> Formula:
        """Return the formula of the rate when a period is completed to the fraction q, from 0 to 1.

        It is min + weight * (base - min) * (1 + cos(pi * q)) / 2, where base is the initial rate.
        """
        periods, weights, lowest = self.periods, self.restart_weights, self._lowest_or_ratio()
        if not isinstance(periods, list | tuple) or not periods:
            raise TypeError(f"periods must be a list of ints, got {periods!r}")
        for period in periods:
            positive("each of periods", period)
        if len(weights) != len(periods):
            raise ValueError(
                f"restart_weights must have one number for each of {len(periods)} periods, got {len(weights)}"
            )
        ends = [*accumulate(periods)]  # in epochs or iterations since the start of the run

        def value(base: float, p: int, total: int) -> float:
            """Return the rate after p of `total` epochs or iterations; each period begins at its weight."""
            if ends[-1] < total:
                raise ValueError(f"periods are {ends[-1]} together, and the run has {total}: add periods")
            index = min(bisect_right(ends, p), len(ends) - 1)
            q = 1 - (ends[index] - p) / periods[index]
            return annealing_cos(base, lowest(base), q, weights[index])

        return value


@dataclass(eq=False, repr=False)
class CyclicLrUpdaterHook(policies.Cyclic, LrUpdaterHook):
    """Raise the learning rate to a peak, then lower it to an end value, in each of several cycles.

        hooks=[CyclicLrUpdaterHook(target_ratio=(10.0, 1e-4), cyclic_times=3)]

    Args:
        target_ratio: the peak and the end value as factors of the initial rate; a single number is the peak,
            and the end value is then peak / 1e5.
        cyclic_times: the number of cycles in the run, which have equally many iterations; iterations after
            the last cycle keep its end value.
        step_ratio_up: the fraction of a cycle in which the rate rises, in [0, 1).
        anneal_strategy: "cos" or "linear".
        gamma: in (0, 1], the factor by which the peak's distance to the initial rate shrinks from cycle to
            cycle.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range, `by_epoch` is True; or, when
            the trainer is built, there are more cycles than iterations.
    """


@dataclass(eq=False, repr=False)
class OneCycleLrUpdaterHook(LrUpdaterHook):
    """Raise the learning rate to `max_lr` and lower it again, in one cycle over the iterations of the run.

        hooks=[OneCycleLrUpdaterHook(max_lr=0.1)]

    The rate begins at `max_lr / div_factor` and ends at `max_lr / div_factor / final_div_factor`, as with
    PyTorch's OneCycleLR. `OneCycleMomentumUpdaterHook` sets the momentum of that scheduler.

    Args:
        max_lr: one number or one per param group; with several optimizers also a dict of such values by the
            optimizers' names.
        total_steps: the number of iterations in the cycle; by default, and at least, the run's number.
        pct_start: the fraction of the cycle in which the rate rises, a float in [0, 1].
        anneal_strategy: "cos" or "linear".
        div_factor, final_div_factor: numbers above 0, see above.
        three_phase: True lowers the rate to its start value first, and then to the end value.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range, `by_epoch` is True; or, when
            the trainer is built, the number of rates differs from that of the groups, or `total_steps` is
            shorter than the run.
    """

    reaches_end = True
    counts_iterations = True

    max_lr: float | Sequence[float] | Mapping[str, float | Sequence[float]]
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    by_epoch: bool = field(default=False, kw_only=True)

    def formula(self) -> Formula:
        """Return the formula: from base up to base * div_factor, then down to base / final_div_factor.

        base is `max_lr / div_factor`, which `_set_initial_values` stores in the param groups.
        """
        if self.total_steps is not None:
            positive("total_steps", self.total_steps)
        policies.check_given("max_lr", self.max_lr)
        div_factor = number("div_factor", self.div_factor, above=0)
        final_div_factor = number("final_div_factor", self.final_div_factor, above=0)
        cycle = policies.one_cycle(self.pct_start, self.anneal_strategy, three_phase=self.three_phase)
        return lambda base, p, total: cycle(base, base * div_factor, base / final_div_factor, p, total)

    def max_progress(self, trainer: Trainer) -> int:
        """Return the number of iterations in the cycle.

        Raises:
            ValueError: the run has more iterations.
        """
        if self.total_steps is None:
            return super().max_progress(trainer)
        if trainer.max_iters is not None and self.total_steps < trainer.max_iters:
            raise ValueError(
                f"total_steps={self.total_steps} is shorter than the run, which has {trainer.max_iters} "
                "iterations"
            )
        return self.total_steps

    def _set_initial_values(self, trainer: Trainer) -> None:
        """Set each group's initial rate, from which the cycle rises to its `max_lr`."""
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            rates = policies.per_group("max_lr", self.max_lr, name, optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["initial_lr"] = rate / self.div_factor
