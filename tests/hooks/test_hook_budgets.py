"""A hook's `budget_us` is refused where it is no budget, and reaches everything the hook subscribes."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.hooks import CallbackHook, GarbageCollectionHook, Hook, LRScheduler, TestHook
from eventloop.registry import build


class Pointless(Hook):
    """A hook without points."""


@pytest.mark.parametrize("budget_us", [0, -5, float("nan"), 10**400])
def test_a_hook_without_points_is_checked_too(budget_us: float) -> None:
    """When it is attached, by the name of its class."""
    hook = Pointless()
    hook.budget_us = budget_us

    with pytest.raises(ValueError, match="Pointless: budget_us must be above 0 microseconds and finite, got"):
        hook.attach(Bus())


def test_a_budget_that_is_no_number_is_refused() -> None:
    """As at `bus.on`."""
    hook: Any = Pointless()
    hook.budget_us = "5"

    with pytest.raises(TypeError, match="Pointless: budget_us must be a number of microseconds, got '5'"):
        hook.attach(Bus())


@pytest.mark.parametrize(("budget_us", "error"), [(0, ValueError), (True, TypeError)])
def test_a_configs_budget_is_refused_where_it_is_built(budget_us: Any, error: type[Exception]) -> None:
    """Before anything is attached: not every rank attaches writers."""
    for kind in (Pointless, "EMAHook", "JSONLWriter"):
        name = kind if isinstance(kind, str) else kind.__name__
        with pytest.raises(error, match=f"{name}: budget_us must be "):
            build({"type": kind, "budget_us": budget_us})
    assert build({"type": "JSONLWriter", "budget_us": None}).budget_us is None


@pytest.mark.parametrize(
    ("hook", "event", "name"),
    [
        (GarbageCollectionHook(), "after_train_iter", "GarbageCollectionHook.after_iter"),
        (LRScheduler(), "after_train_iter", "LRScheduler.put_lr"),
        (TestHook(), "after_test_iter", "TestHook._end_batch"),
        (CallbackHook(before_run=print), "before_run", "print"),
    ],
)
def test_what_a_hook_subscribes_itself_has_its_budget(hook: Hook, event: str, name: str, bus: Bus) -> None:
    """Besides its methods."""
    hook.budget_us = 123

    hook.attach(bus)

    assert {row.name: row.budget_us for row in bus.plan(event)}[name] == 123
