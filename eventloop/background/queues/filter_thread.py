"""Ask the `when=` of one subscriber on a thread of its own, because foreign code may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from eventloop.util.waiting import Bell, Latch

HANGS_SECONDS = 0.05
"""A call of so many seconds is not waited for by a thread that reads an account."""


class FilterThread:
    """A daemon thread that calls `ask_all` whenever it is woken, until `over` returns True."""

    def __init__(self, name: str, ask_all: Callable[[], None], over: Callable[[], bool]) -> None:
        self.asked = Bell()
        """Rings when all that waited was asked about."""
        self._ask_all, self._over = ask_all, over
        self._woken = Latch()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"eventloop when= of {name}", daemon=True)

    def wake(self) -> None:
        """Make the thread look for events, starting it at the first call; safe from any thread."""
        with self._starting:
            if self._thread.ident is None and not self._over():
                self._thread.start()
        self._woken.set()

    def is_here(self) -> bool:
        """Return whether this is the thread itself."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while not self._over():
            self._woken.clear()
            self._ask_all()
            self.asked.ring()
            self._woken.wait()
        self.asked.ring()
