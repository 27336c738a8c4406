"""Define the format of the event log, a file that survives kills, new versions and flipped bits.

It holds every event of a run. EventLogWriter writes it, and `eventloop.eventlog.reader` reads it.

The file begins with `MAGIC` and the version, a little-endian uint32. Records follow, one per event, each in a
frame:

    MARK, 4 bytes | length, uint32 | checksum, uint32 | payload, `length` bytes

The checksum is the CRC-32 of the length and the payload (`zlib.crc32` of the payload, with the length as the
initial value). The payload is a msgpack array `[tag, sequence, time, rank, body]`: the body is the event as a
map of its fields, and the tag is its name, which a reader looks up first. So a reader skips unknown events,
ignores unknown fields, and gives fields that were added later their defaults. NaN and the infinities are
ordinary floats.

A record whose tag begins with `$` is not an event, and takes no sequence number: `$run` holds the facts of
the run whose events follow. An event may itself contain frames, for example as the bytes of another log; so
the end of a log is found by reading it from its beginning. This module imports no torch.
"""

from __future__ import annotations

import struct
from io import FileIO
from os import PathLike
from typing import BinaryIO, Generic, NamedTuple, TypeVar
from zlib import crc32

import msgspec

FILE_NAME = "events.evl"
MAGIC = b"\x89evl\r\n\x1a\n"
"""The signature of the file; like PNG's, it shows transfers that changed line ends or the eighth bit."""
VERSION = 1
HEADER = MAGIC + struct.pack("<I", VERSION)
MARK = b"\xc1evl"
"""The first bytes of a frame, by which a reader finds the next one after damage; not valid msgpack."""
FRAME = struct.Struct("<III")
SHORTEST = 6
"""The least number of bytes of a payload: the head of an array, and one byte for each of its items."""
RUN_TAG = "$run"
"""The tag of the record with the facts of the run whose events follow."""
BLOCK = 1 << 16
"""The number of bytes read at once; they fit into the processor's cache, so a replay is a sixth faster."""
MARK_NUMBER = int.from_bytes(MARK, "little")

T = TypeVar("T")


class EventLogError(ValueError):
    """Raised if a file is not an event log, has another version, or is torn with `on_torn="raise"`."""


class EventRecord(msgspec.Struct, Generic[T], array_like=True, gc=False, frozen=True):
    """An event of a log, with its sequence number, time and rank."""

    tag: str
    """The event's name."""
    sequence: int
    """The number of the event: 0 for the first one of the file; a resumed run continues the count."""
    time: float
    """The time of the emit, in seconds since 1970; an event from a spill file has that of one before it."""
    rank: int
    """The rank of the process that wrote it."""
    event: T


def pack(payload: bytes) -> bytes:
    """Return the header of a payload's frame: mark, length and checksum. The payload is written after it."""
    length = len(payload)
    return FRAME.pack(MARK_NUMBER, length, crc32(payload, length))


def read_header(file: BinaryIO | FileIO, path: str | PathLike[str]) -> bool:
    """Read the header of a log; return False if a kill has left it incomplete."""
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
    """Return the payload of the frame that begins at `at`, or None if it is incomplete or damaged."""
    if len(block) - at < FRAME.size:
        return None
    mark, length, checksum = FRAME.unpack_from(block, at)
    start = at + FRAME.size
    end = start + length
    if mark != MARK_NUMBER or length < SHORTEST or end > len(block):
        return None
    payload = block[start:end]
    return payload if crc32(payload, length) == checksum else None


def block_at(file: BinaryIO | FileIO, position: int, size: int) -> bytes:
    """Read a block at `position`; if a larger frame begins there, read the whole frame."""
    left = size - position
    file.seek(position)
    block = file.read(min(BLOCK, left))
    if len(block) >= FRAME.size:
        mark, length, _ = FRAME.unpack_from(block)
        if mark == MARK_NUMBER and len(block) < FRAME.size + length <= left:
            block += file.read(FRAME.size + length - len(block))
    return block


def find_frame(file: BinaryIO | FileIO, position: int, size: int) -> int | None:
    """Return the offset of the first complete and intact frame from `position` on, or None."""
    while position < size:
        block = block_at(file, position, size)
        at = block.find(MARK)
        while at >= 0:
            if payload_at(block_at(file, position + at, size), 0) is not None:
                return position + at
            at = block.find(MARK, at + 1)
        position += max(1, len(block) - len(MARK) + 1)  # a mark may lie across two blocks
    return None


class LogEnd(NamedTuple):
    """The offset and the sequence number at which a log is continued."""

    offset: int
    """The end of the last complete record, in bytes."""
    sequence: int
    """The sequence number of the next event."""


def find_end(file: BinaryIO | FileIO, size: int) -> LogEnd:
    """Find the end of a log of `size` bytes by reading it from the beginning, about 1 s for 100 MB."""
    end = len(HEADER)
    last: bytes | None = None
    while True:
        block, at = block_at(file, end, size), 0
        while len(block) - at >= FRAME.size:
            mark, length, checksum = FRAME.unpack_from(block, at)
            behind = at + FRAME.size + length
            payload = block[at + FRAME.size : behind]  # inlined `payload_at`: a call is a third of the time
            if mark != MARK_NUMBER or behind > len(block) or length < SHORTEST:
                break
            if crc32(payload, length) != checksum:
                break
            last, at = payload, behind
        end += at
        if not at:
            found = find_frame(file, end + 1, size)  # behind damaged bytes
            if found is None:
                return LogEnd(end, 0 if last is None else _sequence_after(last))
            end = found


def _sequence_after(payload: bytes) -> int:
    record = msgspec.msgpack.decode(payload, type=EventRecord[msgspec.Raw])
    return record.sequence + (not record.tag.startswith("$"))
