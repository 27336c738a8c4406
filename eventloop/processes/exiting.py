"""Make the exit of an interpreter short."""

from __future__ import annotations

import gc
import io
import threading
from contextlib import suppress

FLUSH_SECONDS = 0.5
"""Seconds for the files to be flushed; only a file in whose write another thread hangs uses them up."""
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def skip_collections() -> None:
    """Let the interpreter exit at once, without searching for objects to free; flush open files here.

    With PyTorch the search, two garbage collections, takes some 0.8 s of a processor. It would also free the
    objects in reference cycles, and flush the files among them. Call this shortly before the exit: from now
    on such objects are never freed.
    """
    gc.unfreeze()  # `get_objects` leaves out what is frozen
    opened = [each for each in gc.get_objects() if type(each) in _BUFFERED]
    flusher = threading.Thread(target=_flush, args=(opened,), name="eventloop flush", daemon=True)
    try:
        flusher.start()
        flusher.join(FLUSH_SECONDS)  # a thread may hang in a write, and holds the lock of its file
    except RuntimeError:  # Python 3.12 starts no thread at the interpreter's exit
        _flush(opened)
    gc.freeze()


def _flush(opened: list[io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom]) -> None:
    for each in opened:
        with suppress(Exception):  # it is closed, not writable, or its disk is full
            each.flush()
