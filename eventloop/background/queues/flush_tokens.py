"""Number the flushes of a subscriber, so that each caller waits for its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from eventloop.util.waiting import Bell


class InVain:
    """Remember how long callers waited for a delivery that is still under way.

    The next caller waits only for the rest of its time. A delivery is identified by its begin.
    """

    def __init__(self) -> None:
        self._began = self._seconds = 0.0

    def add(self, began: float, seconds: float) -> None:
        """Add a wait of `seconds` for the delivery that began at `began`, which has not ended."""
        self._seconds = seconds + self.waited(began)
        self._began = began

    def waited(self, began: float) -> float:
        """Return the seconds waited for the delivery that began at `began`."""
        return self._seconds if began == self._began else 0.0


class Flushes:
    """Flushes that any thread asks for, and the subscriber's own thread makes.

    With a single flag, a flush that timed out and ended later would complete the next one.
    """

    def __init__(self) -> None:
        self._asked = self._made = 0
        # how many events come before it, and its number, which both only grow, and whether it calls back
        self._due: deque[tuple[int, int, bool]] = deque()
        self._bell = Bell()

    def __bool__(self) -> bool:
        """Return whether a flush has been asked for and not begun."""
        return bool(self._due)

    @property
    def asked(self) -> int:
        """Return the number of the last flush that was asked for."""
        return self._asked

    def ask(self, routed: int, *, calls: bool = True) -> int:
        """Ask for a flush once `routed` events are handled, and return its number; one thread at a time.

        Args:
            calls: whether to call `on_flush`; else the flush is complete by then.
        """
        self._asked += 1
        self._due.append((routed, self._asked, calls))
        return self._asked

    def take(self, handled: int) -> tuple[int, bool]:
        """Return the number of the last flush that is due, and whether one of those due calls back.

        It stands for those before it. The number is 0 if no flush is due.
        """
        number, calls = 0, False
        while self._due and handled >= self._due[0][0]:
            _, number, calls_back = self._due.popleft()
            calls = calls or calls_back
        return number, calls

    def made(self, number: int) -> None:
        """Mark this flush and those before it as complete."""
        self._made = max(self._made, number)
        self._bell.ring()

    def let_go(self) -> None:
        """Make waiting threads check again whether their wait is over."""
        self._bell.ring()

    def wait(self, number: int, over: Callable[[], bool], timeout: float) -> bool:
        """Wait until a flush is complete or `over` returns True; return False on a timeout."""
        return self._bell.wait_for(lambda: self._made >= number or over(), timeout)
