"""Shorten the exit of an interpreter."""

from __future__ import annotations

import gc
import io
import threading
from contextlib import suppress

FLUSH_SECONDS = 0.5
"""The longest wait, in seconds, for open files to be flushed; it ends earlier unless a write hangs."""
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def skip_collections() -> None:
    """Flush open files, and make the interpreter's exit skip its garbage collections.

    With PyTorch the two collections at the exit take some 0.8 s of CPU time. They would also flush files in
    reference cycles, so that is done here. Call this shortly before the exit, because from now on no object
    in a reference cycle is freed.
    """
    gc.unfreeze()  # `get_objects` leaves out frozen objects
    files = [candidate for candidate in gc.get_objects() if type(candidate) in _BUFFERED]
    flusher = threading.Thread(target=_flush, args=(files,), name="eventloop flush", daemon=True)
    try:
        flusher.start()
        flusher.join(FLUSH_SECONDS)  # not longer: another thread may hang in a write with the file's lock
    except RuntimeError:  # Python 3.12 starts no thread at the interpreter's exit
        _flush(files)
    gc.freeze()


def _flush(files: list[io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom]) -> None:
    for file in files:
        with suppress(Exception):  # the file is closed or not writable, or its disk is full
            file.flush()
