"""Write every event of a run to one file, which `replay` can feed to any other writer.

`eventloop.eventlog.format` defines the file format. After a failed write the file is cut back to its last
complete record. Two processes may append to one file, for example while one run ends and another resumes it.
Each of them locks the file during a write, and appends after the records of the other process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from math import inf
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.eventlog.format import (
    FILE_NAME,
    HEADER,
    RUN_TAG,
    pack,
    read_header,
)
from eventloop.eventlog.frames import LogEnd, find_end
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import find_event, several
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable, why_not
from eventloop.events.run import Run
from eventloop.migration.names import knowing_others
from eventloop.util.append_file import write_all
from eventloop.util.checks import check_path, check_seconds
from eventloop.util.surrogates import escaped
from eventloop.writers.file_lock import locked
from eventloop.writers.plain import encodable, plain
from eventloop.writers.writer import TimedWriter

logger = logging.getLogger("eventloop")

_NO_ENCODING = (TypeError, ValueError, OverflowError, RecursionError)
"""The errors that msgpack raises for a value that it cannot encode; the value's text is written instead."""
LOCK_SECONDS = 1.0
"""The most seconds to wait for the lock of another process that appends to the same log."""


class EventLogWriter(TimedWriter):
    """Append every event to `<work_dir>/<filename>`, from which `replay` can make other writers' files later.

        Trainer(..., writers=[ConsoleWriter(), EventLogWriter()], work_dir="runs/digits")

        eventloop replay runs/digits --to tensorboard      # or, in Python:

        from eventloop import replay
        replay("runs/digits", bus, only="scalars_logged")

    `read_events` reads the file. A resumed run appends to it and continues its sequence numbers; an
    incomplete record that a kill or a full disk left at the end is removed first. Iterations that are run
    again are in the log twice, the second time after another `before_run`.

    An event that cannot be encoded, such as one with a tensor in it, is left out: it gets no sequence number,
    counts as failed and is named in the Python log. A field of another type that msgpack does not know is
    written as its text. In text that is not valid UTF-8, such as some paths, lone surrogates become escapes:
    `\\udcff`.

    Written events survive a kill of the process. They survive a crash of the machine once they are synced to
    the disk: by `flush`, and by a write if the last fsync is at least `fsync_seconds` ago. After a failed
    write the file is cut back to its last complete record.

    Args:
        filename: the file's path, relative to the run's work_dir or absolute.
        events: the names or classes of the events to write; "*" for every event.
        fsync_seconds: the least seconds between two fsyncs while events are written. 0 syncs each write, None
            never syncs.
        name: the writer's name in reports; needed if a bus has two writers of this class.

    Raises:
        TypeError, ValueError: an event is unknown, `fsync_seconds` is negative, or `filename` is not a path.
        EventLogError: raised by `attach` if the file exists and is not an event log, and by `open` if its
            last record has no sequence number.
    """

    events: tuple[str | type[Event], ...] = ("*",)
    batch = 128

    # an attribute of the class, because a writer with its own encoder could not be pickled
    _encoder: ClassVar[msgspec.msgpack.Encoder] = msgspec.msgpack.Encoder(enc_hook=plain)

    @knowing_others
    def __init__(
        self,
        filename: str | PathLike[str] = FILE_NAME,
        *,
        events: str | type[Event] | Sequence[str | type[Event]] = "*",
        fsync_seconds: float | None = 1.0,
        name: str | None = None,
    ) -> None:
        check_path("filename", filename)
        self.filename = filename
        self.events = tuple("*" if event == "*" else find_event(event) for event in several(events))
        if fsync_seconds is not None:
            check_seconds("fsync_seconds", fsync_seconds, zero=True)
        self.fsync_seconds = fsync_seconds
        self.name = name
        self._file: FileIO | None = None
        self._run: Run | None = None
        self._synced = -inf  # the `monotonic()` of the last fsync
        self._size = 0  # the size of the file in bytes after this writer's last write
        self._sequence = self._rank = 0
        self._tags: dict[type[Event], str] = {}  # the names of the event types that were written

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Check a log file that already exists, then subscribe to `bus` as `Writer.attach` does.

        Raises:
            EventLogError: the existing file is not an event log.
        """
        path = Path(run().work_dir, self.filename)
        if path.is_file():
            with FileIO(path) as file:
                read_header(file, path)
        return super().attach(bus, run)

    def open(self, run: Run) -> None:
        """Open or create the log, write the facts of the run, and sync the directory of the log."""
        path = Path(run.work_dir, self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._run, self._rank, self._size = FileIO(path, "ab+"), run, run.rank, 0
        try:
            with self._locked_at_end():  # writes the facts of the run
                if self.fsync_seconds is not None:
                    _sync_directory(path.parent)  # a crash could lose the directory entry of a new file
        except BaseException:
            self._file.close()
            self._file = None
            raise

    def write_timed(self, events: list[Timed]) -> None:
        with self._locked_at_end():
            self._write_records(events)

    @contextmanager
    def _locked_at_end(self) -> Iterator[None]:
        """Hold the lock of the log while the block appends records.

        If the file is new, or another process has appended to it since this writer's last write, the sequence
        numbers continue after the last record of the file, and the facts of this writer's run are written
        first.
        """
        assert self._file is not None
        assert self._run is not None
        with locked(self._file, LOCK_SECONDS):
            size = os.fstat(self._file.fileno()).st_size
            if size != self._size or not size:
                path = Path(os.fsdecode(self._file.name))
                self._size, self._sequence = _prepare_log(self._file, size, path)
                self._append(self._record(time.time(), RUN_TAG, self._run))
            yield

    def _write_records(self, events: list[Timed]) -> None:
        """Append a record for each event; raise `Unencodable` if some cannot be encoded."""
        records = []
        bad_events: list[BadEvent] = []
        for timestamp, event in events:
            event_type = type(event)
            tag = self._tags.get(event_type) or self._tags.setdefault(event_type, event_name(event_type))
            try:
                records.append(self._record(timestamp, tag, event))
            except Exception as error:
                bad_events.append(why_not(event, error, self._encode_field))
            else:
                self._sequence += 1  # a bad event takes no sequence number
        self._append(b"".join(records))
        if bad_events:
            raise Unencodable(bad_events, of=len(events))

    def flush(self) -> None:
        self._sync()

    def close(self) -> None:
        """Sync the file to the disk, and close it also after an error."""
        if (file := self._file) is not None:
            try:
                self._sync()
            finally:
                self._file = None
                file.close()

    def _record(self, timestamp: float, tag: str, body: Event | Run) -> bytes:
        """Return an event, or the facts of the run, as a record: the frame's header and the msgpack payload.

        A field that msgpack cannot encode is written as its text.

        Raises:
            NoPlainValue: a field holds a tensor or an array of several elements.
        """
        try:
            payload = self._encoder.encode((tag, self._sequence, timestamp, self._rank, body))
        except _NO_ENCODING:
            fields = msgspec.structs.asdict(body)
            fields = {name: self._encodable_field(value) for name, value in fields.items()}
            payload = self._encoder.encode((tag, self._sequence, timestamp, self._rank, fields))
        return pack(payload) + payload

    def _encode_field(self, value: Any) -> bytes:
        return self._encoder.encode(self._encodable_field(value))

    def _encodable_field(self, value: Any) -> Any:
        """Return `value` with escapes for lone surrogates, or its text if msgpack cannot encode it."""
        try:
            self._encoder.encode(value)
            return value
        except UnicodeEncodeError:
            value = encodable(value)
        except _NO_ENCODING:
            return escaped(str(value))
        try:  # the value may also contain an integer that msgpack cannot encode
            self._encoder.encode(value)
            return value
        except _NO_ENCODING:
            return escaped(str(value))

    def _append(self, data: bytes) -> None:
        """Append records and perhaps sync them; after a failed write cut the file back to its last record."""
        assert self._file is not None
        try:
            write_all(self._file, data)
        except OSError:
            with suppress(OSError):  # the error of the write is raised, not that of the repair
                self._file.truncate(self._size)
            raise
        self._size += len(data)
        if self.fsync_seconds is not None and monotonic() - self._synced >= self.fsync_seconds:
            self._sync()

    def _sync(self) -> None:
        """Sync the file to the disk, unless `fsync_seconds` is None."""
        if self._file is not None and self.fsync_seconds is not None:
            os.fsync(self._file.fileno())
            self._synced = monotonic()


def _prepare_log(file: FileIO, size: int, path: Path) -> LogEnd:
    """Prepare a log of `size` bytes for appending, and return its end and its next sequence number.

    A file without a complete header gets a header; an incomplete record at the end is removed.

    Raises:
        EventLogError: the file is not an event log, or its last record has no valid sequence number.
    """
    file.seek(0)
    if not size or not read_header(file, path):
        if size:
            file.truncate(0)  # a kill cut the header short
        write_all(file, HEADER)
        return LogEnd(len(HEADER), 0)
    end = find_end(file, size)
    if end.offset < size:
        file.truncate(end.offset)
        logger.warning(
            "%s: the last %s bytes were an incomplete record and are removed: a kill or a full disk "
            "cut it short",
            path,
            f"{size - end.offset:,}",
        )
    return end


def _sync_directory(directory: Path) -> None:
    """Sync a directory to the disk, so that its new entries survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
