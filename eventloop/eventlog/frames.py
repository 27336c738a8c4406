"""Find the intact frames of an event log, in a time that is linear in its size whatever the file contains.

`eventloop.eventlog.reader` reads a log with it, and EventLogWriter finds the end of a log to append to. After
damaged bytes every `MARK` may begin a frame, and frames of a damaged or hostile file may overlap. So after
damage a frame is read only if `Checksums` has found it intact. This module imports no torch.
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
"""The largest sequence number after which a log is continued; a larger one cannot be a count of events."""
BLOCK = 1 << 16
"""The number of bytes read at once.

They fit into the processor's cache, which makes a replay a sixth faster than with larger blocks.
"""


class Frames:
    """Read blocks of frames from a log of `size` bytes, from its beginning to its end.

    Each method receives the open file, because a reader has no file open between two calls.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._checksums: Checksums | None = None  # None up to the first damage

    def block_at(self, file: BinaryIO | FileIO, position: int) -> bytes:
        """Return the block of bytes at `position`, and all of a larger frame that begins there.

        After the first damage, the rest of a larger frame is read only if the frame is intact.
        """
        file.seek(position)
        block = file.read(min(BLOCK, self._size - position))
        if len(block) >= FRAME.size:
            mark, length, _ = FRAME.unpack_from(block)
            missing_bytes = FRAME.size + length - len(block)
            is_larger = mark == MARK_NUMBER and 0 < missing_bytes <= self._size - position - len(block)
            if is_larger and (self._checksums is None or self._is_intact(file, position, block)):
                block += file.read(missing_bytes)
        return block

    def next_from(self, file: BinaryIO | FileIO, position: int) -> int | None:
        """Return the offset of the first complete and intact frame from `position` on, or None.

        Call it after damaged bytes, each time with a higher position.
        """
        if self._checksums is None:
            self._checksums = Checksums(position)
        while position < self._size:
            file.seek(position)
            block = file.read(min(BLOCK, self._size - position))
            # a header that begins at this offset or later is not complete in this block
            header_limit = len(block) - FRAME.size + 1
            if header_limit <= 0:
                return None
            offset = block.find(MARK)
            while 0 <= offset < header_limit:
                if self._is_intact(file, position + offset, block[offset : offset + FRAME.size]):
                    return position + offset
                offset = block.find(MARK, offset + 1)
            position += header_limit
        return None

    def _is_intact(self, file: BinaryIO | FileIO, position: int, header: bytes) -> bool:
        """Return whether the frame with this header at `position` is complete and has the right checksum."""
        assert self._checksums is not None
        length: int
        checksum: int
        _, length, checksum = FRAME.unpack_from(header)
        start, end = position + FRAME.size, position + FRAME.size + length
        if length < SHORTEST or end > self._size:
            return False
        return self._checksums.of(file, start, end, length) == checksum


class LogEnd(NamedTuple):
    """The offset and the sequence number of the next record to append to a log."""

    offset: int
    """The end of the last complete record, in bytes."""
    sequence: int
    """The sequence number of the next event."""


def find_end(file: BinaryIO | FileIO, size: int) -> LogEnd:
    """Find the end of a log of `size` bytes by reading it from the beginning, about 1 s for 100 MB.

    Raises:
        EventLogError: the last complete record has no valid sequence number.
    """
    frames = Frames(size)
    end = len(HEADER)
    last_payload: bytes | None = None
    while True:
        block, offset = frames.block_at(file, end), 0
        while len(block) - offset >= FRAME.size:
            mark, length, checksum = FRAME.unpack_from(block, offset)
            frame_end = offset + FRAME.size + length
            payload = block[offset + FRAME.size : frame_end]
            if mark != MARK_NUMBER or frame_end > len(block) or length < SHORTEST:
                break
            if crc32(payload, length) != checksum:
                break
            last_payload, offset = payload, frame_end
        end += offset
        if not offset:  # no frame begins at `end`: it is the end of the log, or damage follows
            next_frame = frames.next_from(file, end + 1)
            if next_frame is None:
                sequence = 0 if last_payload is None else _sequence_after(last_payload, file.name)
                return LogEnd(end, sequence)
            end = next_frame


def _sequence_after(payload: bytes, path: object) -> int:
    """Return the sequence number of the event after the last record of a log, given the record's payload."""
    try:
        record = msgspec.msgpack.decode(payload, type=EventRecord[msgspec.Raw])
        if 0 <= record.sequence <= LARGEST_SEQUENCE:
            is_event = not record.tag.startswith("$")
            return record.sequence + is_event
        got = f"the sequence {record.sequence}"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        got = str(error)
    raise EventLogError(
        f"{path} cannot be continued: its last record must be [tag, sequence, time, rank, body], with a "
        f"sequence from 0 to {LARGEST_SEQUENCE}, got {got}: move the file, or choose another filename"
    )
