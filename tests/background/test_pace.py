"""Turns of the background threads: spread over time, and nobody waits for another's to end."""

from __future__ import annotations

import threading

import pytest

from eventloop.background import gil_scheduler as pace_module
from eventloop.background.gil_scheduler import EVERY_SECONDS, LONGEST_SECONDS, Pace
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from tests.conftest import DEADLINE


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time the pace sees, which stands still."""
    now = [100.0]
    monkeypatch.setattr(pace_module, "perf_counter", lambda: now[0])
    return now


def test_the_first_turn_is_at_once(clock: list[float]) -> None:
    """Nobody had one for a while."""
    assert Pace().next_turn() == 0.0


def test_turns_are_apart(clock: list[float]) -> None:
    """Whoever asks next, at the same moment, has the turn after."""
    pace = Pace()

    assert [pace.next_turn() for _ in range(3)] == pytest.approx([0.0, EVERY_SECONDS, 2 * EVERY_SECONDS])


def test_turns_nobody_took_are_not_saved_up(clock: list[float]) -> None:
    """After a pause there is one turn at once, and not several."""
    pace = Pace()
    pace.next_turn()
    clock[0] += 1.0

    assert [pace.next_turn(), pace.next_turn()] == pytest.approx([0.0, EVERY_SECONDS])


def test_a_wait_is_bounded(clock: list[float]) -> None:
    """With very many who ask, some begin together."""
    pace = Pace()
    waits = [pace.next_turn() for _ in range(1000)]

    assert max(waits) == pytest.approx(LONGEST_SECONDS)


def test_threads_share_the_turns(clock: list[float]) -> None:
    """Asked by many threads at once it gives each turn to one of them."""
    pace, turns = Pace(), list[float]()
    each = int(LONGEST_SECONDS / EVERY_SECONDS) // 4

    def ask() -> None:
        turns.extend(pace.next_turn() for _ in range(each))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(turns) == pytest.approx([n * EVERY_SECONDS for n in range(4 * each)])


@pytest.fixture
def far_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is so far away that whoever waits for it is found by the test's deadline."""
    monkeypatch.setattr(Pace, "next_turn", lambda self: 10 * DEADLINE)


@pytest.mark.usefixtures("far_turns")
def test_a_flush_waits_for_no_turn(bus: Bus) -> None:
    """Nor does a look at the account: the loop and the threads that wait for their turns go on."""
    seen: list[int] = []
    bus.subscribe(lambda event: seen.append(event.iter), AfterTrainIter, offload="thread")
    for lap in range(3):
        for i in range(100):
            bus.emit(AfterTrainIter(iter=100 * lap + i))
        assert bus.stats()
        assert bus.flush(DEADLINE)

    assert seen == [*range(300)]


@pytest.mark.usefixtures("far_turns")
def test_a_close_waits_for_no_turn(bus: Bus) -> None:
    """All is delivered, and at once."""
    seen: list[int] = []
    bus.subscribe(lambda event: seen.append(event.iter), AfterTrainIter, offload="thread")
    for i in range(100):
        bus.emit(AfterTrainIter(iter=i))

    assert bus.close(DEADLINE)
    assert seen == [*range(100)]


@pytest.mark.slow
def test_a_filter_that_hangs_hides_nobody_elses_events(bus: Bus) -> None:
    """Past the deadline of a close, the account of whoever has no filter knows of every event: of those before the one
    that a filter hangs in, and of those after."""
    hanging, release = threading.Event(), threading.Event()

    def hangs(event: AfterTrainIter) -> bool:
        if event.iter == 5:
            hanging.set()
            release.wait(DEADLINE)
        return True

    plain = bus.subscribe(lambda event: None, AfterTrainIter, offload="thread", name="plain")
    bus.subscribe(lambda event: None, AfterTrainIter, offload="thread", name="filtered", when=hangs)
    for i in range(10):
        bus.emit(AfterTrainIter(iter=i))
    closing = threading.Thread(target=bus.close, args=(0.5,))
    closing.start()
    assert hanging.wait(DEADLINE)
    closing.join()
    stats = plain.stats
    release.set()

    assert stats.delivered + stats.queued + stats.dropped == 10
