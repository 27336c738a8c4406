"""A hook's `budget_us` is refused where it is no budget, and reaches everything the hook subscribes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.hooks import CallbackHook, GarbageCollectionHook, Hook, LRScheduler, TestHook, on
from eventloop.registry import build
from tests.hooks.conftest import Make


class Pointless(Hook):
    """A hook without points."""


@pytest.mark.parametrize(
    ("budget_us", "error", "expected"),
    [
        *((value, ValueError, "in microseconds, must be above 0, got") for value in (0, -5)),
        *(
            (value, ValueError, "in microseconds, must be a finite number, got")
            for value in (math.nan, 10**400)
        ),
        ("5", TypeError, "in microseconds, must be a number, got '5'"),
    ],
)
def test_a_hook_without_points_is_checked_too(
    budget_us: Any, error: type[Exception], expected: str, bus: Bus
) -> None:
    """When it is attached, by the name of its class."""
    hook = Pointless()
    hook.budget_us = budget_us

    with pytest.raises(error, match=f"Pointless: budget_us, {expected}"):
        hook.attach(bus)


def test_a_class_without_a_budget_is_refused_where_it_is_written() -> None:
    """By name."""
    with pytest.raises(ValueError, match="Nothing: budget_us, in microseconds, must be above 0"):
        type("Nothing", (Hook,), {"budget_us": 0})


def test_a_hooks_budget_is_its_methods(make_trainer: Make) -> None:
    """The class's, the config's, and one method's own."""

    class Budgeted(Hook):
        budget_us = 100

        def after_train_iter(self, trainer: Trainer, event: Any) -> None: ...

        @on(budget_us=50)
        def before_train_iter(self, trainer: Trainer, event: Any) -> None: ...

    trainer = make_trainer(hooks=[Budgeted(), {"type": "EmptyCacheHook", "after_iter": True, "budget_us": 7}])

    budgets = {(h.name, h.event): h.budget for h in trainer.costs().handlers if h.budget}
    assert {key: budget for key, budget in budgets.items() if "iter" in key[1]} == {
        ("Budgeted.after_train_iter", "after_train_iter"): pytest.approx(100e-6),
        ("Budgeted.before_train_iter", "before_train_iter"): pytest.approx(50e-6),
        **{
            ("EmptyCacheHook.after_iter", f"after_{mode}_iter"): pytest.approx(7e-6)
            for mode in ("train", "val", "test")
        },
    }


@pytest.mark.parametrize(("budget_us", "error"), [(0, ValueError), (True, TypeError)])
def test_a_configs_budget_is_refused_where_it_is_built(budget_us: Any, error: type[Exception]) -> None:
    """Before anything is attached: not every rank attaches writers."""
    for kind in (Pointless, "EMAHook", "JSONLWriter"):
        name = kind if isinstance(kind, str) else kind.__name__
        with pytest.raises(error, match=f"{name}: budget_us, in microseconds, must be "):
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
