"""`torch.save` without the CRC-32 that its zip format has of each tensor.

It is worked out on one core, at 1.6 GB/s, before a byte is written, and halves the bandwidth of a save whose SHA-256, which
the manifest has and every load looks at, is worked out beside the writing. `torch.load` never looks at the CRC-32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Switch:
    """torch's option, which is a thread's, in older releases the process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was = True  # when the first of them came

    def off(self) -> bool:
        """One more wants it off; returns what it is to be afterwards."""
        with self._lock:
            self._was = torch.serialization.get_crc32_options() or (self._users > 0 and self._was)
            torch.serialization.set_crc32_options(False)
            self._users += 1
            return self._was

    def back(self, was: bool) -> None:
        """One fewer does. A save that is under way has looked already."""
        with self._lock:
            self._users -= 1
            torch.serialization.set_crc32_options(was)


_SWITCH = _Switch()


@contextmanager
def without_crc32() -> Iterator[None]:
    """A `torch.save` that is begun within the block does not work it out. For who saves while the training stands still:
    with an older torch another thread's own files would lack it too."""
    was = _SWITCH.off()
    try:
        yield
    finally:
        _SWITCH.back(was)
