"""Work that takes its time while the training thread waits for it, so that the wait is as long as the work."""

from __future__ import annotations

from time import perf_counter, sleep

import pytest

from tests.support.internals import substitute
from tests.support.process_support import until


class WaitedFor:
    """Work for some seconds once the training thread waits, however late a busy machine lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads = 0
        substitute(monkeypatch, "waits.perf_counter", self._read)

    def work(self, seconds: float) -> None:
        """Work for these seconds within one wait of the training thread: again if that has ended meanwhile."""
        while True:
            until(lambda: self._reads % 2)  # the clock is read when a wait begins, and when it ends
            before = self._reads
            sleep(seconds)
            if self._reads == before:
                return

    def _read(self) -> float:
        self._reads += 1
        return perf_counter()
