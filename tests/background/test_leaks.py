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
    join(before)


def join(before: set[threading.Thread]) -> None:
    """Wait for the threads that were started since."""
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


@pytest.mark.parametrize("how", ["closed", "closed, holds itself", "forgotten"])
def test_a_bus_without_references_is_garbage(threads: set[threading.Thread], how: str) -> None:
    """A closed bus is not held, not even by a subscriber that holds it; a bus that was forgotten without a close is
    garbage at once. In both cases its threads deliver what is left, then end."""
    seen: list[Event] = []
    bus = used_bus(seen, holds_itself=how == "closed, holds itself")
    if how != "forgotten":
        bus.close(DEADLINE)
        join(threads)
    alive = weakref.ref(bus)
    del bus
    gc.collect()
    assert alive() is None
    join(threads)

    assert seen == [AfterTrainIter()]


@pytest.mark.usefixtures("threads")
def test_cancelled_subscriber_is_garbage() -> None:
    """A bus forgets what was cancelled, and its thread ends."""

    class Subscriber:
        def receive(self, event: Event) -> None:
            pass

    with Bus() as bus:
        subscriber = Subscriber()
        alive = weakref.ref(subscriber)
        for options in ({}, {"offload": "thread"}):
            with bus.subscribe(subscriber.receive, "after_train_iter", **options) as subscription:  # type: ignore[arg-type]
                bus.emit(AfterTrainIter())
                bus.flush(DEADLINE)
            if subscription.subscriber is not None:
                subscription.subscriber.closed.wait(DEADLINE)
        del subscriber, subscription
        gc.collect()

        assert alive() is None
