"""on_rank: handlers of one rank; two ranks are in tests/trainer/test_two_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.hooks import Hook, on
from eventloop.hooks.one_rank import on_rank
from eventloop.trainer import Trainer


def test_runs_on_its_rank(bus: Bus) -> None:
    """A process without a group is rank 0: its handlers run, those of another rank do not."""
    seen: list[str] = []

    @bus.on("after_train_iter")
    @on_rank(0)
    def mine(event: AfterTrainIter) -> None:
        seen.append("mine")

    @bus.on("after_train_iter")
    @on_rank(1)
    def theirs(event: AfterTrainIter) -> None:
        pytest.fail("this is rank 0")

    bus.emit(AfterTrainIter())

    assert seen == ["mine"]


def test_keeps_name_and_signature(bus: Bus) -> None:
    """The plan names the function, and a wrong signature is refused as without the decorator."""

    @on_rank(0)
    def show(trainer: Any, event: AfterTrainIter) -> None: ...

    @on_rank(0)
    def wrong(a: Any, b: Any, c: Any) -> None: ...

    bus.subscribe(show, "after_train_iter")

    assert "show" in bus.plan("after_train_iter")[0].name
    with pytest.raises(TypeError, match="wrong"):
        bus.subscribe(wrong, "after_train_iter")


def test_coroutines_run_in_the_background(bus: Bus) -> None:
    """A coroutine function stays one."""
    seen: list[int] = []

    @bus.on("after_train_iter")
    @on_rank(0)
    async def mine(event: AfterTrainIter) -> None:
        seen.append(event.iter)

    @bus.on("after_train_iter")
    @on_rank(1)
    async def theirs(event: AfterTrainIter) -> None:
        seen.append(-1)

    bus.emit(AfterTrainIter(iter=3))
    bus.flush()

    assert seen == [3]


def test_methods_of_hooks(make_trainer: Callable[..., Trainer]) -> None:
    """A hook's method takes both decorators, in either order."""
    seen: list[tuple[str, int]] = []

    class Show(Hook):
        @on_rank(0)
        @on(every=2)
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            """Every second iteration."""
            seen.append(("after", event.iter))

        @on(every=3)
        @on_rank(0)
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            """Every third iteration."""
            seen.append(("before", event.iter))

    make_trainer(hooks=[Show()], batches=4).train()

    assert seen == [("after", 1), ("before", 2), ("after", 3)]


def test_bad_rank() -> None:
    """What is no rank is refused where it is written, `@on_rank` without a call too."""
    with pytest.raises(ValueError, match="on_rank needs the number of a rank, 0 or above, got -1"):
        on_rank(-1)
    with pytest.raises(TypeError, match=r"on_rank needs the number of a rank, got .*: write @on_rank\(0\)"):
        on_rank(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_rank decorates a function, got 3"):
        on_rank(0)(3)  # type: ignore[type-var]
