"""mmcv's learning rate policies that rise, or begin anew, within a run; p and P are those of `lr_policies`."""

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
    """Half a cosine down to the minimum in each of `periods`; the last one ends at its minimum and stays there.

        hooks=[CosineRestartLrUpdaterHook(periods=[10, 20], restart_weights=[1.0, 0.5], min_lr=0.0)]

    Args:
        periods: the length of each, in epochs, or iterations with `by_epoch=False`.
        restart_weights: how much of the initial rate each begins with; as many as periods.
        min_lr, min_lr_ratio: as `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: a period is no positive int, not as many weights, both minima or neither; or, when the
            trainer is built, the periods are shorter than the run.
    """

    reaches_end = True

    def __init__(
        self, periods: Sequence[int], restart_weights: Sequence[float] = (1.0,), min_lr: float | None = None,
        min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._periods = Periods(periods, restart_weights)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def max_progress(self, trainer: Trainer) -> int:
        """The length of the run.

        Raises:
            ValueError: the periods are shorter.
        """
        total = super().max_progress(trainer)
        if self._periods.total < total:
            unit = "epochs" if self.by_epoch else "iterations"
            raise ValueError(f"periods are {self._periods.total} {unit} together, and the run has {total}")
        return total

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """min + weight (base_lr - min) (1 + cos(pi q)) / 2, where q of the period is done."""
        done, weight = self._periods.at(self.progress(trainer))
        return annealing_cos(base_lr, self._minimum.of(base_lr), done, weight)


class CyclicLrUpdaterHook(LrUpdaterHook):
    """`cyclic_times` cycles, each up to times `target_ratio[0]` and down to times `target_ratio[1]`; by iteration.

        hooks=[CyclicLrUpdaterHook(target_ratio=(10.0, 1e-4), cyclic_times=3)]

    Args:
        target_ratio: (peak, end), or the peak alone for an end of peak / 1e5.
        cyclic_times: cycles in the run; iterations that are left after the last one keep its end.
        step_ratio_up: the part of a cycle that goes up, in [0, 1).
        anneal_strategy: "cos" or "linear".
        gamma: in (0, 1], how much of the peak the next cycle has.

    Raises:
        TypeError, ValueError: an argument is not as above, `by_epoch` is True; or, when the trainer is built, more
            cycles than iterations.
    """

    reaches_end = True

    def __init__(
        self, by_epoch: bool = False, target_ratio: float | Sequence[float] = (10.0, 1e-4), cyclic_times: int = 1,
        step_ratio_up: float = 0.4, anneal_strategy: str = "cos", gamma: float = 1.0, *,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
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

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """See `Cycles`."""
        return self._cycles.value(base_lr, self.progress(trainer), self.max_progress(trainer))


class OneCycleLrUpdaterHook(LrUpdaterHook):
    """Up from `max_lr / div_factor` to `max_lr` and down to `max_lr / div_factor / final_div_factor`; by iteration.

        hooks=[OneCycleLrUpdaterHook(max_lr=0.1)]

    The same as PyTorch's OneCycleLR without its momentum, for which there is `OneCycleMomentumUpdaterHook`.

    Args:
        max_lr: one number, one a param group, or those by the optimizer's name where there are several.
        total_steps: iterations of the cycle; by default those of the run, and not fewer.
        pct_start: the part of it that goes up, a float in [0, 1].
        anneal_strategy: "cos" or "linear".
        div_factor, final_div_factor: above 0.
        three_phase: go down as far as up, and only then to the end.

    Raises:
        TypeError, ValueError: an argument is not as above, `by_epoch` is True; or, when the trainer is built, not
            as many rates as groups, or `total_steps` shorter than the run.
    """

    reaches_end = True

    def __init__(
        self, max_lr: float | Sequence[float] | Mapping[str, float | Sequence[float]],
        total_steps: int | None = None, pct_start: float = 0.3, anneal_strategy: str = "cos",
        div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False, *, by_epoch: bool = False,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
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
        """The iterations of the cycle.

        Raises:
            ValueError: the run has more.
        """
        if self._total is None:
            return super().max_progress(trainer)
        if trainer.max_iters is not None and self._total < trainer.max_iters:
            raise ValueError(
                f"total_steps={self._total} is shorter than the run, which has {trainer.max_iters} iterations"
            )
        return self._total

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """See `OneCycle`."""
        total = self.max_progress(trainer)
        last = base_lr / self._final_div
        return self._cycle.value(base_lr, base_lr * self._div, last, self.progress(trainer), total)

    def _begin(self, trainer: Trainer) -> None:
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            rates = per_group("max_lr", self._max_lr, name, optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["initial_lr"] = rate / self._div


def refuse_by_epoch(name: str, by_epoch: bool) -> None:
    """Refuse a policy that goes by iteration the other unit.

    Raises:
        ValueError: naming the policy.
    """
    if by_epoch is True:  # what is no bool is refused with the other arguments
        raise ValueError(f"{name} goes by iteration, got by_epoch={by_epoch!r}: leave it out")
