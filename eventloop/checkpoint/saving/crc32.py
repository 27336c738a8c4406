"""Disable the CRC-32 that `torch.save` computes for each tensor of its zip format.

The saver uses it while the training stands still. The CRC-32 is computed on one core at 1.6 GB/s before a
byte is written, and halves the bandwidth of a save. It is not needed: `torch.load` never checks it, and
`load_checkpoint` checks the SHA-256 of the manifest, which is computed while the file is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Switch:
    """A counted switch for torch's option, which belongs to a thread, in older releases to the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was = True  # the option before the first user

    def off(self) -> bool:
        """Disable the option for one more user; return the value to restore afterwards."""
        with self._lock:
            self._was = torch.serialization.get_crc32_options() or (self._users > 0 and self._was)
            torch.serialization.set_crc32_options(False)
            self._users += 1
            return self._was

    def back(self, was: bool) -> None:
        """Restore the option for one user; a save that is running has read it already."""
        with self._lock:
            self._users -= 1
            torch.serialization.set_crc32_options(was)


_SWITCH = _Switch()


@contextmanager
def without_crc32() -> Iterator[None]:
    """Disable the CRC-32 of each `torch.save` that begins in the block.

    Use it only while the training stands still: in older releases of torch the option belongs to the process,
    so files that other threads save would lack the CRC-32 too.
    """
    was = _SWITCH.off()
    try:
        yield
    finally:
        _SWITCH.back(was)
