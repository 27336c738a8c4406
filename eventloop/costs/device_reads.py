"""Count the waits for the device when code on the training thread reads metrics, for each calling function.

`EventStorage` measures its reads with a `DeviceReads`. Reading a value that is already on the host is not a
wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from eventloop.costs.records import DeviceRead

_BETWEEN = ("eventloop.metrics.", __name__, "contextlib")
"""The modules whose stack frames are skipped when the calling function is looked up."""


class DeviceReads:
    """The waits for the device when values of one `EventStorage` are read.

    The training thread adds them; `records` may be called on any thread.
    """

    def __init__(self) -> None:
        self._reads: dict[tuple[str, str], DeviceRead] = {}

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Count the time of the block as a wait of the innermost calling function outside of the storage."""
        began = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - began
            reader = _reader()
            past = self._reads.get(reader) or DeviceRead(*reader)
            self._reads[reader] = DeviceRead(*reader, past.calls + 1, past.seconds + seconds)

    def records(self) -> list[DeviceRead]:
        """Return how often and how long each function waited for the device, the longest total first."""
        return sorted(self._reads.copy().values(), key=lambda read: -read.seconds)


def _reader() -> tuple[str, str]:
    """Return the name of the innermost function outside of the storage, and its file and line."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    name = code.co_qualname.rsplit("<locals>.", 1)[-1]  # as `handler_name` has it
    return name, f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
