"""Compute the values of mmcv's learning rate and momentum policies from the progress of the run.

The hooks of mmcv's policies use it. The functions are pure: they know neither an optimizer
nor a trainer, except that `per_group` reads the number of param groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import cos, pi
from typing import Any

import torch

from eventloop.optim.param_groups import number
from eventloop.util.checks import check_bools, positive
from eventloop.util.suggest import suggest

Anneal = Callable[[float, float, float], float]


def annealing_cos(start: float, end: float, factor: float, weight: float = 1.0) -> float:
    """Return a point on half a cosine from `weight * start + (1 - weight) * end` to `end`.

    Args:
        factor: the position on it, from 0 to 1.
    """
    return end + 0.5 * weight * (start - end) * (cos(pi * factor) + 1)


def annealing_linear(start: float, end: float, factor: float) -> float:
    """Return a point on the line from `start` to `end`; `factor` is the position on it, from 0 to 1."""
    return start + (end - start) * factor


def find_anneal(strategy: str) -> Anneal:
    """Return the annealing function of "cos" or "linear".

    Raises:
        ValueError: another strategy.
    """
    if strategy not in ("cos", "linear"):
        raise ValueError(f"anneal_strategy must be 'cos' or 'linear', got {strategy!r}")
    return annealing_cos if strategy == "cos" else annealing_linear


class Steps:
    """A counter of decays: one every `step`, or one at each step of a list.

    Raises:
        TypeError, ValueError: `step` is neither a positive int nor a rising list of positive ints.
    """

    def __init__(self, step: int | Sequence[int]) -> None:
        if isinstance(step, list | tuple) and step:
            for each in step:
                positive("each step", each)
            if [*step] != sorted(set(step)):
                raise ValueError(f"step must be a rising list of ints, got {step!r}")
        elif isinstance(step, int):
            positive("step", step)
        else:
            raise TypeError(f"step must be an int or a list of ints, got {step!r}")
        self._every = step if isinstance(step, int) else 0
        self._at = () if isinstance(step, int) else tuple(step)

    def decays(self, progress: int) -> int:
        """Return the number of decays up to a progress, in epochs or iterations."""
        return progress // self._every if self._every else bisect_right(self._at, progress)


class Minimum:
    """A lower bound of a value: a number, or a ratio of the base value; exactly one of the two is given.

    Raises:
        TypeError, ValueError: both or neither are given, or one is below 0.
    """

    def __init__(self, name: str, value: float | None, ratio: float | None) -> None:
        if (value is None) == (ratio is None):
            got = "neither" if value is None else f"both ({name}={value!r}, {name}_ratio={ratio!r})"
            raise ValueError(f"expected exactly one of {name} and {name}_ratio, got {got}")
        self._value = None if value is None else number(name, value, least=0)
        self._ratio = 0.0 if ratio is None else number(f"{name}_ratio", ratio, least=0)

    def of(self, base: float) -> float:
        """Return the minimum of a group whose base value is `base`."""
        return base * self._ratio if self._value is None else self._value


class Periods:
    """Consecutive periods of a run, each with a length and a weight; after the last one, its end.

    Raises:
        TypeError, ValueError: a period is not a positive int, or the weights are not as many as the periods.
    """

    def __init__(self, periods: Sequence[int], weights: Sequence[float]) -> None:
        if not isinstance(periods, list | tuple) or not periods:
            raise TypeError(f"periods must be a list of ints, got {periods!r}")
        for period in periods:
            positive("each of periods", period)
        if len(weights) != len(periods):
            raise ValueError(
                f"restart_weights must have one number for each of {len(periods)} periods, got {len(weights)}"
            )
        self._ends = [*accumulate(periods)]
        self._last = len(periods) - 1
        self._spans = [*zip((0, *self._ends), periods, weights, strict=False)]
        """The begin of each period, its length and its weight."""
        self.total = self._ends[-1]

    def at(self, progress: int) -> tuple[float, float]:
        """Return the part of the current period that is done, from 0 to 1, and the weight of that period."""
        index = bisect_right(self._ends, progress)
        if index > self._last:
            return 1.0, self._spans[-1][2]
        began, length, weight = self._spans[index]
        return (progress - began) / length, weight


class Cycles:
    """Cycles from the base value to `target_ratio[0]` times it, and on to `target_ratio[1]` times it.

    The difference of each peak from the base shrinks by `gamma` from one cycle to the next. After the last
    cycle its end stays. Smith, "Cyclical learning rates for training neural networks", 2017, with the cosine
    of mmcv.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or range.
    """

    def __init__(
        self, target_ratio: float | Sequence[float], cyclic_times: int, step_ratio_up: float,
        anneal_strategy: str, gamma: float,
    ) -> None:  # fmt: skip
        self._peak, self._end = _target_ratio(target_ratio)
        positive("cyclic_times", cyclic_times)
        self.times = cyclic_times
        self._up = number("step_ratio_up", step_ratio_up, least=0, below=1)
        self._anneal = find_anneal(anneal_strategy)
        self._gamma = number("gamma", gamma, above=0, most=1)

    def check(self, max_iters: int) -> None:
        """Check that a run has at least one iteration for each cycle.

        Raises:
            ValueError: `max_iters` is less than the number of cycles.
        """
        if max_iters < self.times:
            raise ValueError(f"cyclic_times={self.times} needs a run of as many iterations, got {max_iters}")

    def value(self, base: float, progress: int, max_iters: int) -> float:
        """Return the value of a group whose base value is `base`, at iteration `progress` of `max_iters`."""
        length = max_iters // self.times
        if not length:
            self.check(max_iters)
        cycle, at = divmod(progress, length)
        if cycle >= self.times:
            cycle, at = self.times - 1, length
        scale = self._gamma**cycle
        peak = 1 - scale + self._peak * scale
        rise = int(self._up * length)
        if at < rise:
            return self._anneal(base, base * peak, at / rise)
        return self._anneal(base * peak, base * self._end, (at - rise) / (length - rise))


class OneCycle:
    """The three values of a cycle, in PyTorch's phases: up, down, and with `three_phase` out.

    Smith and Topin, "Super-convergence", 2018, in the form of `torch.optim.lr_scheduler.OneCycleLR`.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or range.
    """

    def __init__(self, pct_start: float, anneal_strategy: str, *, three_phase: bool) -> None:
        if not isinstance(pct_start, float):
            raise TypeError(f"pct_start must be a float between 0 and 1, got {pct_start!r}")
        self._pct = number("pct_start", pct_start, least=0, most=1)
        self._anneal = find_anneal(anneal_strategy)
        check_bools(three_phase=three_phase)
        self._three = three_phase

    def value(self, start: float, peak: float, last: float, progress: int, total: int) -> float:
        """Return the value at iteration `progress` of `total`; at the last one, and after it, `last`."""
        end = total - 1.0
        at = min(progress, end)
        began = self._pct * total - 1
        if at <= began:  # a rise of a single step has no slope: it is at its end
            return self._anneal(start, peak, at / began if began > 0 else 1.0)
        if self._three:
            top, began = began, 2 * self._pct * total - 2
            if at <= began:
                return self._anneal(peak, start, (at - top) / (began - top))
            peak = start
        return self._anneal(peak, last, (at - began) / (end - began))


def check_given(what: str, given: Any) -> None:
    """Check a number, a list or a mapping that `per_group` will take, before the optimizer is known.

    Raises:
        TypeError, ValueError: it is neither a number above 0 nor a list or mapping of those.
    """
    if isinstance(given, Mapping):
        for each in given.values():
            check_given(what, each)
    elif isinstance(given, list | tuple):
        for each in given:
            number(what, each, above=0)
    else:
        number(what, given, above=0)


def per_group(what: str, given: Any, name: str, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return one number per param group, from one number, a list, or a mapping by the optimizer's name.

    The name of a trainer's only optimizer is the name of its class, as in mmcv.

    Raises:
        ValueError: the numbers are not as many as the groups, or the mapping lacks the optimizer.
    """
    name, count = name or type(optimizer).__name__, len(optimizer.param_groups)
    if isinstance(given, Mapping):
        if name not in given:
            raise ValueError(f"{what} has no value for the optimizer {name!r}{suggest(name, [*given])}")
        given = given[name]
    values = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(values) != count:
        raise ValueError(f"{what} must have one value for each of {count} param groups, got {len(values)}")
    return [float(value) for value in values]


def _target_ratio(given: float | Sequence[float]) -> tuple[float, float]:
    """Return `(peak, end)` from mmcv's forms; without an end it is peak / 1e5."""
    if isinstance(given, list | tuple):
        if len(given) not in (1, 2):
            raise ValueError(f"target_ratio must be a number, (peak,) or (peak, end), got {given!r}")
        ratios = [number("target_ratio", ratio, above=0) for ratio in given]
    elif isinstance(given, int | float) and not isinstance(given, bool):
        ratios = [number("target_ratio", given, above=0)]
    else:
        raise TypeError(f"target_ratio must be a number, (peak,) or (peak, end), got {given!r}")
    return ratios[0], ratios[1] if len(ratios) == 2 else ratios[0] / 1e5
