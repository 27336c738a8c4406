"""Measure how long each function on the training thread waits for the device to read metrics.

`EventStorage`, which holds the metrics, measures its reads with a `DeviceReads`. Reading a value that is
already on the host is not a wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from eventloop.costs.records import DeviceRead

_SKIPPED_MODULES = ("eventloop.metrics.", __name__, "contextlib")
"""The modules whose stack frames are skipped when the calling function is looked up."""


class DeviceReads:
    """The waits for the device to read values of one `EventStorage`, summed for each calling function.

    The training thread adds waits; any thread may call `records`.
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
            caller = _caller()
            past = self._reads.get(caller) or DeviceRead(*caller)
            self._reads[caller] = DeviceRead(*caller, past.calls + 1, past.seconds + seconds)

    def records(self) -> list[DeviceRead]:
        """Return the number and the seconds of the waits of each function, the longest total first."""
        return sorted(self._reads.copy().values(), key=lambda read: -read.seconds)


def _caller() -> tuple[str, str]:
    """Return the name of the innermost calling function outside of the storage, and its file and line."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES) and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    name = code.co_qualname.rsplit("<locals>.", 1)[-1]  # the same form as in `handler_name`
    return name, f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
