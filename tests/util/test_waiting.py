"""Waits that a signal may end at any instruction."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from eventloop.util import waiting
from eventloop.util.waiting import Bell, Latch, Promise

DEADLINE = 20.0


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """A thread that does `work`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def interrupted_at(instruction: int, wait: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt before the n-th instruction of our waits, as a signal's handler may; False when there are
    fewer."""
    left = instruction

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != waiting.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        wait()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def each_instruction(wait: Callable[[], object]) -> Iterator[int]:
    """The instructions at which a wait was interrupted."""
    instruction = 0
    while interrupted_at(instruction, wait):
        yield instruction
        instruction += 1


def test_an_interrupted_wait_raises_what_interrupted_it() -> None:
    """At whichever instruction: no RuntimeError about a lock, and the latch goes on to work for others."""
    latch = Latch()

    interrupted = len([*each_instruction(lambda: latch.wait(0.0))])
    thread = in_thread(latch.wait)
    latch.set()
    thread.join(DEADLINE)

    assert interrupted > 50
    assert not thread.is_alive()


def test_an_interrupted_set_wakes_everybody_at_the_next() -> None:
    """A set that was interrupted at whichever instruction, and is done again, lets nobody wait."""
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


def test_an_interrupted_result_is_there_afterwards() -> None:
    """A promise that the training thread was torn out of waiting for is kept all the same."""
    promise: Promise[int] = Promise()

    def wait() -> None:
        with pytest.raises(TimeoutError):
            promise.result(0.0)

    interrupted = len([*each_instruction(wait)])
    in_thread(lambda: promise.set_result(3))

    assert interrupted > 50
    assert promise.result(DEADLINE) == 3


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


def test_a_latch_is_waited_for_in_vain() -> None:
    """Not set: False after the time, however small or negative, and nothing is left behind."""
    latch = Latch()

    assert [latch.wait(0.0), latch.wait(-1.0), latch.wait(0.001)] == [False] * 3
    assert latch._bell._gates == []


def test_a_latch_that_was_set_for_a_moment() -> None:
    """As with a `threading.Event`: who waited is let go, though it was cleared at once."""
    latch = Latch()
    heard: list[bool] = []
    thread = in_thread(lambda: heard.append(latch.wait()))
    while not latch._bell._gates:
        pass

    latch.set()
    latch.clear()
    thread.join(DEADLINE)

    assert heard == [True]
    assert not latch.wait(0.0)


def test_a_bell_wakes_who_still_has_to_wait() -> None:
    """Who finds that it is not so yet waits for the next ring."""
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
    assert here._bell._gates == there._bell._gates == []


def test_a_promise_is_kept() -> None:
    """Its result comes to everybody who waits, and stays."""
    promise: Promise[str] = Promise()
    got: list[str] = []
    threads = [in_thread(lambda: got.append(promise.result())) for _ in range(3)]
    assert not promise.done()

    promise.set_result("durable")
    for thread in threads:
        thread.join(DEADLINE)

    assert got == ["durable"] * 3
    assert promise.done()
    assert promise.exception() is None
    assert promise.result(0.0) == "durable"


def test_a_promise_that_is_not_kept() -> None:
    """What went wrong is raised where the result is asked for, and returned where it is asked for."""
    promise: Promise[str] = Promise()
    error = OSError("no space left")

    promise.set_exception(error)

    assert promise.exception() is error
    with pytest.raises(OSError, match="no space left"):
        promise.result()


def test_a_promise_that_takes_too_long() -> None:
    """Its result is waited for as long as asked."""
    promise: Promise[str] = Promise()

    assert not promise.wait(0.0)
    with pytest.raises(TimeoutError, match=r"expected a result within 0\.001 s"):
        promise.result(0.001)
