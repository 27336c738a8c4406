"""Call the `when=` filter of one subscriber on a thread of its own, because the user's code may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from eventloop.background.threads import BackgroundThread
from eventloop.util.waiting import Bell, Latch

HANGS_SECONDS = 0.05
"""The seconds after which a running `when=` call counts as hanging, and is no longer waited for."""


class FilterThread:
    """A daemon thread that calls `ask_all` whenever it is woken, until `over` returns True."""

    def __init__(self, name: str, ask_all: Callable[[], None], over: Callable[[], bool]) -> None:
        self.asked = Bell()
        """A bell that rings when the filter has been called for all waiting events."""
        self._ask_all, self._over = ask_all, over
        self._woken = Latch()
        self._starting = threading.Lock()
        self._thread = BackgroundThread(target=self._run, name=f"eventloop when= of {name}", daemon=True)

    def wake(self) -> None:
        """Make the thread look for events, and start it at the first call; safe from any thread."""
        with self._starting:
            if self._thread.ident is None and not self._over():
                self._thread.start()
        self._woken.set()

    def is_here(self) -> bool:
        """Return whether the calling thread is this thread."""
        return threading.current_thread() is self._thread

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, by `over` or by an error."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over():
            self._woken.clear()
            self._ask_all()
            self.asked.ring()
            self._woken.wait()
        self.asked.ring()
