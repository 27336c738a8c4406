"""Records of runs to compare, with the noise of a real machine: correlated, skewed, and other in each process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eventloop.costs.records import HANDLER_POINT, PHASES, HandlerCost, Phases, RunCosts, Times, TrendPoint
from eventloop.reporting.report import Report

POINTS, EACH = 320, 8
"""Points of a trend, and the iterations in each."""
USUAL = {
    "data": 0.2e-3,
    "forward": 0.6e-3,
    "backward": 0.9e-3,
    "optimizer": 0.2e-3,
    "hooks": 0.1e-3,
    "unaccounted": 1e-5,
}
"""Seconds of an iteration of 2 ms."""
STEP = sum(USUAL.values())
OPTIMIZER = "OptimizerHook.after_train_iter"
Array = NDArray[np.float64]


def noise(random: np.random.Generator, points: int = POINTS) -> Array:
    """Factors around 1: AR(1) of 2 %, now and then a long one, and 0.3 % for the process as a whole."""
    shocks, factors = random.normal(0, 0.016, points), np.zeros(points)
    for i in range(1, points):
        factors[i] = 0.6 * factors[i - 1] + shocks[i]
    late = (random.random(points) < 0.05) * random.exponential(0.5, points)
    return np.asarray((1 + factors + late) * (1 + random.normal(0, 0.003)))


def handler(name: str, seconds: Array, **facts: Any) -> HandlerCost:
    """A handler with the seconds of each of its points."""
    fields = {
        "event": "after_train_iter",
        "priority": 50,
        "calls": POINTS * EACH,
        "share": 0.0,
        "times": Times(),
    }
    return HandlerCost(name=name, seconds=float(seconds.sum()), trend=seconds.tolist(), **{**fields, **facts})


def run(
    seed: int, *, handlers: dict[str, Any] | None = None, factors: Array | None = None, **planted: float
) -> Report:
    """A run with the handlers "mine", of 50 us, and the optimizer's.

    Args:
        handlers: seconds an iteration of further handlers: a number, or one for each of their points.
        factors: of all phases, instead of noise.
        planted: seconds an iteration that a phase takes longer, and `mine` for that handler.
    """
    random = np.random.default_rng(seed)
    machine = noise(random) if factors is None else factors
    mine = planted.pop("mine", 0.0)
    usual = {phase: seconds + planted.get(phase, 0.0) for phase, seconds in USUAL.items()}
    usual["hooks"] += mine
    own = 1 if factors is not None else random.normal(1, 0.005, (len(PHASES), POINTS))
    times = np.array([usual[phase] for phase in PHASES])[:, None] * machine * own * EACH
    trend = [
        TrendPoint(
            first_iter=i * EACH,
            phases=Phases(iterations=EACH, **dict(zip(PHASES, map(float, column), strict=True))),
        )
        for i, column in enumerate(times.T)
    ]
    group = (POINTS // HANDLER_POINT, HANDLER_POINT)
    calm = machine.reshape(group).mean(axis=1) * EACH * HANDLER_POINT
    inner = (times[PHASES.index("backward")] + times[PHASES.index("optimizer")]).reshape(group).sum(axis=1)
    costs = [
        handler(OPTIMIZER, inner + 5e-6 * calm, includes=["backward", "optimizer"]),
        handler("mine", (50e-6 + mine) * calm),
        *(handler(name, seconds * calm) for name, seconds in (handlers or {}).items()),
    ]
    total = Phases(iterations=POINTS * EACH, **dict(zip(PHASES, map(float, times.sum(axis=1)), strict=True)))
    record = RunCosts(phases=total, trend=trend, handlers=costs, complete=True)
    return Report(run=f"runs/{seed}", costs=record, log=None, notes=[])
