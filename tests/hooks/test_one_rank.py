"""on_rank: handlers of one rank; two ranks are in tests/training/test_two_ranks.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.hooks import Hook, on, on_rank
from tests.hooks.conftest import Make
from tests.support.internals import substitute


def test_runs_on_its_rank(bus: Bus) -> None:
    """A process without a group is rank 0: its handlers and coroutines run, those of another rank do not."""
    seen: list[str] = []

    @on_rank(0)
    def mine(event: AfterTrainIter) -> None:
        seen.append("mine")

    @on_rank(0)
    async def my_coroutine(event: AfterTrainIter) -> None:
        seen.append("my coroutine")

    @on_rank(1)
    def theirs(event: AfterTrainIter) -> None:
        seen.append("theirs")

    @on_rank(1)
    async def their_coroutine(event: AfterTrainIter) -> None:
        seen.append("their coroutine")

    for handler in (mine, my_coroutine, theirs, their_coroutine):
        bus.subscribe(handler, "after_train_iter")
    bus.emit(AfterTrainIter())
    bus.flush()

    assert seen == ["mine", "my coroutine"]


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


@pytest.fixture
def group_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, which passes for one of two: a collective that is not refused returns."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    substitute(monkeypatch, "one_rank.rank_and_world_size", lambda: (0, 2))
    yield
    dist.destroy_process_group()


async def test_a_collective_of_a_coroutine_is_refused(group_of_two: None) -> None:
    """Wherever it awaits: before and after others have run on its thread, who may do collectives meanwhile."""
    turn, back = asyncio.Event(), asyncio.Event()
    refused: list[str] = []

    def reduce() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            refused.append(str(error))

    @on_rank(0)
    async def mine(event: AfterTrainIter) -> str:
        reduce()
        turn.set()
        await back.wait()
        reduce()
        return "done"

    async def another() -> None:
        await turn.wait()
        dist.all_reduce(torch.ones(1))
        back.set()

    result, _ = await asyncio.gather(mine(AfterTrainIter()), another())

    assert result == "done"
    assert len(refused) == 2
    for error in refused:
        assert re.search(r"mine runs on rank 0 only, and its .*allreduce.* would wait forever", error)


async def test_a_watched_coroutine_is_cancelled(group_of_two: None) -> None:
    """A cancellation reaches it where it waits, and it may wait again to clean up."""
    waits = asyncio.Event()
    said: list[str] = []

    @on_rank(0)
    async def mine(event: AfterTrainIter) -> None:
        try:
            waits.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    task = asyncio.ensure_future(mine(AfterTrainIter()))
    await waits.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["cleaned up"]


def test_methods_of_hooks(make_trainer: Make) -> None:
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
    with pytest.raises(ValueError, match=r"the rank of @on_rank\(rank\) must be at least 0, got -1"):
        on_rank(-1)
    with pytest.raises(TypeError, match=r"the rank of @on_rank\(rank\) must be an int, got "):
        on_rank(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_rank decorates a function, got 3"):
        on_rank(0)(3)  # type: ignore[type-var]
