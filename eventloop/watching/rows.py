"""Read the new part of the two logs of a run, `metrics.jsonl` and `events.evl`, at each read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventloop.eventlog.format import HEADER, EventRecord
from eventloop.eventlog.frames import Frames
from eventloop.eventlog.jsonl import UNREADABLE
from eventloop.eventlog.reader import EventReader
from eventloop.events import Event

BLOCK = 1 << 20
"""How many bytes of rows are read and decoded at a time, which bounds the memory for their objects."""
TAIL = 1 << 24
"""How many bytes at the end of an event log are read if only its last events are needed."""

Row = dict[str, Any]
_decoder = msgspec.json.Decoder(Row)


class _Followed:
    """Hold the position up to which a growing file was read; 0 again if the file is replaced or cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._inode = 0

    def grown(self) -> bool:
        """Return whether the file exists and has unread bytes; set `position` to 0 if it is a new one."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        if stat.st_ino != self._inode or stat.st_size < self.position:
            self._inode, self.position = stat.st_ino, 0
        return stat.st_size > self.position


class RowLog:
    """Read the rows of a `metrics.jsonl` as they are added.

    Args:
        path: the file, which need not exist yet.
        restart: called before the rows of a file are read that has replaced the former one.
        receive: called with each row.
    """

    def __init__(self, path: Path, restart: Callable[[], object], receive: Callable[[Row], object]) -> None:
        self._file, self._restart, self._receive = _Followed(path), restart, receive

    def read(self) -> None:
        """Read the rows that are complete by now, and skip lines that cannot be decoded."""
        before = self._file.position
        if not self._file.grown():
            return
        if before and not self._file.position:
            self._restart()
        with self._file.path.open("rb") as file:
            file.seek(self._file.position)
            while lines := file.readlines(BLOCK):
                if not lines[-1].endswith(b"\n"):  # the line is being written, or its writer was killed
                    lines.pop()
                self._file.position += sum(map(len, lines))
                for row in _decoded(lines):
                    self._receive(row)


class EventLog:
    """Read the events of an event log as they are added.

    Args:
        path: the file, which need not exist yet.
        only: the names of the events to be read.
        whole: whether to read all of the file, or only the last `TAIL` bytes of an existing one.
        receive: called with each event's record.
        restart: called before the events of a file are read that has replaced the former one.
    """

    def __init__(
        self,
        path: Path,
        only: Sequence[str],
        receive: Callable[[EventRecord[Event]], object],
        *,
        whole: bool,
        restart: Callable[[], object],
    ) -> None:
        self._file, self._only, self._whole = _Followed(path), only, whole
        self._receive, self._restart = receive, restart

    def read(self) -> None:
        """Read the events that are complete by now.

        Raises:
            EventLogError: the file is not an event log, or has another version.
            OSError: the file cannot be read.
        """
        before = self._file.position
        if not self._file.grown():
            return
        if not self._file.position:
            if before:
                self._restart()
            self._file.position = len(HEADER) if self._whole else self._near_end()
        reader = EventReader(self._file.path, only=self._only, on_torn="ignore", position=self._file.position)
        for record in reader:
            self._receive(record)
        self._file.position = reader.position

    def _near_end(self) -> int:
        """Return the offset of a frame, which holds an event, at most `TAIL` bytes before the end of the log.

        Bytes within an event may look like a frame, and then their offset may be returned. This does no harm
        if only the last events are shown.
        """
        size = self._file.path.stat().st_size
        if size <= TAIL:
            return len(HEADER)
        with self._file.path.open("rb") as file:
            return Frames(size).next_from(file, size - TAIL) or size


def _decoded(lines: list[bytes]) -> list[Row]:
    """Return the rows in lines, without those lines that cannot be decoded."""
    try:
        return _decoder.decode_lines(b"".join(lines))
    except UNREADABLE:
        rows = []
        for line in lines:
            try:
                rows.append(_decoder.decode(line))
            except UNREADABLE:
                continue
        return rows
