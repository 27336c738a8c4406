"""Compute the values of mmcv's learning rate and momentum policies from the progress of the run.

The policies in `hooks/lr_policies.py` and `hooks/momentum_updater.py` use it. Each function checks a policy's
arguments, raises TypeError or ValueError with the argument's name, and returns the formula. A formula knows
neither an optimizer nor a trainer. In the docstrings base is the initial value, p the number of completed
units (epochs or iterations), and P their total number in the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import cos, pi
from typing import Any

import torch

from eventloop.optim import param_groups
from eventloop.util.checks import check_bools, check_choice, number, positive
from eventloop.util.suggest import suggest

Formula = Callable[[float, int, int], float]
"""A function `(initial value, p, P) -> value`, where p of the run's P epochs or iterations are completed."""
Minimum = Callable[[float], float]
"""A function `(initial value) -> lowest value`."""


def annealing_cos(start: float, end: float, factor: float, weight: float = 1.0) -> float:
    """Return a point on half a cosine from `weight * start + (1 - weight) * end` to `end`.

    Args:
        start, end: the values between which the curve runs.
        factor: the position on the curve, from 0 to 1.
        weight: the share of the distance that the curve covers.
    """
    return end + 0.5 * weight * (start - end) * (cos(pi * factor) + 1)


def annealing_linear(start: float, end: float, factor: float) -> float:
    """Return a point on the line from `start` to `end`; `factor` is the position on it, from 0 to 1."""
    return start + (end - start) * factor


def minimum(name: str, value: float | None, ratio: float | None) -> Minimum:
    """Return a function for the lowest value, given as a number or as a ratio of the initial value."""
    if (value is None) == (ratio is None):
        got = "neither" if value is None else f"both ({name}={value!r}, {name}_ratio={ratio!r})"
        raise ValueError(f"expected exactly one of {name} and {name}_ratio, got {got}")
    if value is not None:
        lowest = number(name, value, least=0)
        return lambda base: lowest
    factor = number(f"{name}_ratio", ratio, least=0)
    return lambda base: base * factor


def step_decay(step: int | Sequence[int], gamma: float, name: str, lowest: float | None) -> Formula:
    """Return the formula max(base gamma^n, lowest), where n is the number of steps up to p.

    Args:
        step: an interval in epochs or iterations, after each of which there is a step; or a rising list of
            the steps.
        gamma: the factor of each step, above 0.
        name, lowest: the name of the argument for the lowest value, and that value; None for 0.
    """
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
    low = 0.0 if lowest is None else number(name, lowest, least=0)

    def value(base: float, p: int, total: int) -> float:
        decays = p // step if isinstance(step, int) else bisect_right(step, p)
        return max(base * gamma**decays, low)

    return value


def exponential(gamma: float) -> Formula:
    """Return the formula base gamma^p, where p units (epochs or iterations) are completed."""
    number("gamma", gamma, above=0)
    return lambda base, p, total: base * gamma**p


def inverse(gamma: float, power: float) -> Formula:
    """Return the formula base (1 + gamma p)^-power, where p units are completed."""
    number("gamma", gamma, above=0)
    number("power", power, above=0)
    return lambda base, p, total: base * (1 + gamma * p) ** -power


def polynomial(power: float, name: str, lowest: float) -> Formula:
    """Return the formula lowest + (base - lowest) (1 - p / P)^power, where p of P units are completed."""
    number("power", power, above=0)
    low = number(name, lowest, least=0)
    return lambda base, p, total: low + (base - low) * (1 - p / total) ** power


def cosine(low: Minimum) -> Formula:
    """Return the formula low + (base - low) (1 + cos(pi p / P)) / 2, where p of P units are completed."""
    return lambda base, p, total: annealing_cos(base, low(base), p / total)


def line(low: Minimum) -> Formula:
    """Return the formula base + (low - base) p / P, where p of P units are completed."""
    return lambda base, p, total: annealing_linear(base, low(base), p / total)


def flat_cosine(start_percent: float, low: Minimum) -> Formula:
    """Return the formula of a value that stays at base, and then falls along half a cosine.

    With p of P units completed, it is base until s = round(start_percent P), then half a cosine of
    (p - s) / (P - s).
    """
    if not isinstance(start_percent, float):
        raise TypeError(f"start_percent must be a float in [0, 1), got {start_percent!r}")
    number("start_percent", start_percent, least=0, below=1)

    def value(base: float, p: int, total: int) -> float:
        start = round(total * start_percent)
        if p < start:
            return base
        return annealing_cos(base, low(base), (p - start) / (total - start) if total > start else 1.0)

    return value


def restarts(periods: Sequence[int], weights: Sequence[float], low: Minimum) -> Formula:
    """Return the formula low + weight (base - low) (1 + cos(pi q)) / 2, with q from 0 to 1 over each period.

    The formula raises ValueError for a run that is longer than the sum of the periods.
    """
    if not isinstance(periods, list | tuple) or not periods:
        raise TypeError(f"periods must be a list of ints, got {periods!r}")
    for period in periods:
        positive("each of periods", period)
    if len(weights) != len(periods):
        raise ValueError(
            f"restart_weights must have one number for each of {len(periods)} periods, got {len(weights)}"
        )
    ends = [*accumulate(periods)]

    def value(base: float, p: int, total: int) -> float:
        if ends[-1] < total:
            raise ValueError(f"periods are {ends[-1]} together, and the run has {total}: add periods")
        index = min(bisect_right(ends, p), len(ends) - 1)
        done = 1 - (ends[index] - p) / periods[index]
        return annealing_cos(base, low(base), done, weights[index])

    return value


def cycles(
    target_ratio: float | Sequence[float], times: int, step_ratio_up: float, strategy: str, gamma: float
) -> Formula:
    """Return the formula of `times` cycles from base to a peak and on to an end value, both ratios of base.

    The distance of each peak from base shrinks by `gamma` from one cycle to the next. After the last cycle
    the value stays at its end. Smith, "Cyclical learning rates for training neural networks", 2017, with
    mmcv's cosine. The formula raises ValueError for a run with fewer iterations than cycles.
    """
    first_peak, end = _target_ratio(target_ratio)
    positive("cyclic_times", times)
    number("step_ratio_up", step_ratio_up, least=0, below=1)
    number("gamma", gamma, above=0, most=1)
    anneal = _find_anneal(strategy)

    def value(base: float, p: int, total: int) -> float:
        if total < times:
            raise ValueError(f"cyclic_times={times} needs a run of as many iterations, got {total}")
        length = total // times
        cycle, at = divmod(p, length)
        if cycle >= times:
            cycle, at = times - 1, length
        scale = gamma**cycle
        peak = 1 - scale + first_peak * scale
        rise = int(step_ratio_up * length)
        if at < rise:
            return anneal(base, base * peak, at / rise)
        return anneal(base * peak, base * end, (at - rise) / (length - rise))

    return value


def one_cycle(
    pct_start: float, strategy: str, *, three_phase: bool
) -> Callable[[float, float, float, int, int], float]:
    """Return the function `(start, peak, last, p, P) -> value` of PyTorch's OneCycleLR.

    With two phases the value goes from `start` to `peak` and down to `last`; with three it goes back to
    `start` first. Smith and Topin, "Super-convergence", 2018, in the form of
    `torch.optim.lr_scheduler.OneCycleLR`.

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
        end = total - 1.0
        at = min(p, end)
        began = pct_start * total - 1
        if at <= began:  # a rise of a single step has no slope: it is at its end
            return anneal(start, peak, at / began if began > 0 else 1.0)
        if three_phase:
            top, began = began, 2 * pct_start * total - 2
            if at <= began:
                return anneal(peak, start, (at - top) / (began - top))
            peak = start
        return anneal(peak, last, (at - began) / (end - began))

    return value


def check_given(what: str, given: Any) -> None:
    """Check a number, list or mapping for `per_group` before the optimizer is known."""
    for each in given.values() if isinstance(given, Mapping) else [given]:
        for value in each if isinstance(each, list | tuple) else [each]:
            number(what, value, above=0)


def per_group(what: str, given: Any, name: str, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return one number per param group, from one number, a list, or a mapping by the optimizer's name.

    The name of a trainer's only optimizer is the name of its class, as in mmcv.
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
    """Return `(peak, end)` from a number, `(peak,)` or `(peak, end)`; the default end is peak / 1e5."""
    ratios = [*given] if isinstance(given, list | tuple) else [given]
    if len(ratios) not in (1, 2):
        raise ValueError(f"target_ratio must be a number, (peak,) or (peak, end), got {given!r}")
    peak, *end = [number("target_ratio", ratio, above=0) for ratio in ratios]
    return peak, end[0] if end else peak / 1e5
