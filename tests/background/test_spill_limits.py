"""`overflow="spill"` where the file may grow no more, or the disk fails: counted drops, and then it goes on."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from eventloop.background.queues import spill
from eventloop.bus import Bus
from eventloop.events import AfterVal, EventsDropped
from tests.conftest import DEADLINE, Held
from tests.support.internals import substitute
from tests.support.spilling import SIZE, Anything, emit, hold, in_both_kinds, iters, total

# --- limits and failures -----------------------------------------------------------------------------------


def test_beyond_the_limit_the_newest_are_dropped(
    bus: Bus, held: Held, small_files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted and told of, and spilling goes on when the subscriber has caught up."""
    substitute(monkeypatch, "spill.SPILL_BYTES", 100 * SIZE)
    told: list[EventsDropped] = []
    bus.subscribe(told.append, EventsDropped)
    subscription = hold(bus, held)
    emit(bus, 3 + 100 + 10, start=1)
    full = subscription.stats
    held.let_go()
    bus.flush(DEADLINE)
    emit(bus, 10, start=200)
    bus.flush(DEADLINE)
    bus.poll()

    assert (full.queued, full.dropped) == (104, 10)
    assert iters(held.seen) == [*range(104), *range(200, 210)]
    assert caplog.text.count(f"held is {100 * SIZE} bytes of events behind, the limit; the newest are") == 1
    assert sum(event.count for event in told) == 10


class Disk:
    """Stands before the file and fails, on demand, after a part of the bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.tries = 0
        write = spill.SpillFile.write_tail

        def failing(file: spill.SpillFile) -> None:
            self.tries += 1
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            write(file)

        monkeypatch.setattr(spill.SpillFile, "write_tail", failing)


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_means_counted_drops(
    bus: Bus,
    held: Held,
    kind: str,
    number: int,
    small_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line in the log, an event, an exact account; what was accepted is delivered; and it recovers."""
    caplog.set_level("INFO", logger="eventloop")
    substitute(monkeypatch, "spill.RETRY_SECONDS", 0.0)
    disk = Disk(monkeypatch)
    told: list[EventsDropped] = []
    bus.subscribe(told.append, EventsDropped)
    subscription = hold(bus, held, kind)
    emit(bus, 100, start=1)
    bus.stats()
    disk.error = number
    emit(bus, 1000, start=101)
    full = subscription.stats
    disk.error = 0
    emit(bus, 100, start=2000)
    assert total(subscription.stats) == 1201
    held.let_go()
    bus.flush(DEADLINE)
    end = subscription.stats
    bus.close(DEADLINE)
    bus.poll()

    first = [event.iter for event in held.seen if event.iter < 2000]
    assert total(full) == 1101
    assert 980 < full.dropped < 1000
    assert first == list(range(1101 - full.dropped))
    assert [event.iter for event in held.seen[len(first) :]] == list(range(2000, 2100))
    assert (end.delivered, end.dropped, end.queued) == (1201 - full.dropped, full.dropped, 0)
    assert sum(event.count for event in told) == full.dropped
    assert caplog.text.count(f"held cannot spill to {small_files} ([Errno {number}]") == 1
    assert "events beyond its queue are dropped until there is room" in caplog.text
    assert caplog.text.count("held can spill again") == 1


def test_a_full_disk_is_tried_now_and_then(
    bus: Bus, held: Held, small_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try, not one for every event. What was not written is delivered out of memory, and then events are accepted."""
    substitute(monkeypatch, "spill.RETRY_SECONDS", 1000.0)
    disk = Disk(monkeypatch)
    disk.error = errno.ENOSPC
    subscription = hold(bus, held)
    emit(bus, 1000, start=1)
    dropped = subscription.stats.dropped
    assert dropped > 900
    assert disk.tries == 1
    held.let_go()
    bus.flush(DEADLINE)
    emit(bus, 3, start=1001)
    bus.flush(DEADLINE)

    assert iters(held.seen) == [*range(1001 - dropped), 1001, 1002, 1003]


def test_no_temporary_folder_means_counted_drops(
    bus: Bus, held: Held, small_files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot even be opened is a disk without room."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_files / "missing"))
    subscription = hold(bus, held)
    emit(bus, 100, start=1)

    assert total(subscription.stats) == 101
    assert subscription.stats.dropped > 80
    assert "held cannot spill to" in caplog.text


@pytest.mark.slow
def test_a_real_limit_of_the_system_is_survived(python: Callable[..., CompletedProcess[str]]) -> None:
    """RLIMIT_FSIZE fails a write as a full disk does, after a part of it; lifted, spilling goes on."""
    program = """
import resource, threading
from eventloop.background.queues import spill, subscriber
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

spill.RETRY_SECONDS = subscriber.HELD_SECONDS = 0.0
gate, seen = threading.Event(), []
def slow(event):
    gate.wait()
    seen.append(event.iter)

def emit(first, last):
    for i in range(first, last):
        bus.emit(AfterTrainIter(iter=i))
    return subscription.stats

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
bus = Bus(drain_timeout=20)
subscription = bus.subscribe(slow, "after_train_iter", offload="thread", queue=10)
emit(0, 1)
while not bus.stats()[0].queued or not subscription.subscriber.held:
    pass
full = emit(1, 10_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
more = emit(10_000, 20_000)
gate.set()
bus.close()
end = subscription.stats
print(full.dropped > 0, more.dropped == full.dropped, more.queued + more.dropped == 20_000)
kept = 10_000 - full.dropped
print(seen == [*range(kept), *range(10_000, 20_000)], end.delivered == len(seen))
"""
    done = python(program)

    assert done.stdout.split() == ["True"] * 5, done.stdout + done.stderr
    assert done.stderr.count("cannot spill") == 1


def test_file_that_cannot_be_read_costs_its_events_and_no_others(
    bus: Bus, held: Held, small_files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are dropped and counted, and the subscriber goes on with the next ones."""
    chunks, reads = spill.SpillFile.chunks, []

    def failing(file: spill.SpillFile) -> Iterator[bytes]:
        for chunk in chunks(file):
            reads.append(chunk)
            if len(reads) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            yield chunk

    monkeypatch.setattr(spill.SpillFile, "chunks", failing)
    subscription = hold(bus, held)
    emit(bus, 100, start=1)
    assert subscription.stats.queued == 101
    held.let_go()
    bus.flush(DEADLINE)
    stats = subscription.stats
    seen = iters(held.seen)

    assert 0 < stats.dropped < 101
    assert (stats.delivered, stats.queued) == (101 - stats.dropped, 0)
    assert seen == list(range(len(seen)))
    assert "held cannot read its spill file" in caplog.text
    assert "events could not be read back and are dropped" in caplog.text


def test_events_that_no_file_can_hold_wait_in_memory(
    bus: Bus, held: Held, small_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In their places and untouched, as many as the queue holds; more are dropped, the log says why, and others spill."""
    subscription = bus.subscribe(held, AfterVal, Anything, offload="thread", name="held", queue=3)
    bus.emit(AfterVal(epoch=-1))
    assert held.entered.wait(DEADLINE)
    odd = [Anything(value=object()) for _ in range(100)]
    for i in range(100):
        bus.emit(odd[i])
        bus.emit(AfterVal(epoch=i))
    stats = subscription.stats
    held.let_go()
    bus.flush(DEADLINE)
    kept = [event for event in held.seen if isinstance(event, Anything)]

    assert total(stats) == 201
    assert 94 <= stats.dropped <= 96
    assert kept == odd[: len(kept)]
    assert len(kept) == 100 - stats.dropped
    assert [event.epoch for event in held.seen if isinstance(event, AfterVal)] == list(range(-1, 100))
    assert held.seen[1 : 1 + 2 * len(kept) : 2] == kept
    assert caplog.text.count("held: events anything cannot be written to a file (TypeError: ") == 1
    assert "Up to 3 of them wait in memory, more are dropped; give the event plain fields" in caplog.text
