"""Waits that a signal may end at any instruction."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from eventloop.util import waiting
from eventloop.util.waiting import Bell, Latch, Promise
from tests.support.cutting import each_cut

DEADLINE = 20.0


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """A thread that does `work`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def each_instruction(wait: Callable[[], object]) -> Iterator[int]:
    """The instructions at which a wait was interrupted."""
    return each_cut([waiting], wait, "opcode")


def test_an_interrupted_wait_raises_what_interrupted_it() -> None:
    """At whichever instruction: no RuntimeError about a lock; the latch, or the promise, goes on to work."""
    latch, promise = Latch(), Promise[int]()

    def result() -> None:
        with pytest.raises(TimeoutError):
            promise.result(0.0)

    assert len([*each_instruction(lambda: latch.wait(0.0))]) > 50
    assert len([*each_instruction(result)]) > 50
    thread = in_thread(latch.wait)
    latch.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    in_thread(lambda: promise.set_result(3))
    assert promise.result(DEADLINE) == 3


def test_an_interrupted_set_wakes_every_thread_at_the_next() -> None:
    """A set that was interrupted at whichever instruction, and is done again, lets no thread wait."""
    latches = [Latch() for _ in range(200)]
    left = iter(latches)
    threads = [in_thread(latch.wait) for latch in latches]

    interrupted = len([*each_instruction(lambda: next(left).set())])
    for latch in latches:
        latch.set()
    for thread in threads:
        thread.join(DEADLINE)

    assert interrupted > 10
    assert not any(thread.is_alive() for thread in threads)


def test_ctrl_c_ends_a_wait() -> None:
    """A signal that comes while the main thread is blocked ends the wait at once."""
    blocked = Latch()
    main = threading.get_ident()

    def press() -> None:
        blocked.wait()
        signal.pthread_kill(main, signal.SIGINT)

    def never() -> bool:
        blocked.set()
        return False

    thread = in_thread(press)
    with pytest.raises(KeyboardInterrupt):
        Bell().wait_for(never)

    thread.join(DEADLINE)


def threads_waiting(latch: Latch) -> int:
    """Return the number of threads that a latch would wake."""
    return len(latch._bell._waiters)


def test_a_latch_is_waited_for_in_vain() -> None:
    """Not set: False after the time, however small or negative, and nothing is left behind."""
    latch = Latch()

    assert [latch.wait(0.0), latch.wait(-1.0), latch.wait(0.001)] == [False] * 3
    assert threads_waiting(latch) == 0


def test_a_bell_wakes_a_thread_that_still_has_to_wait() -> None:
    """A thread whose condition does not hold yet waits for the next ring."""
    bell = Bell()
    count = 0
    looked = Latch()

    def enough() -> bool:
        looked.set()
        return count == 100

    thread = in_thread(lambda: bell.wait_for(enough))
    assert looked.wait(DEADLINE)
    for _ in range(100):
        count += 1
        bell.ring()
    thread.join(DEADLINE)

    assert not thread.is_alive()


def test_no_ring_is_missed() -> None:
    """Two threads that wait for each other in turn, two thousand times, never miss one."""
    here, there = Latch(), Latch()

    def answer() -> None:
        for _ in range(2_000):
            assert here.wait(DEADLINE)
            here.clear()
            there.set()

    thread = in_thread(answer)
    for _ in range(2_000):
        here.set()
        assert there.wait(DEADLINE)
        there.clear()

    thread.join(DEADLINE)
    assert threads_waiting(here) == threads_waiting(there) == 0


def test_a_promise() -> None:
    """Its result comes to every thread that waits, and stays; an error is raised, and returned if asked for."""
    kept, broken = Promise[str](), Promise[str]()
    got: list[str] = []
    error = OSError("no space left")
    with pytest.raises(TimeoutError, match=r"expected a result within 0\.001 s"):
        kept.result(0.001)
    threads = [in_thread(lambda: got.append(kept.result())) for _ in range(3)]
    assert not kept.done()

    kept.set_result("durable")
    broken.set_exception(error)
    for thread in threads:
        thread.join(DEADLINE)

    assert got == ["durable"] * 3
    assert (kept.done(), kept.exception(), kept.result(0.0)) == (True, None, "durable")
    assert broken.exception() is error
    with pytest.raises(OSError, match="no space left"):
        broken.result()
