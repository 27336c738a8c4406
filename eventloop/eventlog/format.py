"""Define the format of the event log, a file that survives kills, new versions and flipped bits.

It contains every event of a run. EventLogWriter writes it. `eventloop.eventlog.reader` reads it, and uses
`eventloop.eventlog.frames` for that.

The file begins with `MAGIC` and the version, a little-endian uint32. Records follow, one per event, each in a
frame:

    MARK, 4 bytes | length, uint32 | checksum, uint32 | payload, `length` bytes

The checksum is the CRC-32 of the length and the payload (`zlib.crc32` of the payload, with the length as the
initial value). The payload is a msgpack array `[tag, sequence, time, rank, body]`: the body is the event as a
map of its fields, and the tag is its name. A reader looks up the name first. It skips unknown events, ignores
unknown fields, and uses the defaults of fields that were added to an event later. NaN and the infinities are
ordinary floats.

A record whose tag begins with `$` is not an event, and takes no sequence number: `$run` holds the facts of
the run whose events follow. An event may itself contain frames, for example the bytes of another log. So the
end of a log can only be found by reading it from the beginning. This module imports no torch.
"""

from __future__ import annotations

import struct
from io import FileIO
from os import PathLike
from typing import BinaryIO, Generic, TypeVar
from zlib import crc32

import msgspec

FILE_NAME = "events.evl"
"""The default name of a run's event log."""
MAGIC = b"\x89evl\r\n\x1a\n"
"""The file's first bytes; like PNG's, they show transfers that changed line ends or the eighth bit."""
VERSION = 1
"""The version of the format."""
HEADER = MAGIC + struct.pack("<I", VERSION)
"""The first bytes of a log: `MAGIC` and the version."""
MARK = b"\xc1evl"
"""The first bytes of each frame, by which a reader finds the next frame after damage; not valid msgpack."""
FRAME = struct.Struct("<III")
"""The header of a frame: mark, length and checksum, each a little-endian uint32."""
SHORTEST = 6
"""The least number of bytes of a payload: the head of an array, and one byte for each of its items."""
RUN_TAG = "$run"
"""The tag of the record with the facts of the run whose events follow."""
MARK_NUMBER = int.from_bytes(MARK, "little")
"""`MARK` as the first number of a frame's header."""

T = TypeVar("T")


class EventLogError(ValueError):
    """Raised if a file is not an event log, has another version, or with `on_torn="raise"` is damaged."""


class EventRecord(msgspec.Struct, Generic[T], array_like=True, gc=False, frozen=True):
    """An event of a log, with its sequence number, time and rank."""

    tag: str
    """The event's name."""
    sequence: int
    """The number of the event: 0 for the first one of the file; a resumed run continues the count."""
    time: float
    """When the event was emitted, in seconds since 1970.

    An event that came from a spill file has the time of an earlier event, because the file has no times.
    """
    rank: int
    """The rank of the process that wrote the record."""
    event: T


def pack(payload: bytes) -> bytes:
    """Return the header of a payload's frame, to be written before the payload."""
    length = len(payload)
    return FRAME.pack(MARK_NUMBER, length, crc32(payload, length))


def read_header(file: BinaryIO | FileIO, path: str | PathLike[str]) -> bool:
    """Read and check the header of a log; return False if a kill has left it incomplete.

    Raises:
        EventLogError: the file is not an event log, or has another version.
    """
    header = file.read(len(HEADER))
    if len(header) < len(HEADER) and HEADER.startswith(header):
        return False
    if not header.startswith(MAGIC) or len(header) < len(HEADER):
        raise EventLogError(
            f"{path} is not an event log: expected it to begin with {MAGIC!r}, got {header!r}"
        )
    (version,) = struct.unpack_from("<I", header, len(MAGIC))
    if version != VERSION:
        raise EventLogError(
            f"{path} is an event log of version {version}, and this eventloop reads version {VERSION}: "
            "read it with the eventloop that wrote it"
        )
    return True
