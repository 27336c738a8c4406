"""What is emitted after a close: counted as dropped, and said once."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, BeforeTrainIter, Event, ScalarsLogged
from tests.conftest import DEADLINE
from tests.support.spilling import emit, total


async def in_a_task(event: Event) -> None:
    pass


def ignores(event: Event) -> None:
    pass


def test_it_is_counted_for_each_subscriber_that_wanted_it() -> None:
    """Every background subscriber's account adds up to what was emitted for it, before the close and after."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="thread", overflow="block")
    bus.subscribe(in_a_task, "*", name="task")
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="even", when=lambda e: e.iter % 2 == 0)
    bus.subscribe(ignores, "before_train_iter", offload="thread", name="other")
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="paused").pause()
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="cancelled").cancel()
    emit(bus, 2)
    bus.close(DEADLINE)
    emit(bus, 3, start=2)
    accounts = {stats.name: (total(stats), stats.delivered, stats.dropped) for stats in bus.stats()}

    assert accounts == {
        "thread": (5, 2, 3),
        "task": (5, 2, 3),
        "even": (3, 1, 2),
        "other": (0, 0, 0),
        "paused": (0, 0, 0),
    }


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line a bus names the event, the subscribers that miss it, and what to do; no line if there are none."""
    for name in ("first", "second"):
        bus = Bus()
        bus.subscribe(ignores, "after_train_iter", offload="thread", name=name)
        bus.close(DEADLINE)
        bus.emit(BeforeTrainIter(iter=0))
        assert name not in caplog.text
        emit(bus, 3)

    (said, _) = caplog.messages
    assert said.startswith("after_train_iter was emitted after the bus was closed")
    assert "first" in said


def test_sync_handlers_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """They are called as ever; an event that only background subscribers would get is not wanted."""
    bus = Bus()
    seen: list[Any] = []
    bus.subscribe(ignores, "after_train_iter", "before_train_iter", offload="thread")
    bus.subscribe(seen.append, "after_train_iter")
    bus.close(DEADLINE)
    emit(bus, 2)

    assert [event.iter for event in seen] == [0, 1]
    assert (bus.wants(AfterTrainIter), bus.wants(BeforeTrainIter)) == (True, False)
    assert bus.latest(AfterTrainIter) == seen[-1]


class Ready:
    """One scalar whose value is there."""

    def ready(self) -> bool:
        return True

    def events(self) -> list[ScalarsLogged]:
        return [ScalarsLogged()]


def test_a_subscriber_may_post_while_the_bus_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """What is posted before the end is delivered; later one event of each type is counted as dropped, as the number that
    it would have become is not known."""
    bus = Bus()
    seen: list[Event] = []

    def posts(event: Event) -> None:
        while not bus.closed:
            pass
        bus.post(Ready(), ScalarsLogged)

    bus.subscribe(posts, "after_train_iter", offload="thread")
    reads = bus.subscribe(seen.append, "scalars_logged", offload="thread")
    emit(bus, 1)

    assert bus.close(DEADLINE).complete
    assert seen == [ScalarsLogged()]
    bus.post(Ready(), ScalarsLogged)
    assert (reads.stats.dropped, total(reads.stats)) == (1, 2)
    assert "scalars_logged was emitted after the bus was closed" in caplog.text
