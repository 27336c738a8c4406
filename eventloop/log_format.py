"""The format of the event log: every event of a run in one file that survives kills, versions and flipped bits.

The file begins with `MAGIC` and the version, a little-endian uint32. Records follow, one an event, each in a frame:

    MARK, 4 bytes | length, uint32 | checksum, uint32 | payload, `length` bytes

The checksum is the CRC-32 of the payload (`zlib.crc32`), begun with the length, so that it vouches for both. The
payload is a msgpack array `[tag, sequence, time, rank, body]`: the body is the event as a map of its fields, and the
tag is its name, which a reader looks up first. So an event that the reader does not know is skipped and not fatal,
a field that it does not know is ignored, and one that was added since has its default. NaN and the infinities are
floats like any other. This module imports no torch.
"""

from __future__ import annotations

import struct
from io import FileIO
from os import PathLike
from typing import BinaryIO, Generic, TypeVar
from zlib import crc32

import msgspec

FILE_NAME = "events.evl"
MAGIC = b"\x89evl\r\n\x1a\n"
"""As PNG's: a transfer that changes line ends or the eighth bit breaks it."""
VERSION = 1
HEADER = MAGIC + struct.pack("<I", VERSION)
MARK = b"\xc1evl"
"""Where a frame begins, for whoever looks for the next one behind damaged bytes; msgpack never uses 0xc1."""
FRAME = struct.Struct("<III")
SHORTEST = 6
"""Bytes of a payload: an array, and one for each thing in it."""
RUN_TAG = "$run"
"""The tag of a record that is no event: the facts of the run whose events follow."""
BLOCK = 1 << 16
"""Bytes read at once; what is made of them stays in the processor's cache, a sixth of the time of a replay."""
MARK_NUMBER = int.from_bytes(MARK, "little")

T = TypeVar("T")


class EventLogError(ValueError):
    """A file is no event log, or one of a newer version, or its end is torn where that was not to be."""


class EventRecord(msgspec.Struct, Generic[T], array_like=True, gc=False, frozen=True):
    """One event of a log."""

    tag: str
    """The event's name."""
    sequence: int
    """0 for the first event of the file; goes on where a resumed run appends."""
    time: float
    """When the event was written, seconds since 1970: about 0.2 s after it was emitted at most, while the writer
    keeps up."""
    rank: int
    """Of the process that wrote it."""
    event: T


def pack(payload: bytes) -> bytes:
    """The frame of a payload, without the payload itself."""
    length = len(payload)
    return FRAME.pack(MARK_NUMBER, length, crc32(payload, length))


def read_header(file: BinaryIO | FileIO, path: str | PathLike[str]) -> bool:
    """Read the beginning of a log; False where not even that is whole, because its writer was killed at once.

    Raises:
        EventLogError: it is no event log, or of another version.
    """
    head = file.read(len(HEADER))
    if len(head) < len(HEADER) and HEADER.startswith(head):
        return False
    if not head.startswith(MAGIC) or len(head) < len(HEADER):
        raise EventLogError(f"{path} is not an event log: expected it to begin with {MAGIC!r}, got {head!r}")
    (version,) = struct.unpack_from("<I", head, len(MAGIC))
    if version != VERSION:
        raise EventLogError(
            f"{path} is an event log of version {version}, and this eventloop reads version {VERSION}: "
            "read it with the eventloop that wrote it"
        )
    return True


def payload_at(block: bytes, at: int) -> bytes | None:
    """The payload of the whole and intact frame that begins at `at`, or None."""
    if len(block) - at < FRAME.size:
        return None
    mark, length, checksum = FRAME.unpack_from(block, at)
    start = at + FRAME.size
    end = start + length
    if mark != MARK_NUMBER or length < SHORTEST or end > len(block):
        return None
    payload = block[start:end]
    return payload if crc32(payload, length) == checksum else None


def find_end(file: BinaryIO | FileIO, size: int) -> tuple[int, int]:
    """Where the last whole record of a log ends, and the sequence number of the next event. Read from the end, in
    blocks, so that it takes no longer for a long file.

    Args:
        size: bytes of the file.
    """
    decode = msgspec.msgpack.Decoder(EventRecord[msgspec.Raw]).decode
    span, first = BLOCK, len(HEADER)
    while True:
        start = max(first, size - span)
        file.seek(start)
        block = file.read(size - start)
        at = block.rfind(MARK)
        while at >= 0:
            if (payload := payload_at(block, at)) is not None:
                last = decode(payload)
                return start + at + FRAME.size + len(payload), last.sequence + (last.tag != RUN_TAG)
            at = block.rfind(MARK, 0, at)
        if start == first:
            return first, 0
        span *= 4
