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
    """List the kinds of messages: those below 16 are sent to the child process, the others by it.

    Each comment says what the message means, and what its `number` is if the kind uses it.
    """

    SETUP = 1  # import the handler
    BEGIN = 2  # facts that the handler is given before its first event; number: how many workers have died
    TYPE = 3  # the description of a class of events that follow
    BATCH = 4  # begin a delivery; number: how many of the next events it has. For the saver: write saves
    EVENT = 5  # an event, encoded by its class
    PICKLED = 6  # an event, as a pickle
    LIKENESS = 7  # an event whose class the worker cannot import; number: the index of its description
    FLUSH = 8  # flush the handler; for the saver: remove the checkpoints that were replaced
    CLOSE = 9  # close the handler, and end
    RECORD = 10  # number 1: answer each delivery with its spans from now on; 0: stop doing so
    READY = 16  # the child has started, and can work
    REFUSED = 17  # the handler could not be imported
    DONE = 18  # number: how many events the worker has handled since it began. For the saver: an answer
    FAILED = 19  # the delivery after the events of DONE has failed; number: how many events it had
    FLUSHED = 20  # the handler was flushed
    CLOSED = 21  # the handler was closed
    LOG = 22  # a log record, for the program's logger
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
