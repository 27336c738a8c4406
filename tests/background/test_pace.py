"""Turns of the background threads: spread over time, and nobody waits for another's to end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from eventloop.background.runners.thread_runner import EVERY_SECONDS, LONGEST_SECONDS, Pace
from eventloop.bus import Bus
from tests.conftest import DEADLINE
from tests.support.internals import substitute
from tests.support.spilling import emit, iters, subscribe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time the pace sees, which stands still."""
    now = [100.0]
    substitute(monkeypatch, "thread_runner.perf_counter", lambda: now[0])
    return now


def test_turns_are_apart(clock: list[float]) -> None:
    """The first is at once, the next ones follow; after a pause there is one turn at once, and not several."""
    pace = Pace()

    assert [pace.next_turn() for _ in range(3)] == pytest.approx([0.0, EVERY_SECONDS, 2 * EVERY_SECONDS])
    clock[0] += 1.0
    assert [pace.next_turn() for _ in range(2)] == pytest.approx([0.0, EVERY_SECONDS])


def test_a_wait_is_bounded(clock: list[float]) -> None:
    """With very many threads that ask, some begin together."""
    pace = Pace()
    waits = [pace.next_turn() for _ in range(1000)]

    assert max(waits) == pytest.approx(LONGEST_SECONDS)


def test_threads_share_the_turns(clock: list[float]) -> None:
    """Asked by many threads at once it gives each turn to one of them."""
    pace, turns = Pace(), list[float]()
    each = int(LONGEST_SECONDS / EVERY_SECONDS) // 4

    def request() -> None:
        turns.extend(pace.next_turn() for _ in range(each))

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(turns) == pytest.approx([n * EVERY_SECONDS for n in range(4 * each)])


def test_a_flush_and_a_close_wait_for_no_turn(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a look at the account: a thread that waits for its turn goes on at once."""
    monkeypatch.setattr(Pace, "next_turn", lambda self: 10 * DEADLINE)
    seen: list[Any] = []
    subscribe(bus, "thread", seen.append)
    for lap in range(2):
        emit(bus, 100, start=100 * lap)
        assert bus.stats()
        assert bus.flush(DEADLINE)
    emit(bus, 100, start=200)

    assert bus.close(DEADLINE)
    assert iters(seen) == [*range(300)]
