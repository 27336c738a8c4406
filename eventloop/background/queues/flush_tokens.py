"""Flushes of a subscriber that somebody waits for, each by its number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from eventloop.util.waiting import Bell


class InVain:
    """How long somebody has waited in vain for what a subscriber is at, told by when that began: the next one waits only
    for the rest of his time."""

    def __init__(self) -> None:
        self._began = self._seconds = 0.0

    def add(self, began: float, seconds: float) -> None:
        """A wait of so many seconds is over, and what began then is not."""
        self._seconds = seconds + self.waited(began)
        self._began = began

    def waited(self, began: float) -> float:
        """Seconds, for what began then."""
        return self._seconds if began == self._began else 0.0


class Flushes:
    """Asked for by any thread, made by the subscriber's own.

    One flag for all of them would let a flush that timed out, and ends later, speak for the next.
    """

    def __init__(self) -> None:
        self._asked = self._made = 0
        # how many events come before it, and its number, which both only grow, and whether it calls back
        self._due: deque[tuple[int, int, bool]] = deque()
        self._bell = Bell()

    def __bool__(self) -> bool:
        """True while there is one that nobody has begun with."""
        return bool(self._due)

    @property
    def asked(self) -> int:
        """The number of the last."""
        return self._asked

    def ask(self, routed: int, *, calls: bool = True) -> int:
        """Ask for one, once `routed` events are handled; returns its number. One thread at a time. Unless it `calls`
        back, it is complete by then."""
        self._asked += 1
        self._due.append((routed, self._asked, calls))
        return self._asked

    def take(self, handled: int) -> tuple[int, bool]:
        """The number of the last one that is due, which stands for those before it, and whether any of them calls back;
        0 where none is."""
        number, calls = 0, False
        while self._due and handled >= self._due[0][0]:
            _, number, calls_back = self._due.popleft()
            calls = calls or calls_back
        return number, calls

    def made(self, number: int) -> None:
        """That one, and those before it, are complete."""
        self._made = max(self._made, number)
        self._bell.ring()

    def let_go(self) -> None:
        """Let everybody look whether there is still something to wait for."""
        self._bell.ring()

    def wait(self, number: int, over: Callable[[], bool], timeout: float) -> bool:
        """Wait until that one is complete, or all is `over`; False when neither happens within `timeout` seconds."""
        return self._bell.wait_for(lambda: self._made >= number or over(), timeout)
