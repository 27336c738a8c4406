"""Schedulers that go up and down or follow a metric, with MMEngine's names and parameters.

`eventloop.optim.schedulers` exports them. Each is a `Window` over a scheduler of PyTorch or of this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_lr

from eventloop.optim.decays import NamedWindow, minima_of, positives, steps_to_last
from eventloop.optim.param_groups import Value, check_has_value, per_group
from eventloop.optim.windows import PlateauWindow, check_window
from eventloop.util.checks import at_least, check_bools, check_choice, number, positive


class OneCycleLR(NamedWindow):
    """Raise the value to `eta_max` and lower it again: PyTorch's OneCycleLR without its momentum.

    The value starts at `eta_max / div_factor` and ends at `eta_max / div_factor / final_div_factor`, where it
    stays after `total_steps`.

    Args:
        eta_max: the peak; one number, or one per param group.
        total_steps: the length of the cycle; by default `end - begin`.
        pct_start: the share of the cycle in which the value goes up, from 0 to 1.
        anneal_strategy, div_factor, final_div_factor, three_phase: as PyTorch's.

    Raises:
        TypeError, ValueError: an argument is not as above; `total_steps` and `end` are both missing; or the
            window is invalid.
    """

    length_from = "total_steps"

    def __init__(
        self,
        optimizer: Optimizer,
        eta_max: float | Sequence[float],
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        if total_steps is None:
            total_steps = steps_to_last("OneCycleLR without total_steps", begin, end, by_epoch) + 1
        check_window(begin, end, by_epoch)
        positive("total_steps", total_steps)
        number("pct_start", pct_start, least=0, most=1)
        if pct_start * total_steps == 1:
            raise ValueError(
                f"pct_start={pct_start!r} of total_steps={total_steps} is a rise of one step, which has no "
                "slope: give 0.0, or more steps"
            )
        check_has_value(optimizer, self.param_name)
        peaks = per_group("eta_max", eta_max, optimizer.param_groups, above=0)
        number("div_factor", div_factor, above=0)
        number("final_div_factor", final_div_factor, above=0)
        check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        check_bools(three_phase=three_phase)
        steps = total_steps
        super().__init__(
            optimizer,
            lambda o: torch_lr.OneCycleLR(
                o,
                peaks,
                steps,
                pct_start=pct_start,
                anneal_strategy=anneal_strategy,
                cycle_momentum=False,
                div_factor=div_factor,
                final_div_factor=final_div_factor,
                three_phase=three_phase,
            ),
            begin=begin,
            end=min(begin + steps, end or begin + steps),
            by_epoch=by_epoch,
        )


class CosineRestartLR(NamedWindow):
    """Lower the value to the minimum along half a cosine, in each of several periods.

    Each period starts at the initial value times the weight of the period. After the last period the value
    stays.

    Args:
        periods: the number of steps of each period.
        restart_weights: one factor per period; by default 1.
        eta_min, eta_min_ratio: as `CosineAnnealingLR`.

    Raises:
        TypeError, ValueError: a period is not a positive int, the weights are not as many as the periods,
            both minima are given, or the window is invalid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        periods: Sequence[int],
        restart_weights: Sequence[float] | None = None,
        eta_min: float | None = None,
        *,
        eta_min_ratio: float | None = None,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        lengths = positives("periods", periods)
        weights = [1.0] * len(lengths) if restart_weights is None else restart_weights
        if not isinstance(weights, list | tuple) or len(weights) != len(lengths):
            raise ValueError(
                f"restart_weights must be a list of one number for each of {len(lengths)} periods, got "
                f"{weights!r}"
            )
        for weight in weights:
            number("each of restart_weights", weight, least=0)
        check_has_value(optimizer, self.param_name)
        minima = minima_of(optimizer, self.param_name, eta_min, eta_min_ratio)
        super().__init__(
            optimizer,
            lambda o: CosineRestarts(o, lengths, weights, minima),
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


class CosineRestarts(torch_lr.LRScheduler):
    """Lower rates along half a cosine in periods of any lengths.

    In PyTorch's CosineAnnealingWarmRestarts each period is the one before it times a factor. At step s of a
    period of length P the part of the rate above the minimum is multiplied by (1 + cos(pi s / P)) / (1 +
    cos(pi (s - 1) / P)). The formula is that of Loshchilov and Hutter, "SGDR", 2017, as a factor of the
    current rate, so that it can be combined with other schedules.
    """

    def __init__(
        self, optimizer: Optimizer, periods: Sequence[int], weights: Sequence[float], minima: Sequence[float]
    ) -> None:
        self.periods, self.weights, self.minima = list(periods), list(weights), list(minima)
        super().__init__(optimizer)

    def get_lr(self) -> list[Value]:
        """Return the value of each param group at step `last_epoch`."""
        step = self.last_epoch
        for period, weight in zip(self.periods, self.weights, strict=True):
            if step < period:
                return [
                    self._value(group["lr"], base, low, step, period, weight)
                    for group, base, low in zip(
                        self.optimizer.param_groups, self.base_lrs, self.minima, strict=True
                    )
                ]
            step -= period
        return [group["lr"] for group in self.optimizer.param_groups]

    @staticmethod
    def _value(current: Value, base: Value, low: float, step: int, period: int, weight: float) -> Value:
        """Return the rate at a step of a period, given the current rate, the base rate and the minimum."""
        if step == 0:
            return base * weight
        before, after = math.cos(math.pi * (step - 1) / period), math.cos(math.pi * step / period)
        return low + (current - low) * ((1 + after) / (1 + before))


class ReduceOnPlateauLR(PlateauWindow):
    """Multiply the value by `factor` when a metric has not improved for more than `patience` validations.

    PyTorch's ReduceLROnPlateau with MMEngine's names. `begin` and `end` count epochs.

    Args:
        monitor: the metric of the validation.
        rule: the better direction of the metric, "less" or "greater".
        threshold, threshold_rule: the least improvement of the metric, and its kind, "rel" or "abs".
        factor, patience, cooldown, eps: as PyTorch's.
        min_value: PyTorch's `min_lr`; one number, or one per param group.

    Raises:
        TypeError, ValueError: an argument is not as above, `factor` is not in (0, 1), another number is below
            0, or the window is invalid.
    """

    by_epoch: Literal[True]

    def __init__(
        self,
        optimizer: Optimizer,
        monitor: str = "loss",
        rule: Literal["less", "greater"] = "less",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_rule: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_value: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        check_window(begin, end, by_epoch)
        if not by_epoch:
            raise ValueError("ReduceOnPlateauLR counts validations, got by_epoch=False: leave by_epoch out")
        check_has_value(optimizer, self.param_name)
        check_choice("rule", rule, ("less", "greater"))
        check_choice("threshold_rule", threshold_rule, ("rel", "abs"))
        number("factor", factor, above=0, below=1)
        at_least("patience", patience, 0)
        at_least("cooldown", cooldown, 0)
        number("threshold", threshold, least=0)
        number("eps", eps, least=0)
        lows = per_group("min_value", min_value, optimizer.param_groups, least=0)
        super().__init__(
            optimizer,
            lambda o: torch_lr.ReduceLROnPlateau(
                o,
                "min" if rule == "less" else "max",
                factor,
                patience,
                threshold,
                threshold_rule,
                cooldown,
                lows,
                eps,
            ),
            monitor,
            begin=begin,
            end=end,
        )
