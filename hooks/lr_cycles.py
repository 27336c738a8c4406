"""mmcv's learning rate policies that rise or restart within a run; p and P are those of `lr_policies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eventloop.hooks.lr_updater import LrUpdaterHook
from eventloop.optim.formulas import (
    Cycles,
    Minimum,
    OneCycle,
    Periods,
    annealing_cos,
    check_given,
    per_group,
)
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import number
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class CosineRestartLrUpdaterHook(LrUpdaterHook):
    """Lower the rate along half a cosine in each of `periods`; after the last one it stays at its minimum.

        hooks=[CosineRestartLrUpdaterHook(periods=[10, 20], restart_weights=[1.0, 0.5], min_lr=0.0)]

    Args:
        periods: the length of each period in epochs, or in iterations with `by_epoch=False`.
        restart_weights: the factor of the initial rate at the start of each period; as many as periods.
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: a period is not a positive int, the number of weights differs, both minima or
            neither are given; or, when the trainer is built, the periods are shorter than the run.
    """

    reaches_end = True

    def __init__(
        self, periods: Sequence[int], restart_weights: Sequence[float] = (1.0,), min_lr: float | None = None,
        min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._periods = Periods(periods, restart_weights)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def max_progress(self, trainer: Trainer) -> int:
        """Return the length of the run, in epochs or iterations.

        Raises:
            ValueError: the periods together are shorter than the run.
        """
        total = super().max_progress(trainer)
        if self._periods.total < total:
            unit = "epochs" if self.by_epoch else "iterations"
            raise ValueError(f"periods are {self._periods.total} {unit} together, and the run has {total}")
        return total

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return min + weight (base_lr - min) (1 + cos(pi q)) / 2, where q of the period is done."""
        done, weight = self._periods.at(self.progress(trainer))
        return annealing_cos(base_lr, self._minimum.of(base_lr), done, weight)


class CyclicLrUpdaterHook(LrUpdaterHook):
    """Raise the rate to a peak and lower it to an end, `cyclic_times` times; counted in iterations.

        hooks=[CyclicLrUpdaterHook(target_ratio=(10.0, 1e-4), cyclic_times=3)]

    Args:
        target_ratio: factors (peak, end) of the initial rate, or the peak alone for an end of peak / 1e5.
        cyclic_times: cycles in the run; iterations that are left after the last cycle keep its end.
        step_ratio_up: the part of a cycle in which the rate rises, in [0, 1).
        anneal_strategy: "cos" or "linear".
        gamma: in (0, 1], how much of the peak's distance to the initial rate remains in the next cycle.

    Raises:
        TypeError, ValueError: an argument is not as above, `by_epoch` is True; or, when the trainer is built,
            there are more cycles than iterations.
    """

    reaches_end = True

    def __init__(
        self, by_epoch: bool = False, target_ratio: float | Sequence[float] = (10.0, 1e-4),
        cyclic_times: int = 1,
        step_ratio_up: float = 0.4, anneal_strategy: str = "cos", gamma: float = 1.0, *,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
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

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return the rate of the current iteration; `Cycles` has the formula."""
        return self._cycles.value(base_lr, self.progress(trainer), self.max_progress(trainer))


class OneCycleLrUpdaterHook(LrUpdaterHook):
    """Raise the rate from `max_lr / div_factor` to `max_lr`, then lower it; counted in iterations.

        hooks=[OneCycleLrUpdaterHook(max_lr=0.1)]

    The end is `max_lr / div_factor / final_div_factor`. The rates are those of PyTorch's OneCycleLR, whose
    momentum `OneCycleMomentumUpdaterHook` sets.

    Args:
        max_lr: one number, one per param group, or a dict of these by the optimizer's name if there are
            several.
        total_steps: iterations of the cycle; by default those of the run, and never fewer.
        pct_start: the part of the cycle in which the rate rises, a float in [0, 1].
        anneal_strategy: "cos" or "linear".
        div_factor, final_div_factor: above 0.
        three_phase: lower the rate to where it began, and only then to the end.

    Raises:
        TypeError, ValueError: an argument is not as above, `by_epoch` is True; or, when the trainer is built,
            the number of rates differs from that of the groups, or `total_steps` is shorter than the run.
    """

    reaches_end = True

    def __init__(
        self, max_lr: float | Sequence[float] | Mapping[str, float | Sequence[float]],
        total_steps: int | None = None, pct_start: float = 0.3, anneal_strategy: str = "cos",
        div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False, *,
        by_epoch: bool = False,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        refuse_by_epoch(type(self).__name__, by_epoch)
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        if total_steps is not None:
            positive("total_steps", total_steps)
        check_given("max_lr", max_lr)
        self._max_lr, self._total = max_lr, total_steps
        self._cycle = OneCycle(pct_start, anneal_strategy, three_phase=three_phase)
        self._div = number("div_factor", div_factor, above=0)
        self._final_div = number("final_div_factor", final_div_factor, above=0)

    def max_progress(self, trainer: Trainer) -> int:
        """Return the iterations of the cycle.

        Raises:
            ValueError: the run has more iterations.
        """
        if self._total is None:
            return super().max_progress(trainer)
        if trainer.max_iters is not None and self._total < trainer.max_iters:
            raise ValueError(
                f"total_steps={self._total} is shorter than the run, which has {trainer.max_iters} iterations"
            )
        return self._total

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return the rate of the current iteration; `OneCycle` has the formula."""
        total = self.max_progress(trainer)
        last = base_lr / self._final_div
        return self._cycle.value(base_lr, base_lr * self._div, last, self.progress(trainer), total)

    def _set_initial_values(self, trainer: Trainer) -> None:
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            rates = per_group("max_lr", self._max_lr, name, optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["initial_lr"] = rate / self._div


def refuse_by_epoch(name: str, by_epoch: bool) -> None:
    """Refuse `by_epoch=True` for a policy that is counted in iterations.

    Raises:
        ValueError: `by_epoch` is True; the message names the policy.
    """
    if by_epoch is True:  # a value that is not a bool is refused with the other arguments
        raise ValueError(f"{name} counts iterations, got by_epoch={by_epoch!r}: leave it out")
