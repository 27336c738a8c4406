"""CallbackHook and ClosureHook: plain functions as hooks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from eventloop import Trainer
from eventloop.hooks import CallbackHook, ClosureHook
from tests.hooks.conftest import Make, Scripted


def test_functions_are_called_at_their_points(make_trainer: Make) -> None:
    """Each with the trainer and the event, in the order of the loop."""
    seen: list[str] = []
    hook = CallbackHook(
        before_train=lambda trainer, event: seen.append(f"before {trainer.iter}"),
        after_train_iter=lambda trainer, event: seen.append(f"iter {event.iter}"),
        after_train=lambda trainer, event: seen.append(f"after {trainer.iter}"),
    )

    make_trainer(batches=2, hooks=[hook]).train()

    assert seen == ["before 0", "iter 0", "iter 1", "after 2"]


def test_a_mock_is_called(make_trainer: Make) -> None:
    """A mock, which has every attribute, is called like a function, at the hook's own priority."""
    called = Mock()

    make_trainer(batches=2, hooks=[CallbackHook(after_train_iter=called)]).train()

    assert called.call_count == 2


def test_parameters_name_decides_what_is_given(make_trainer: Make) -> None:
    """`(event)` gets the event, `(trainer)` and mmcv's `(runner)` the trainer; None is left out."""
    seen: list[str] = []
    hook = CallbackHook(
        before_run=None,
        before_train=lambda event: seen.append(type(event).__name__),
        after_train=lambda trainer: seen.append(type(trainer).__name__),
        after_run=lambda runner: seen.append(type(runner).__name__),
    )

    make_trainer(hooks=[hook]).train()

    assert seen == ["BeforeTrain", "Trainer", "Trainer"]


def test_detectron2s_names_are_understood(make_trainer: Make) -> None:
    """`before_step` and `after_step` are the train iteration's."""
    seen: list[str] = []
    hook = CallbackHook(
        before_step=lambda trainer: seen.append("before"), after_step=lambda trainer: seen.append("after")
    )

    make_trainer(batches=2, hooks=[hook]).train()

    assert seen == ["before", "after"] * 2


def test_point_for_all_modes_leaves_out_those_with_their_own(make_trainer: Make, scripted: Scripted) -> None:
    """`after_iter` serves the modes that have no function of their own."""
    seen: list[str] = []
    hook = CallbackHook(
        after_iter=lambda event: seen.append(f"any {event.mode}"),
        after_val_iter=lambda event: seen.append("val"),
    )

    make_trainer(batches=1, hooks=[hook], **scripted(0.5)).train()

    assert seen == ["any train", "val"]


def test_priority_is_that_of_all_functions(make_trainer: Make) -> None:
    """The plan shows them under their own names, a lambda by the line that wrote it, at their place."""

    def observe(trainer: Trainer, event: Any) -> None: ...

    hook = CallbackHook(
        after_train_iter=observe, after_train=lambda trainer: None, priority="VERY_LOW", name="looks"
    )
    trainer = make_trainer(hooks=[hook])

    assert ("observe", 90) in [(row.name, row.priority) for row in trainer.bus.plan("after_train_iter")]
    assert any(row.name.startswith("lambda (test_callback.py:") for row in trainer.bus.plan("after_train"))
    assert trainer.hooks[-1].name == "looks"


def test_coroutine_runs_in_the_background(make_trainer: Make) -> None:
    """It takes the event alone, and has heard all of them when the run has ended."""
    seen: list[int] = []

    async def receive(event: Any) -> None:
        seen.append(event.iter)

    make_trainer(batches=3, hooks=[CallbackHook(after_train_iter=receive)]).train()

    assert seen == [0, 1, 2]


def test_two_hooks_side_by_side(make_trainer: Make) -> None:
    """They have no state, so they need no names."""
    seen: list[int] = []
    hooks = [CallbackHook(after_train=lambda event, n=n: seen.append(n)) for n in (1, 2)]

    make_trainer(hooks=hooks).train()

    assert seen == [1, 2]


def test_closure_hook_is_one_function_at_one_point(make_trainer: Make) -> None:
    """mmcv's form, with its `(runner)` too."""
    seen: list[int] = []
    hooks = [
        ClosureHook("after_train_epoch", lambda trainer, event: seen.append(event.epoch)),
        ClosureHook("after_train", lambda runner: seen.append(runner.iter), priority=90),
    ]

    make_trainer(batches=2, hooks=hooks).train()

    assert seen == [0, 2]


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        ({"after_train_itr": print}, ValueError, "there is no event 'after_train_itr': did you mean"),
        ({"priorty": print}, ValueError, "there is no event 'priorty'"),
        ({"after_train": 3}, TypeError, "after_train must be a function, got 3"),
        ({"after_train": lambda a, b, c: None}, TypeError, r"expected \(trainer, event\) or \(event\)"),
        ({}, ValueError, "CallbackHook has no function to call"),
        ({"after_train": None}, ValueError, "CallbackHook has no function to call"),
        (
            {"after_step": print, "after_train_iter": print},
            TypeError,
            "has both after_step and after_train_iter, two",
        ),
        ({"after_train": print, "priority": "LOWISH"}, ValueError, "LOWISH"),
    ],
)
def test_mistakes_surface_where_they_are_made(
    points: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The hook is not built."""
    with pytest.raises(error, match=message):
        CallbackHook(**points)


@pytest.mark.parametrize("point", ["after_train_itr", "priority", "name"])
def test_closure_hook_refuses_what_is_no_point(point: str) -> None:
    """With a suggestion."""
    with pytest.raises(ValueError, match=f"there is no event '{point}'"):
        ClosureHook(point, print)
