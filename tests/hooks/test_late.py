"""Hooks behind the checkpoint: what they do is not in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EMAHook, Hook, LRScheduler, PreciseBN, on
from eventloop.registry import build

Make = Callable[..., Trainer]
SAYS = "after CheckpointHook (90), which saves there: its changes are missing from that checkpoint"


class Counter(Hook):
    """A hook of somebody's own, with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def counting() -> Any:
    """A method that counts events."""

    def count_one(self: Counter, trainer: Trainer, event: Any) -> None:
        self.count += 1

    return count_one


class CountsIters(Counter):
    priority = "LOWEST"
    after_train_iter = counting()


class CountsAll(Counter):
    after_iter = on(priority=95)(counting())


class CountsEpochs(Counter):
    priority = 91
    after_train_epoch = counting()


class InTime(Counter):
    priority = 95
    after_train_iter = on(priority="LOW")(counting())


class Stateless(Hook):
    priority = 100

    def after_train_iter(self, trainer: Trainer, event: Any) -> None: ...


class InTheBackground(Counter):
    priority = 95

    async def after_train_iter(self: Hook, event: Any) -> None: ...  # type: ignore[override]


def warnings_of_others(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "which saves there" in line]


@pytest.mark.parametrize(
    ("hook", "checkpoint", "begins"),
    [
        (CountsIters, {"by_epoch": False}, "CountsIters has priority 100 in after_train_iter"),
        (CountsAll, {"by_epoch": False}, "CountsAll has priority 95 in after_train_iter"),
        (CountsEpochs, {}, "CountsEpochs has priority 91 in after_train_epoch"),
        (lambda: at(95, PreciseBN()), {}, "PreciseBN has priority 95 in after_train_epoch"),
        (
            lambda: at(90, LRScheduler()),
            {"by_epoch": False},
            "LRScheduler has priority 90 in after_train_iter",
        ),
    ],
    ids=["iter", "generic", "epoch", "PreciseBN", "LRScheduler"],
)
def test_late_hooks_are_told(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, hook: Any, checkpoint: Any, begins: str
) -> None:
    """A hook with a state, or that moves the trainer's, which hears the event of the saves after them is named when the
    trainer is built, with both priorities and what to do; it may mean to."""
    make_trainer(hooks=[CheckpointHook(interval=1, **checkpoint), hook()])

    (line,) = warnings_of_others(caplog)
    assert line.startswith(begins)
    assert SAYS in line
    assert line.endswith("give it a priority below 90")


def at(priority: int, hook: Any) -> Any:
    """The hook with another priority."""
    hook.priority = priority
    return hook


@pytest.mark.parametrize(
    ("hook", "checkpoint"),
    [
        (CountsIters, {}),
        (CountsIters, {"interval": -1, "by_epoch": False}),
        (InTime, {"by_epoch": False}),
        (Stateless, {"by_epoch": False}),
        (InTheBackground, {"by_epoch": False}),
        (lambda: CheckpointHook(1, by_epoch=False, out_dir="other"), {"by_epoch": False}),
        (lambda: at(89, EMAHook()), {"by_epoch": False}),
    ],
    ids=["epochs", "never", "in time", "stateless", "background", "checkpoint", "average"],
)
def test_nothing_is_told_of_others(
    make_trainer: Make,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: Any,
    checkpoint: Any,
) -> None:
    """Saves at another event, hooks without a state, those in time, in the background, a second CheckpointHook, and an
    average before the checkpoint's turn are no reason for a warning."""
    monkeypatch.chdir(tmp_path)  # for a relative `out_dir`
    make_trainer(hooks=[CheckpointHook(**{"interval": 1, **checkpoint}), hook()])

    assert warnings_of_others(caplog) == []


def test_equal_priorities_run_in_their_order(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same priority, who is registered first has the first turn."""
    make_trainer(hooks=[at(90, CountsIters()), CheckpointHook(interval=1, by_epoch=False)])
    assert warnings_of_others(caplog) == []

    make_trainer(hooks=[CheckpointHook(interval=1, by_epoch=False), at(90, CountsIters())])
    assert len(warnings_of_others(caplog)) == 1


@pytest.mark.parametrize(
    ("checkpoint", "priority"), [({"interval": 1}, 90), ({"by_epoch": False}, 95), ({}, 95)]
)
def test_an_average_behind_the_checkpoint_is_refused(
    make_trainer: Make, checkpoint: Any, priority: int
) -> None:
    """A checkpoint with the average of the iteration before is refused when the trainer is built, by any unit."""
    hook = build({"type": "EMAHook", "priority": priority})

    with pytest.raises(
        ValueError,
        match=rf"EMAHook has priority {priority} in after_train_iter, after CheckpointHook \(90\): a checkpoint would "
        "lack the last update, and a resumed run would average other weights; give it a priority below 90$",
    ):
        make_trainer(hooks=[CheckpointHook(**checkpoint), hook])
