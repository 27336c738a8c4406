"""A bus that nobody holds is gone, with its threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE


@pytest.fixture
def threads() -> Iterator[set[threading.Thread]]:
    """The threads from before the test; afterwards none more may run."""
    before = set(threading.enumerate())
    yield before
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
        assert not thread.is_alive()


async def nothing(event: Event) -> None:
    pass


def used_bus(seen: list[Any], *, holds_itself: bool) -> Bus:
    """A bus with one subscriber of each kind, and an event on its way."""
    bus = Bus()
    bus.subscribe(partial(_with, bus) if holds_itself else nothing, "after_train_iter")
    bus.subscribe(seen.append, "after_train_iter", offload="thread")
    bus.subscribe(lambda event: None, "*")
    bus.signal("after_train_iter").connect(lambda sender, event: None)
    bus.emit(AfterTrainIter())
    return bus


async def _with(bus: Bus, event: Event) -> None:
    bus.wants(type(event))


@pytest.mark.parametrize("holds_itself", [False, True])
def test_closed_bus_is_garbage(threads: set[threading.Thread], holds_itself: bool) -> None:
    """Nothing holds a closed bus, not even a subscriber that does."""
    bus = used_bus([], holds_itself=holds_itself)
    bus.close(DEADLINE)
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE)
    alive = weakref.ref(bus)
    del bus
    gc.collect()

    assert alive() is None


def test_dropped_bus_delivers_and_ends(threads: set[threading.Thread]) -> None:
    """A bus that was forgotten without a close is garbage at once; its threads deliver what is left, then end."""
    seen: list[Event] = []
    bus = used_bus(seen, holds_itself=False)
    alive = weakref.ref(bus)
    del bus
    gc.collect()
    assert alive() is None
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE)

    assert seen == [AfterTrainIter()]


@pytest.mark.usefixtures("threads")
def test_cancelled_subscriber_is_garbage() -> None:
    """A bus forgets what was cancelled, and its thread ends."""

    class Subscriber:
        def hear(self, event: Event) -> None:
            pass

    with Bus() as bus:
        subscriber = Subscriber()
        alive = weakref.ref(subscriber)
        for options in ({}, {"offload": "thread"}):
            with bus.subscribe(subscriber.hear, "after_train_iter", **options) as subscription:  # type: ignore[arg-type]
                bus.emit(AfterTrainIter())
                bus.flush(DEADLINE)
            if subscription.lane is not None:
                subscription.lane.closed.wait(DEADLINE)
        del subscriber, subscription
        gc.collect()

        assert alive() is None
