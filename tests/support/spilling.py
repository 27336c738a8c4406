"""What the tests of background subscribers share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription, SubscriptionStats
from eventloop.events import AfterTrainIter, Event
from eventloop.events.codec import Frames
from tests.conftest import DEADLINE, Held

SIZE = len(Frames().encode(AfterTrainIter(iter=1)))
"""Bytes of an event of `emit` in a file, as long as its number is small."""

PROMPT = DEADLINE / 2
"""Seconds that a call takes only if it waits for a subscriber that hangs."""

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])


class Anything(Event):
    """An event that may hold what no file can."""

    value: Any = None


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


def iters(events: list[Any]) -> list[int]:
    """Return which iterations these events are of."""
    return [event.iter for event in events]


def subscribe(bus: Bus, kind: str, fn: Callable[[Any], object], *events: Any, **options: Any) -> Subscription:
    """Subscribe a plain function as a task or on a thread, to after_train_iter if no event is named."""

    async def task(event: Any) -> None:
        fn(event)

    offload, handler = ("thread", fn) if kind == "thread" else (None, task)
    return bus.subscribe(handler, *(events or ["after_train_iter"]), offload=offload, **options)


def hold(bus: Bus, held: Held, kind: str = "thread", **options: Any) -> Subscription:
    """Subscribe `held`, with a queue of 3, and give it the event 0 it is busy with."""
    fn, offload = (held, "thread") if kind == "thread" else (held.in_a_task, None)
    options = {"queue": 3, **options}
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, name="held", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return subscription


def total(stats: SubscriptionStats) -> int:
    return stats.delivered + stats.failed + stats.dropped + stats.queued


def open_in(folder: Path) -> int:
    """How many files of a folder this process holds open, with names or without."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(f"{folder}/") for link in links if link.is_symlink())


sees_open_files = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
