"""Wait for conditions in ways that a signal handler may interrupt at any instruction.

`threading.Condition` is written in Python. If a signal handler raises an error between two of its lines, such
as the KeyboardInterrupt of a second Ctrl-C, the error turns into "RuntimeError: cannot release un-acquired
lock", or a lock stays held. `threading.Event` and `concurrent.futures.Future` use it and have the same fault.
The training thread therefore waits on bare locks, one for each waiter, so that an abandoned lock disturbs no
other waiter. `ring` and `set` may be called in a signal handler, where `Event.set` may deadlock.
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
"""The time in seconds for which the main thread blocks at once.

If a signal arrives just before the thread blocks, its handler runs only when the lock returns.
"""


class Bell:
    """Wake all threads that wait for a condition, as `threading.Condition` does."""

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []  # one for each waiter, released by a ring

    def ring(self) -> None:
        """Let all waiters check their condition again."""
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # it is released already
                waiter.release()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()` is true, asking after each ring; return False after `timeout` seconds."""
        if ready():
            return True
        deadline = inf if timeout is None else monotonic() + timeout
        main = threading.current_thread() is threading.main_thread()
        longest = SIGNAL_SECONDS if main else threading.TIMEOUT_MAX
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            while not ready():  # checked again, now that a ring releases the gate
                left = deadline - monotonic()
                if left <= 0.0:
                    return False
                waiter.acquire(timeout=min(left, longest))
            return True
        finally:
            self._waiters.remove(waiter)


class Latch:
    """A flag on which threads can wait, as `threading.Event`."""

    def __init__(self) -> None:
        self._turns = 0  # odd while set; one number, so that reading it is atomic
        self._bell = Bell()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._turns % 2 == 1

    def set(self) -> None:
        """Set the flag, and wake all waiters."""
        self._turns |= 1
        self._bell.ring()

    def clear(self) -> None:
        """Clear the flag."""
        turns = self._turns
        self._turns = turns + turns % 2

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, even if only for a moment; return False after `timeout` seconds."""
        began = self._turns
        return began % 2 == 1 or self._bell.wait_for(lambda: self._turns != began, timeout)


class Promise(Generic[T]):
    """A result that another thread provides, as `concurrent.futures.Future` without cancelling."""

    def __init__(self) -> None:
        self._resolved = Latch()
        self._result: T
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Set the result."""
        self._result = result
        self._resolved.set()

    def set_exception(self, error: BaseException) -> None:
        """Set the error, in place of a result."""
        self._error = error
        self._resolved.set()

    def done(self) -> bool:
        """Return whether a result or an error is set."""
        return self._resolved.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a result or an error is set; return False after `timeout` seconds."""
        return self._resolved.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error that was set, or None if a result was set.

        Raises:
            TimeoutError: neither is set after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"expected a result within {timeout:g} s, got none")
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Wait, and return the result.

        Raises:
            TimeoutError: neither a result nor an error is set after `timeout` seconds.
            BaseException: the error that was set.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result
