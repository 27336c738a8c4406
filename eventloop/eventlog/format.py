"""The format of the event log: every event of a run in one file that survives kills, versions and flipped bits.

The file begins with `MAGIC` and the version, a little-endian uint32. Records follow, one an event, each in a frame:

    MARK, 4 bytes | length, uint32 | checksum, uint32 | payload, `length` bytes

The checksum is the CRC-32 of the payload (`zlib.crc32`), begun with the length, so that it vouches for both. The
payload is a msgpack array `[tag, sequence, time, rank, body]`: the body is the event as a map of its fields, and the
tag is its name, which a reader looks up first. So an event that the reader does not know is skipped and not fatal,
a field that it does not know is ignored, and one that was added since has its default. NaN and the infinities are
floats like any other.

A record whose tag begins with `$` is no event, and takes no sequence number: `$run` has the facts of the run whose
events follow, `$place` the offset of its own frame in the file. An event may hold frames itself, of another log that is
logged as bytes, say. Who looks for the end of a log from behind cannot tell these from the log's own; but where a
`$place` lies where it says, the frames from there on are the log's own.
This module imports no torch.
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
PLACE_TAG = "$place"
"""The tag of a record that is no event: the offset at which it lies."""
PLACE_EVERY = 1 << 20
"""Bytes from one of these to the next, at least: what is looked through when the log is opened again."""
BLOCK = 1 << 16
"""Bytes read at once; what is made of them stays in the processor's cache, a sixth of the time of a replay."""
MARK_NUMBER = int.from_bytes(MARK, "little")

_PLACE = msgspec.msgpack.encode((PLACE_TAG, 0, 0.0, 0, 0))[: len(PLACE_TAG) + 2]
"""How the payload of one begins."""
_LONGEST_PLACE = FRAME.size + 64

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


def block_at(file: BinaryIO | FileIO, position: int, size: int) -> bytes:
    """What a log of `size` bytes has there: a block, or the whole frame that begins there if it is larger."""
    left = size - position
    file.seek(position)
    block = file.read(min(BLOCK, left))
    if len(block) >= FRAME.size:
        mark, length, _ = FRAME.unpack_from(block)
        if mark == MARK_NUMBER and len(block) < FRAME.size + length <= left:
            block += file.read(FRAME.size + length - len(block))
    return block


def find_frame(file: BinaryIO | FileIO, position: int, size: int) -> int | None:
    """Where the first whole and intact frame from `position` on begins, in a log of `size` bytes."""
    while position < size:
        block = block_at(file, position, size)
        at = block.find(MARK)
        while at >= 0:
            if payload_at(block_at(file, position + at, size), 0) is not None:
                return position + at
            at = block.find(MARK, at + 1)
        position += max(1, len(block) - len(MARK) + 1)  # a mark may lie across two blocks
    return None


def place_record(at: int, sequence: int, time: float, rank: int) -> bytes:
    """A record that says where it lies.

    Args:
        at: its offset in the file.
        sequence: of the next event.
    """
    payload = msgspec.msgpack.encode((PLACE_TAG, sequence, time, rank, at))
    return pack(payload) + payload


class LogEnd(NamedTuple):
    """Where a log is gone on with."""

    offset: int
    """The end of its last whole record."""
    sequence: int
    """Of the next event."""
    place: int
    """Where its last `$place` lies, or its first record."""


def find_end(file: BinaryIO | FileIO, size: int) -> LogEnd:
    """The end of a log of `size` bytes, as whoever reads it from its beginning finds it, whatever the events hold. What
    is before the last `$place` is not read, so that it takes no longer for a long file."""
    place = end = _last_place(file, size)
    last: bytes | None = None
    while True:
        block, at = block_at(file, end, size), 0
        while (payload := payload_at(block, at)) is not None:
            last = payload
            at += FRAME.size + len(payload)
        end += at
        if not at:
            found = find_frame(file, end + 1, size)  # behind damaged bytes
            if found is None:
                return LogEnd(end, 0 if last is None else _sequence_after(last), place)
            end = found


def _sequence_after(payload: bytes) -> int:
    record = msgspec.msgpack.decode(payload, type=EventRecord[msgspec.Raw])
    return record.sequence + (not record.tag.startswith("$"))


def _last_place(file: BinaryIO | FileIO, size: int) -> int:
    """Where the last record lies that says truly where it lies; the first record's place where there is none."""
    first, end = len(HEADER), size
    while end > first:
        start = max(first, end - PLACE_EVERY)
        file.seek(start)
        stretch = file.read(min(size, end + len(_PLACE) - 1) - start)  # it may lie across two
        found = stretch.rfind(_PLACE)
        while found >= 0:
            at = start + found - FRAME.size
            if _is_place(file, at):
                return at
            found = stretch.rfind(_PLACE, 0, found)
        end = start
    return first


def _is_place(file: BinaryIO | FileIO, at: int) -> bool:
    """True where the frame at `at` is a `$place` which says that it is there: one that was copied does not, unless to the
    very place where it was in another file."""
    file.seek(at)
    payload = payload_at(file.read(_LONGEST_PLACE), 0)
    if payload is None:
        return False
    try:
        return msgspec.msgpack.decode(payload, type=EventRecord[int]).event == at
    except msgspec.DecodeError:
        return False
