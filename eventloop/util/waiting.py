"""Wait for conditions with code that a signal handler may interrupt at any instruction.

`threading.Condition` is written in Python. If a signal handler raises an error between two of its lines, such
as the KeyboardInterrupt of a second Ctrl-C, the error turns into "RuntimeError: cannot release un-acquired
lock", or a lock stays held. `threading.Event` and `concurrent.futures.Future` use it and have the same fault.
The classes here therefore wait on bare locks, one for each waiting thread, so that a lock that stays held
blocks no other thread. `Bell.ring` and `Latch.set` may be called in a signal handler, where
`threading.Event.set` may deadlock.
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
"""The longest time in seconds for which the main thread blocks in one call.

If a signal arrives just before the call, Python runs the signal's handler only after the call.
"""


class Bell:
    """Wake all threads that wait for a condition, as `threading.Condition.notify_all` does."""

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []  # a lock for each waiting thread, released by `ring`

    def ring(self) -> None:
        """Wake all waiting threads, so that each checks its condition again."""
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # an earlier `ring` has released it
                waiter.release()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()` is true, which is checked after each `ring`.

        Returns:
            False if it is not true after `timeout` seconds; None sets no limit.
        """
        if ready():
            return True
        deadline = inf if timeout is None else monotonic() + timeout
        is_main_thread = threading.current_thread() is threading.main_thread()
        longest_block = SIGNAL_SECONDS if is_main_thread else threading.TIMEOUT_MAX
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            while not ready():  # first checked again, for a `ring` before the lock was in the list
                remaining_seconds = deadline - monotonic()
                if remaining_seconds <= 0.0:
                    return False
                waiter.acquire(timeout=min(remaining_seconds, longest_block))
            return True
        finally:
            self._waiters.remove(waiter)


class Latch:
    """A flag on which threads can wait, as on a `threading.Event`."""

    def __init__(self) -> None:
        self._turns = 0  # how often the flag was set or cleared: odd while it is set
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
        """Wait until the flag is set; return False if it is not set within `timeout` seconds.

        The wait also ends if the flag is set and cleared again before this thread runs.
        """
        turns = self._turns
        return turns % 2 == 1 or self._bell.wait_for(lambda: self._turns != turns, timeout)


class Promise(Generic[T]):
    """A result that another thread sets, as in a `concurrent.futures.Future`; it cannot be cancelled."""

    def __init__(self) -> None:
        self._resolved = Latch()
        self._result: T
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Set the result, and wake all waiting threads."""
        self._result = result
        self._resolved.set()

    def set_exception(self, error: BaseException) -> None:
        """Set an error in place of a result, and wake all waiting threads."""
        self._error = error
        self._resolved.set()

    def done(self) -> bool:
        """Return whether a result or an error is set."""
        return self._resolved.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a result or an error is set; return False if neither is within `timeout` seconds."""
        return self._resolved.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until a result or an error is set; return the error, or None for a result.

        Raises:
            TimeoutError: neither is set within `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"expected a result within {timeout:g} s, got none")
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Wait until a result or an error is set, and return the result.

        Raises:
            TimeoutError: neither is set within `timeout` seconds.
            BaseException: the error that was set.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result
