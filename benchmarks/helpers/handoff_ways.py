"""Ways to hand one event from a training thread to the background: the bus, and those of other projects.

Each `with` yields cases whose background threads already run, and which drain, untimed, after each block.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.helpers.timing import Case, statement
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event

THREADS, COROUTINES = 5, 2
BURST, SUSTAINED, ROUND_TRIPS = 400, 20_000, 50
"""Events between two clean-ups: a burst stays below the 512 at which an emit wakes a loop that lags behind."""


def idle(event: object) -> None:
    """A subscriber that does nothing."""


@contextmanager
def bus_cases(event: Event, build: str) -> Iterator[list[Case]]:
    """Yield the cases of one emit on a bus that seven background subscribers listen on.

    The event is ready, or built in the same statement; the emits come in bursts, or without a pause.
    An emit that has no subscriber shows how much of the time is the hand-over.
    """
    with Bus() as bus:
        for _ in range(THREADS):
            bus.subscribe(lambda event: None, AfterTrainIter, offload="thread", overflow="drop_oldest")
        for _ in range(COROUTINES):
            bus.subscribe(_idle_coroutine(), AfterTrainIter, overflow="drop_oldest")
        ready, built = "bus.emit(event)", f"bus.emit({build})"
        names = {"bus": bus, "event": event, "AfterTrainIter": AfterTrainIter}
        nobody = {"bus": Bus(), "event": event}
        yield [
            statement("bus.emit to nobody", ready, BURST, nobody, bus.flush),
            statement("bus.emit", ready, BURST, names, bus.flush),
            statement("bus.emit, built too", built, BURST, names, bus.flush),
            statement("bus.emit, sustained", ready, SUSTAINED, names, bus.flush),
        ]


@contextmanager
def queue_case(event: Event) -> Iterator[list[Case]]:
    """`queue.Queue.put`, read by a thread."""
    waiting: queue.Queue[Event | None] = queue.Queue()

    def read() -> None:
        while waiting.get() is not None:
            waiting.task_done()
        waiting.task_done()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield [
        statement("queue.Queue.put", "put(event)", BURST, {"put": waiting.put, "event": event}, waiting.join)
    ]
    waiting.put(None)
    reader.join()


@contextmanager
def executor_case(event: Event) -> Iterator[list[Case]]:
    """`ThreadPoolExecutor.submit`, CLU's asynchronous writer."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        names = {"submit": pool.submit, "idle": idle, "event": event}
        yield [
            statement(
                "ThreadPoolExecutor.submit",
                "submit(idle, event)",
                BURST,
                names,
                lambda: pool.submit(idle, event).result(),
            )
        ]


@contextmanager
def asyncio_cases(event: Event) -> Iterator[list[Case]]:
    """`call_soon_threadsafe`, and wandb's `run_coroutine_threadsafe(...).result()`, which waits for the answer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    receive, ask = _idle_coroutine(), asyncio.run_coroutine_threadsafe

    def drain() -> None:
        ask(receive(event), loop).result()

    names = {"soon": loop.call_soon_threadsafe, "idle": idle, "event": event}
    waiting = {"ask": ask, "receive": receive, "event": event, "loop": loop}
    yield [
        statement("loop.call_soon_threadsafe", "soon(idle, event)", BURST, names, drain),
        statement(
            "run_coroutine_threadsafe().result()", "ask(receive(event), loop).result()", ROUND_TRIPS, waiting
        ),
    ]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def all_cases(event: Event, build: str) -> Iterator[list[Case]]:
    """Every way, side by side."""
    with ExitStack() as stack:
        groups = [bus_cases(event, build), queue_case(event), executor_case(event), asyncio_cases(event)]
        yield [case for group in groups for case in stack.enter_context(group)]


def _idle_coroutine() -> Callable[[Event], Coroutine[Any, Any, None]]:
    """Return a new coroutine function that does nothing, as the bus counts subscribers, not functions."""

    async def receive(event: Event) -> None:
        pass

    return receive
