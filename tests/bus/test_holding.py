"""`bus.holding`: background subscribers get the events of what was done, not of what was tried."""

from __future__ import annotations

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterLoadCheckpoint, BeforeRun, Event


def test_held_until_the_block_ends() -> None:
    """Sync handlers run at once, background subscribers get the events afterwards, in their order."""
    with Bus() as bus:
        calls: list[str] = []
        bus.subscribe(lambda event: calls.append(f"sync {event.path}"), AfterLoadCheckpoint)
        bus.subscribe(
            lambda event: calls.append(f"thread {event.path}"), AfterLoadCheckpoint, offload="thread"
        )
        with bus.holding("after_load_checkpoint"):
            bus.emit(AfterLoadCheckpoint(path="1"))
            bus.emit(AfterLoadCheckpoint(path="2"))
            assert bus.flush()
            assert calls == ["sync 1", "sync 2"]
        bus.emit(AfterLoadCheckpoint(path="3"))
        assert bus.flush()

    assert [call for call in calls if call.startswith("thread")] == ["thread 1", "thread 2", "thread 3"]
    assert [call for call in calls if call.startswith("sync")] == ["sync 1", "sync 2", "sync 3"]


def test_what_failed_is_never_delivered() -> None:
    """After an error in the block no background subscriber gets its events; later ones are delivered again."""
    with Bus() as bus:
        seen: list[str] = []
        bus.subscribe(lambda event: seen.append(event.path), AfterLoadCheckpoint, offload="thread")

        def fail() -> None:
            with bus.holding(AfterLoadCheckpoint):
                bus.emit(AfterLoadCheckpoint(path="1"))
                raise OSError("no")

        with pytest.raises(OSError, match="no"):
            fail()
        bus.emit(AfterLoadCheckpoint(path="2"))

    assert seen == ["2"]


def test_other_events_and_blocking_subscribers() -> None:
    """Other events pass; a subscriber with overflow="block" is held as well, and one that comes within the block too."""
    with Bus() as bus:
        seen: list[Event] = []
        bus.subscribe(seen.append, AfterLoadCheckpoint, BeforeRun, offload="thread", overflow="block")
        with bus.holding(AfterLoadCheckpoint):
            bus.emit(AfterLoadCheckpoint(path="1"))
            bus.subscribe(lambda event: None, AfterLoadCheckpoint, offload="thread")
            bus.emit(AfterLoadCheckpoint(path="2"))
            bus.emit(BeforeRun())
            assert bus.flush()
            assert seen == [BeforeRun()]

    assert seen == [BeforeRun(), AfterLoadCheckpoint(path="1"), AfterLoadCheckpoint(path="2")]
