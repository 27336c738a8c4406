"""Shares of a stretch of iterations, from two records of one run."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.costs.records import HandlerCost, Phases, RunCosts, Times
from eventloop.costs.shares import shares_between


def a_handler(name: str, seconds: float, calls: int, **facts: Any) -> HandlerCost:
    """Return the costs of a handler of train iterations."""
    fields = {"event": "after_train_iter", "priority": 50, "share": 0.0, "times": Times(), **facts}
    return HandlerCost(name=name, seconds=seconds, calls=calls, **fields)


def phases(iterations: int, **seconds: float) -> Phases:
    """Return the phases of some iterations, in seconds of all of them."""
    return Phases(iterations=iterations, **seconds)


BEFORE = RunCosts(
    phases=phases(10, data=1.0, forward=5.0, backward=20.0, optimizer=1.0, hooks=2.0),
    handlers=[
        a_handler("EMAHook.after_train_iter", 0.5, 10),
        a_handler("OptimizerHook.after_train_iter", 22.0, 10, includes=["backward", "optimizer"]),
        a_handler("both", 0.25, 10),
    ],
)
AFTER = RunCosts(
    phases=phases(14, data=3.0, forward=6.0, backward=22.0, optimizer=3.0, hooks=3.0),
    handlers=[
        a_handler("EMAHook.after_train_iter", 1.0, 14),
        a_handler("OptimizerHook.after_train_iter", 27.0, 14, includes=["backward", "optimizer"]),
        a_handler("both", 0.5, 14),
        a_handler("both", 0.25, 4, event="after_backward"),
        a_handler("late", 1.0, 1),
        a_handler("never", 0.0, 0),
        a_handler("CheckpointHook.before_run", 9.0, 1, event="before_run", in_iteration=False),
    ],
)


def test_shares_are_of_the_iterations_between_the_records() -> None:
    """Of 8 s 2 waited for data and 1 went to hooks; a handler counts without the phases that it runs, with all of its
    events, from its first call on. Handlers outside of the iterations have no share of them."""
    assert shares_between(BEFORE, AFTER) == {
        "data_share": 2 / 8,
        "hooks_share": 1 / 8,
        "EMAHook.after_train_iter": 0.5 / 8,
        "OptimizerHook.after_train_iter": 1 / 8,
        "both": 0.5 / 8,
        "late": 1 / 8,
    }


@pytest.mark.parametrize("after", [BEFORE, RunCosts()], ids=["no further iteration", "nothing measured"])
def test_no_iteration_has_no_shares(after: RunCosts) -> None:
    """Nothing is divided by zero."""
    assert shares_between(after, after) == {}
