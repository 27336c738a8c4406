"""Compute the values of mmcv's policies, which are schedules of a learning rate or a momentum.

The hooks of mmcv's names set the values: `StepLrUpdaterHook` uses the policy `Step` for the learning rate,
and `StepMomentumUpdaterHook` uses it for the momentum. A policy has arguments, checks them, and returns the
formula of the value; it knows neither an optimizer nor a trainer. In the docstrings base is the initial
value, p the number of completed epochs or iterations, and P their total number in the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any, ClassVar

import torch

from eventloop.optim import param_groups
from eventloop.util.checks import check_bools, check_choice, number, positive
from eventloop.util.suggest import suggest

Formula = Callable[[float, int, int], float]
"""A function `(initial value, p, P) -> value`, where p of the run's P epochs or iterations are completed."""


class Policy:
    """A base class for policies, whose arguments are the dataclass fields of the subclass."""

    param_name: ClassVar[str] = "lr"
    """The value that the policy sets, "lr" or "momentum"."""
    reaches_end: ClassVar[bool] = False
    """True if the policy depends on the run's length; a completed run then sets the policy's final value."""
    counts_iterations: ClassVar[bool] = False
    """True for a policy that refuses `by_epoch=True`."""

    def formula(self) -> Formula | None:
        """Check the policy's arguments, and return its formula.

        Return None for a subclass of the user's that computes its values in another way.
        """
        return None

    def _lowest(self) -> float:
        """Return the argument `min_lr` or `min_momentum`, which is the lowest value."""
        name = f"min_{self.param_name}"
        return number(name, getattr(self, name), least=0)

    def _lowest_or_ratio(self) -> Callable[[float], float]:
        """Return the function `(base) -> lowest value`.

        The lowest value is the argument `min_lr`, or the product of base and `min_lr_ratio`, of which the
        user gives one. For a momentum the arguments are `min_momentum` and `min_momentum_ratio`.
        """
        name = f"min_{self.param_name}"
        value, ratio = getattr(self, name), getattr(self, f"{name}_ratio")
        if (value is None) == (ratio is None):
            got = "neither" if value is None else f"both ({name}={value!r}, {name}_ratio={ratio!r})"
            raise ValueError(f"expected exactly one of {name} and {name}_ratio, got {got}")
        if value is not None:
            lowest = self._lowest()
            return lambda base: lowest
        factor = number(f"{name}_ratio", ratio, least=0)
        return lambda base: base * factor


@dataclass(eq=False, repr=False)
class Step(Policy):
    """Multiply a value by `gamma` every `step` epochs or iterations, or after each number in a list.

    The value does not fall below the lowest value, the argument `min_lr` or `min_momentum`.
    """

    step: int | Sequence[int]
    gamma: float = 0.1

    def formula(self) -> Formula:
        """Return the formula max(base gamma^n, lowest) after n steps."""
        step, gamma = self.step, self.gamma
        if isinstance(step, list | tuple) and step:
            for each in step:
                positive("each step", each)
            if [*step] != sorted(set(step)):
                raise ValueError(f"step must be a rising list of ints, got {step!r}")
        elif isinstance(step, int):
            positive("step", step)
        else:
            raise TypeError(f"step must be an int or a list of ints, got {step!r}")
        number("gamma", gamma, above=0)
        low = 0.0 if getattr(self, f"min_{self.param_name}") is None else self._lowest()

        def value(base: float, p: int, total: int) -> float:
            steps = p // step if isinstance(step, int) else bisect_right(step, p)
            return max(base * gamma**steps, low)

        return value


class CosineAnnealing(Policy):
    """Lower a value along half a cosine to its lowest value at the end of the run."""

    reaches_end = True

    def formula(self) -> Formula:
        """Return the formula low + (base - low) (1 + cos(pi p / P)) / 2."""
        low = self._lowest_or_ratio()
        return lambda base, p, total: annealing_cos(base, low(base), p / total)


class LinearAnnealing(Policy):
    """Lower a value along a line to its lowest value at the end of the run."""

    reaches_end = True

    def formula(self) -> Formula:
        """Return the formula base + (low - base) p / P."""
        low = self._lowest_or_ratio()
        return lambda base, p, total: annealing_linear(base, low(base), p / total)


@dataclass(eq=False, repr=False)
class Cyclic(Policy):
    """Raise a value from base to a peak, and lower it to an end value, in each of several cycles.

    The peak and the end value are base times the two numbers of `target_ratio`. The distance of the peak from
    base is multiplied by `gamma` from one cycle to the next. After the last cycle the value stays at the end
    value. Smith, "Cyclical learning rates for training neural networks", 2017, with mmcv's cosine.
    """

    reaches_end = True
    counts_iterations = True

    by_epoch: bool = False
    target_ratio: float | Sequence[float] = (10.0, 1e-4)
    cyclic_times: int = 1
    step_ratio_up: float = 0.4
    anneal_strategy: str = "cos"
    gamma: float = 1.0

    def formula(self) -> Formula:
        """Return the formula of the cycles, which raises ValueError for fewer iterations than cycles."""
        times, up, gamma = self.cyclic_times, self.step_ratio_up, self.gamma
        first_peak, end = _target_ratio(self.target_ratio)
        positive("cyclic_times", times)
        number("step_ratio_up", up, least=0, below=1)
        number("gamma", gamma, above=0, most=1)
        anneal = _find_anneal(self.anneal_strategy)

        def value(base: float, p: int, total: int) -> float:
            """Return the value after p of `total` iterations; the cycles are whole, and the end is kept."""
            if total < times:
                raise ValueError(f"cyclic_times={times} needs a run of as many iterations, got {total}")
            length = total // times
            cycle, in_cycle = divmod(p, length)
            if cycle >= times:
                cycle, in_cycle = times - 1, length
            scale = gamma**cycle
            peak = 1 - scale + first_peak * scale
            rise = int(up * length)
            if in_cycle < rise:
                return anneal(base, base * peak, in_cycle / rise)
            return anneal(base * peak, base * end, (in_cycle - rise) / (length - rise))

        return value


def annealing_cos(start: float, end: float, factor: float, weight: float = 1.0) -> float:
    """Return the value at a position of half a cosine that goes to `end`.

    Args:
        start: the first value of the curve with `weight=1`.
        end: the last value of the curve.
        factor: the position on the curve, from 0 to 1.
        weight: the factor of the distance from `end` at which the curve starts: the first value is
            `weight * start + (1 - weight) * end`.
    """
    return end + 0.5 * weight * (start - end) * (cos(pi * factor) + 1)


def annealing_linear(start: float, end: float, factor: float) -> float:
    """Return a point on the line from `start` to `end`; `factor` is the position on it, from 0 to 1."""
    return start + (end - start) * factor


def one_cycle(
    pct_start: float, strategy: str, *, three_phase: bool
) -> Callable[[float, float, float, int, int], float]:
    """Return the function `(start, peak, last, p, P) -> value` of PyTorch's OneCycleLR.

    With two phases the value goes from `start` to `peak`, and from there to `last`. With three phases it goes
    from `peak` back to `start`, and then to `last`. Smith and Topin, "Super-convergence", 2018, in the form
    of `torch.optim.lr_scheduler.OneCycleLR`.

    Args:
        pct_start: the part of the cycle that goes up, a float in [0, 1].
        strategy: "cos" or "linear".
        three_phase: whether there are three phases.
    """
    if not isinstance(pct_start, float):
        raise TypeError(f"pct_start must be a float between 0 and 1, got {pct_start!r}")
    number("pct_start", pct_start, least=0, most=1)
    check_bools(three_phase=three_phase)
    anneal = _find_anneal(strategy)

    def value(start: float, peak: float, last: float, p: int, total: int) -> float:
        """Return the value at step p: from `start` to the peak and to `last`, in three phases via `start`."""
        end = total - 1.0
        step = min(p, end)
        phase_end = pct_start * total - 1
        if step <= phase_end:  # a rise of a single step has no slope: the value is at the peak
            return anneal(start, peak, step / phase_end if phase_end > 0 else 1.0)
        if three_phase:
            top, phase_end = phase_end, 2 * pct_start * total - 2
            if step <= phase_end:
                return anneal(peak, start, (step - top) / (phase_end - top))
            peak = start
        return anneal(peak, last, (step - phase_end) / (end - phase_end))

    return value


def check_given(what: str, given: Any) -> None:
    """Check the numbers in the argument `given` of `per_group` before the optimizer is known."""
    for of_optimizer in given.values() if isinstance(given, Mapping) else [given]:
        for value in of_optimizer if isinstance(of_optimizer, list | tuple) else [of_optimizer]:
            number(what, value, above=0)


def per_group(what: str, given: Any, name: str, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return one number for each param group of an optimizer.

    Args:
        what: the name of the argument in messages.
        given: a number for all groups, a list with one for each, or a mapping of these by the optimizer's
            name.
        name: the optimizer's name; "" for a trainer's only optimizer, which has the name of its class, as in
            mmcv.
        optimizer: the optimizer.
    """
    name, groups = name or type(optimizer).__name__, optimizer.param_groups
    if isinstance(given, Mapping):
        if name not in given:
            raise ValueError(f"{what} has no value for the optimizer {name!r}{suggest(name, [*given])}")
        given = given[name]
    values = param_groups.per_group(what, given, groups)
    return values if isinstance(values, list) else [values] * len(groups)


def _find_anneal(strategy: str) -> Callable[[float, float, float], float]:
    check_choice("anneal_strategy", strategy, ("cos", "linear"))
    return annealing_cos if strategy == "cos" else annealing_linear


def _target_ratio(given: float | Sequence[float]) -> tuple[float, float]:
    """Return the ratios `(peak, end)` of a cycle, given as a number, `(peak,)` or `(peak, end)`.

    By default the end is peak / 1e5.
    """
    ratios = [*given] if isinstance(given, list | tuple) else [given]
    if len(ratios) not in (1, 2):
        raise ValueError(f"target_ratio must be a number, (peak,) or (peak, end), got {given!r}")
    peak, *end = [number("target_ratio", ratio, above=0) for ratio in ratios]
    return peak, end[0] if end else peak / 1e5
