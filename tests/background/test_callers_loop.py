"""A coroutine handler on the caller's own event loop: `bus.on(..., loop=asyncio.get_running_loop())`."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE
from tests.support.spilling import emit, iters

request: ContextVar[str] = ContextVar("request", default="")


async def later(event: Event) -> None:
    """A coroutine handler."""


def at_once(event: Event) -> None:
    """A plain handler."""


async def drained(bus: Bus) -> bool:
    """Flush the bus while the loop runs."""
    return bool(await asyncio.to_thread(bus.flush, DEADLINE))


def test_it_runs_on_the_callers_loop(bus: Bus) -> None:
    """On its thread, in the caller's context, in the order of the emits; the default is a loop of the bus's own."""

    async def main() -> None:
        request.set("of the caller")
        own: list[Any] = []
        others: list[Any] = []

        @bus.on("after_train_iter", loop=asyncio.get_running_loop())
        async def here(event: AfterTrainIter) -> None:
            await asyncio.sleep(0)
            own.append((event.iter, asyncio.get_running_loop(), threading.current_thread(), request.get()))

        @bus.on("after_train_iter")
        async def elsewhere(event: AfterTrainIter) -> None:
            others.append(asyncio.get_running_loop())

        emit(bus, 3)
        assert await drained(bus)
        assert own == [
            (n, asyncio.get_running_loop(), threading.main_thread(), "of the caller") for n in range(3)
        ]
        assert len(others) == 3
        assert asyncio.get_running_loop() not in others

    asyncio.run(main())


def test_a_filter_a_batch_the_account_and_an_error(bus: Bus) -> None:
    """What holds for other background subscribers holds here."""

    async def main() -> None:
        batches: list[list[Any]] = []

        async def receive(events: list[Any]) -> None:
            batches.append(events)
            if events[-1].iter > 100:
                raise ValueError("no network")

        taking = bus.subscribe(
            receive,
            "after_train_iter",
            every=2,
            batch=True,
            queue=2,
            on_error="raise",
            loop=asyncio.get_running_loop(),
        )
        emit(bus, 20)  # more than the queue holds, while the loop is here
        assert await drained(bus)
        assert iters([event for batch in batches for event in batch]) == [*range(1, 20, 2)]
        assert (taking.stats.delivered, taking.stats.runs_on) == (10, "loop")
        assert taking.stats.calls == len(batches)
        emit(bus, 1, start=101)
        assert await drained(bus)
        with pytest.raises(ValueError, match="no network"):
            bus.poll()

    asyncio.run(main())


def test_a_delivery_that_stalls_is_given_up(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """It is torn out of what it awaits, and the loop goes on."""

    async def main() -> None:
        torn_out = asyncio.Event()

        async def hangs(event: Event) -> None:
            try:
                await asyncio.sleep(10 * DEADLINE)
            finally:
                torn_out.set()

        stalls = bus.subscribe(hangs, "after_train_iter", stall_timeout=0.05, loop=asyncio.get_running_loop())
        emit(bus, 2)
        await asyncio.wait_for(torn_out.wait(), DEADLINE)
        assert (stalls.stats.failed, stalls.stats.dropped) == (1, 1)

    asyncio.run(main())
    assert "hangs spent more than stall_timeout=0.05 s on one delivery" in caplog.text


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_wait_on_the_loops_own_thread(end: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for a loop that cannot run meanwhile: what is left is named, with the cure, and a flush leaves it to be
    delivered once the loop runs."""

    async def main() -> None:
        seen: asyncio.Queue[Any] = asyncio.Queue()

        async def receive(event: Event) -> None:
            seen.put_nowait(event)

        bus = Bus(drain_timeout=10 * DEADLINE)
        bus.subscribe(receive, "after_train_iter", loop=asyncio.get_running_loop())
        emit(bus, 3)
        report = bus.flush() if end == "flush" else bus.close()
        assert (report.complete, report.stats[0].queued) == (False, 3)
        told = str(report) if end == "flush" else caplog.text
        assert "await asyncio.to_thread(trainer.train)" in told
        if end == "flush":
            assert iters([await asyncio.wait_for(seen.get(), DEADLINE) for _ in range(3)]) == [0, 1, 2]
            assert await drained(bus)
            assert bus.close().ok  # with nothing left, although the loop cannot end the task meanwhile

    asyncio.run(main())


def test_a_loop_that_ends_while_events_wait(caplog: pytest.LogCaptureFixture) -> None:
    """They are counted as failed or dropped, and told of once; a close does not wait."""
    bus = Bus(drain_timeout=10 * DEADLINE)

    async def main() -> None:
        under_way = asyncio.Event()

        async def hangs(event: Event) -> None:
            under_way.set()
            await asyncio.sleep(10 * DEADLINE)

        bus.subscribe(hangs, "after_train_iter", loop=asyncio.get_running_loop())
        emit(bus, 3)
        await under_way.wait()

    asyncio.run(main())
    emit(bus, 2)

    report = bus.close()

    stats = report.stats[0]
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (0, 1, 4, 0)
    assert caplog.text.count("the event loop of subscriber") == 1
    assert "3 events are counted as failed or dropped" in caplog.text


def test_a_loop_that_is_closed_with_the_task_left() -> None:
    """Events that come later are dropped and counted."""
    bus, loop = Bus(drain_timeout=10 * DEADLINE), asyncio.new_event_loop()
    taking = bus.subscribe(later, "after_train_iter", loop=loop)
    emit(bus, 1)
    loop.run_until_complete(drained(bus))
    complaints: list[Any] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))  # of the task that was left
    loop.close()
    emit(bus, 2)

    report = bus.close()

    assert (report.stats[0].delivered, report.stats[0].dropped) == (1, 2)
    assert "has ended" in taking.stats.error


def test_a_loop_that_does_not_run_is_not_waited_for() -> None:
    """A flush comes back at once; the events are delivered once the loop runs."""
    loop = asyncio.new_event_loop()
    seen: list[Any] = []

    async def receive(event: Event) -> None:
        seen.append(event)

    with Bus(drain_timeout=10 * DEADLINE) as bus:
        bus.subscribe(receive, "after_train_iter", loop=loop)
        emit(bus, 2)
        report = bus.flush()
        assert not report
        assert "its event loop does not run" in str(report)
        assert loop.run_until_complete(drained(bus))
        assert iters(seen) == [0, 1]
        loop.run_until_complete(asyncio.to_thread(bus.close))
    loop.close()


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (later, {"loop": "main"}, TypeError, "later: loop must be an asyncio event loop.*got 'main'"),
        (at_once, {}, ValueError, "at_once is a plain function, and loop= is for coroutine functions"),
        (at_once, {"offload": "thread"}, ValueError, "at_once is a plain function, and loop="),
        (later, {"loop": "closed"}, ValueError, r"later: loop must be open, got .*closed=True"),
        (later, {"overflow": "block"}, ValueError, "later: overflow='block' .*with loop=.*use 'spill'"),
    ],
)
def test_bad_input(bus: Bus, fn: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """It is refused at the line that wrote it."""
    loop, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    if options.get("loop") == "closed":
        options = {"loop": closed}
    try:
        with pytest.raises(error, match=message):
            bus.on("after_train_iter", **{"loop": loop, **options})(fn)
    finally:
        loop.close()
    assert not bus.stats()
