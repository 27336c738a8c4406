"""Find the intact frames of an event log, in a time that is linear in its size whatever the file contains.

`eventloop.eventlog.reader` reads with it, and EventLogWriter finds the end at which it continues. Behind
damage each mark may begin a frame, and the frames of a damaged or hostile file may overlap: there a frame is
read only after `Checksums` has found it intact. This module imports no torch.
"""

from __future__ import annotations

from io import FileIO
from typing import BinaryIO, NamedTuple
from zlib import crc32

import msgspec

from eventloop.eventlog.checksums import Checksums
from eventloop.eventlog.format import (
    FRAME,
    HEADER,
    MARK,
    MARK_NUMBER,
    SHORTEST,
    EventLogError,
    EventRecord,
)

LARGEST_SEQUENCE = 1 << 62
BLOCK = 1 << 16
"""The number of bytes read at once; they fit into the processor's cache, so a replay is a sixth faster."""


class Frames:
    """The frames of a log of `size` bytes, which is read from its beginning to its end.

    Each call is given the open file, because a reader keeps none open between two calls.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._checksums: Checksums | None = None  # None up to the first damage

    def block_at(self, file: BinaryIO | FileIO, position: int) -> bytes:
        """Read a block at `position`; if a larger frame begins there, read the whole frame.

        After the first damage a large frame is read whole only if it is intact.
        """
        file.seek(position)
        block = file.read(min(BLOCK, self._size - position))
        if len(block) >= FRAME.size:
            mark, length, _ = FRAME.unpack_from(block)
            left = FRAME.size + length - len(block)
            large = mark == MARK_NUMBER and 0 < left <= self._size - position - len(block)
            if large and (self._checksums is None or self._is_intact(file, position, block)):
                block += file.read(left)
        return block

    def next_from(self, file: BinaryIO | FileIO, position: int) -> int | None:
        """Return the offset of the first complete and intact frame from `position` on, or None.

        The first call is made behind the first damage, and each later one at a higher position.
        """
        if self._checksums is None:
            self._checksums = Checksums(position)
        while position < self._size:
            file.seek(position)
            block = file.read(min(BLOCK, self._size - position))
            behind = len(block) - FRAME.size + 1  # from there on a header is not whole in this block
            if behind <= 0:
                return None
            at = block.find(MARK)
            while 0 <= at < behind:
                if self._is_intact(file, position + at, block[at : at + FRAME.size]):
                    return position + at
                at = block.find(MARK, at + 1)
            position += behind
        return None

    def _is_intact(self, file: BinaryIO | FileIO, position: int, header: bytes) -> bool:
        assert self._checksums is not None
        length: int
        checksum: int
        _, length, checksum = FRAME.unpack_from(header)
        start, end = position + FRAME.size, position + FRAME.size + length
        if length < SHORTEST or end > self._size:
            return False
        return self._checksums.of(file, start, end, length) == checksum


class LogEnd(NamedTuple):
    """The offset and the sequence number at which a log is continued."""

    offset: int
    """The end of the last complete record, in bytes."""
    sequence: int
    """The sequence number of the next event."""


def find_end(file: BinaryIO | FileIO, size: int) -> LogEnd:
    """Find the end of a log of `size` bytes by reading it from the beginning, about 1 s for 100 MB.

    Raises:
        EventLogError: the last complete record has no sequence number that could be continued.
    """
    frames = Frames(size)
    end = len(HEADER)
    last: bytes | None = None
    while True:
        block, at = frames.block_at(file, end), 0
        while len(block) - at >= FRAME.size:
            mark, length, checksum = FRAME.unpack_from(block, at)
            behind = at + FRAME.size + length
            payload = block[at + FRAME.size : behind]
            if mark != MARK_NUMBER or behind > len(block) or length < SHORTEST:
                break
            if crc32(payload, length) != checksum:
                break
            last, at = payload, behind
        end += at
        if not at:
            found = frames.next_from(file, end + 1)
            if found is None:
                return LogEnd(end, 0 if last is None else _sequence_after(last, file.name))
            end = found


def _sequence_after(payload: bytes, path: object) -> int:
    try:
        record = msgspec.msgpack.decode(payload, type=EventRecord[msgspec.Raw])
        if 0 <= record.sequence <= LARGEST_SEQUENCE:
            return record.sequence + (not record.tag.startswith("$"))
        why = f"the sequence {record.sequence}"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = str(error)
    raise EventLogError(
        f"{path} cannot be continued: its last record must be [tag, sequence, time, rank, body], with a "
        f"sequence from 0 to {LARGEST_SEQUENCE}, got {why}: move the file, or choose another filename"
    )
