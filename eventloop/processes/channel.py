"""Cut the bytes of a pipe into messages: frames of kind, number, length and body.

Worker processes, and the subscribers that send them events, use it for both directions
(`eventloop.background.workers`), and so does the process that saves checkpoints.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("<BQQ")
_BLOCK = 1 << 20


class Kind(IntEnum):
    """The kind of a frame; a comment states the meaning of the frame's `number`, if it has one.

    Kinds below 16 go to the child, the others come from it.
    """

    SETUP = 1
    BEGIN = 2  # the number of workers that died before this one
    TYPE = 3
    BATCH = 4  # the number of events after it that are one delivery
    EVENT = 5
    PICKLED = 6
    LIKENESS = 7  # the index of the class that the worker defined for such events
    FLUSH = 8
    CLOSE = 9
    RECORD = 10  # 1: acknowledge with spans from now on, 0: no more
    READY = 16
    REFUSED = 17
    DONE = 18  # the number of events handled since the worker began
    FAILED = 19  # the number of events in the delivery that failed, which follow those of DONE
    FLUSHED = 20
    CLOSED = 21
    LOG = 22
    ALIVE = 23  # the child is running, and has no answer yet


class Frame(NamedTuple):
    """One message: its kind, a number whose meaning depends on the kind, and its bytes."""

    kind: int
    number: int
    body: bytes


def frame(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """Encode a message as bytes: the header, then the body."""
    return _HEADER.pack(kind, number, len(body)) + body


class Inbox:
    """Assemble messages from the bytes of a pipe; a read may end anywhere within a message."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = bytearray()

    def read(self) -> bool:
        """Read the available bytes, waiting for at least one; return False at the end of the pipe."""
        data = os.read(self._fd, _BLOCK)
        self._bytes += data
        return bool(data)

    def frames(self) -> Iterator[Frame]:
        """Yield the complete messages and remove them from the buffer."""
        while len(self._bytes) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEADER.size : end])
            del self._bytes[:end]
            yield Frame(kind, number, body)
