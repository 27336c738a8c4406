"""Encode messages for a pipe, and split the bytes of a pipe into messages: kind, number, length and body.

Worker processes and the subscribers that send them events (`eventloop.background.workers`) use it in both
directions, and so do a training and the process that saves its checkpoints.
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
    """List the kinds of frames. A comment states the meaning of the frame's `number`, if the kind uses it.

    Kinds below 16 are sent to the child, the others are sent by it.
    """

    SETUP = 1
    BEGIN = 2  # how many workers of this subscriber have died before
    TYPE = 3
    BATCH = 4  # how many of the next events form one delivery
    EVENT = 5
    PICKLED = 6
    LIKENESS = 7  # the index of a class that the worker defined for events whose class it cannot import
    FLUSH = 8
    CLOSE = 9
    RECORD = 10  # 1: answer each delivery with its spans from now on; 0: stop doing so
    READY = 16
    REFUSED = 17
    DONE = 18  # how many events the worker has handled since it began
    FAILED = 19  # how many events the delivery had that failed; it came after the events of DONE
    FLUSHED = 20
    CLOSED = 21
    LOG = 22
    ALIVE = 23  # the child is running, and has no answer yet


class Frame(NamedTuple):
    """Hold one message: its kind, a number whose meaning depends on the kind, and its bytes."""

    kind: int
    number: int
    body: bytes


def frame(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """Encode a message as bytes: the header, then the body."""
    return _HEADER.pack(kind, number, len(body)) + body


class Inbox:
    """Read messages from a pipe, and keep the bytes of an incomplete message until the rest has come."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = bytearray()

    def read(self) -> bool:
        """Read the available bytes, waiting for at least one; return False at the end of the pipe."""
        data = os.read(self._fd, _BLOCK)
        self._bytes += data
        return bool(data)

    def frames(self) -> Iterator[Frame]:
        """Yield the complete messages that were read, and remove them from the buffer."""
        while len(self._bytes) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEADER.size : end])
            del self._bytes[:end]
            yield Frame(kind, number, body)
