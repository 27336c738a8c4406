"""Waits that a signal may end at any instruction.

`threading.Condition` is Python. What a signal's handler raises between two of its lines (the KeyboardInterrupt of a
second Ctrl-C, say) comes out of it as "RuntimeError: cannot release un-acquired lock", or leaves its lock held, and
so it is with `threading.Event` and `concurrent.futures.Future`, which are made of it. What the training thread waits
for is therefore made of bare locks here, each of one waiter: one that is left behind disturbs nobody. To ring, or to
set, is safe in a signal's handler too, where `Event.set` may deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")

SIGNAL_SECONDS = 0.2
"""How long the main thread may be blocked at a time: a signal that comes after the interpreter has looked for one, and
before the lock blocks, is acted on only when it is left."""


class Bell:
    """Wakes everybody who waits for something to become true, as a `threading.Condition` does."""

    def __init__(self) -> None:
        self._gates: list[threading.Lock] = []  # one of each waiter: open when there is something to look at

    def ring(self) -> None:
        """Let everybody look again."""
        for gate in tuple(self._gates):
            with suppress(RuntimeError):  # it is open
                gate.release()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()`, which is asked after each ring; False when it is not so after `timeout` seconds."""
        if ready():
            return True
        deadline = inf if timeout is None else monotonic() + timeout
        main = threading.current_thread() is threading.main_thread()
        longest = SIGNAL_SECONDS if main else threading.TIMEOUT_MAX
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        try:
            while not ready():  # the first time since there is a gate to open
                left = deadline - monotonic()
                if left <= 0.0:
                    return False
                gate.acquire(timeout=min(left, longest))
            return True
        finally:
            self._gates.remove(gate)


class Latch:
    """A flag to wait for, as a `threading.Event`."""

    def __init__(self) -> None:
        self._turns = 0  # odd while it is set; one number, so that to look at it is one instruction
        self._bell = Bell()

    def is_set(self) -> bool:
        """True from `set` until `clear`."""
        return self._turns % 2 == 1

    def set(self) -> None:
        """Let everybody go who waits, or will."""
        self._turns |= 1
        self._bell.ring()

    def clear(self) -> None:
        """Let them wait again."""
        turns = self._turns
        self._turns = turns + turns % 2

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, if only for a moment; False when that does not happen within `timeout` seconds."""
        began = self._turns
        return began % 2 == 1 or self._bell.wait_for(lambda: self._turns != began, timeout)


class Promise(Generic[T]):
    """A result that another thread owes, as a `concurrent.futures.Future` that nobody can cancel."""

    def __init__(self) -> None:
        self._settled = Latch()
        self._result: T
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Keep the promise."""
        self._result = result
        self._settled.set()

    def set_exception(self, error: BaseException) -> None:
        """Say why it will not be kept."""
        self._error = error
        self._settled.set()

    def done(self) -> bool:
        """True once it is kept, or will not be."""
        return self._settled.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; False when it is not so after `timeout` seconds."""
        return self._settled.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return why it was not kept; None if it was.

        Raises:
            TimeoutError: it is not done after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"nothing came of it within {timeout:g} s")
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Wait, and return what was promised.

        Raises:
            TimeoutError: it is not done after `timeout` seconds.
            BaseException: what `set_exception` was given.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result
