"""Turns of the background threads: spread over time, and nobody waits for another's to end."""

from __future__ import annotations

import threading
from collections import Counter
from time import perf_counter

import pytest

from eventloop import pace as pace_module
from eventloop import runners
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.pace import EVERY_SECONDS, Pace
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


def test_threads_share_the_turns() -> None:
    """Asked by many threads at once it gives each turn to one of them."""
    pace, turns = Pace(), list[float]()

    def ask() -> None:
        for _ in range(50):
            turns.append(perf_counter() + pace.next_turn())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    turns.sort()
    assert turns[-1] - turns[0] >= 198 * EVERY_SECONDS


def test_a_flush_waits_for_no_turn(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the subscribers is not kept waiting by politeness: they take no more turns, and no breath."""
    slept: Counter[bool] = Counter()
    monkeypatch.setattr(runners, "sleep", lambda seconds: slept.update([seconds > 0]))
    release = threading.Event()
    seen: list[int] = []

    def slow(event: AfterTrainIter) -> None:
        release.wait(DEADLINE)
        seen.append(event.iter)

    bus.subscribe(slow, AfterTrainIter, offload="thread")
    for i in range(200):
        bus.emit(AfterTrainIter(iter=i))
    flushed = threading.Thread(target=bus.flush)
    flushed.start()
    while not any(lane._flush_at for lane in bus._background.lanes):
        pass
    slept.clear()
    release.set()
    flushed.join()

    assert seen == [*range(200)]
    assert slept[True] == 0
