"""The event log: every event of a run, in order, in one file that `replay` drives any writer from."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from math import inf
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.eventlog.format import (
    FILE_NAME,
    HEADER,
    PLACE_EVERY,
    RUN_TAG,
    LogEnd,
    find_end,
    pack,
    place_record,
    read_header,
)
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import find_event, several
from eventloop.events.encoding_errors import BadEvent, Unencodable, why_not
from eventloop.events.run import Run
from eventloop.util.append_file import write_all
from eventloop.util.checks import check_path
from eventloop.util.surrogates import escaped
from eventloop.writers.plain import encodable, plain
from eventloop.writers.writer import Writer

logger = logging.getLogger("eventloop")

_NO_ENCODING = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgpack raises of a value it has nothing for; the text of such a value is written."""


class EventLogWriter(Writer):
    """Appends every event to `<work_dir>/<filename>`: what any other writer would have written of the run can be made
    from it afterwards.

        Trainer(..., writers=[ConsoleWriter(), EventLogWriter()], work_dir="runs/digits")

        eventloop replay runs/digits --to tensorboard      # or, in Python:

        from eventloop import replay
        replay("runs/digits", bus, only="scalars_logged")

    `eventloop.eventlog.format` describes the format, `read_events` reads it. A resumed run appends, and the sequence goes on; what a
    kill or a full disk left of half a record is removed first. Iterations that are run again are in the log again,
    behind another `before_run`.

    An event that cannot be encoded, as one with a tensor in it, is left out and has no number; it is counted as failed
    and named in the log. A field of any other type that msgpack does not know is its text. A text that is no UTF-8, as a
    path may be, has escapes in place of its lone surrogates: `\\udcff`.

    What was written survives a kill of the process; after `fsync_interval` seconds, and after `flush`, it survives a
    crash of the machine. Syncing has a thread of its own, so that a slow disk holds up no writing. After a write that
    failed the file ends with the last whole record.

    Args:
        filename: relative to the run's work_dir, or absolute.
        events: what to write, names or classes; "*" for every event.
        fsync_interval: seconds between a write and its sync, at most; 0 to sync each write, None for never.
        name: what reports call the writer; needed for a second one.

    Raises:
        TypeError, ValueError: an unknown event, a negative interval, or no path. When it is attached: `EventLogError`, the
            file that is there is no event log.
    """

    events: tuple[str | type[Event], ...] = ("*",)
    batch = 128

    def __init__(
        self,
        filename: str | PathLike[str] = FILE_NAME,
        *,
        events: str | type[Event] | Sequence[str | type[Event]] = "*",
        fsync_interval: float | None = 1.0,
        name: str | None = None,
    ) -> None:
        check_path("filename", filename)
        self.filename = filename
        self.events = tuple("*" if event == "*" else find_event(event) for event in several(events))
        self.fsync_interval = _check_interval(fsync_interval)
        self.name = name
        self._encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
        self._file: FileIO | None = None
        self._sync: _Sync | None = None
        self._size = self._sequence = self._rank = self._placed = 0
        self._tags: dict[type[Event], str] = {}

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        path = Path(run().work_dir, self.filename)
        if path.is_file():
            with FileIO(path) as file:
                read_header(file, path)
        return super().attach(bus, run)

    def open(self, run: Run) -> None:
        path = Path(run.work_dir, self.filename)
        self._file, (self._size, self._sequence, self._placed) = _open_log(path)
        self._rank = run.rank
        if self.fsync_interval is not None:
            _sync_directory(path.parent)  # or a new file may have its bytes after a crash, and no name
            self._sync = _Sync(self._file.fileno(), self.fsync_interval)
        self._append(self._record(time.time(), RUN_TAG, run))

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        now = time.time()
        records = []
        bad: list[BadEvent] = []
        for event in events:
            kind = type(event)
            tag = self._tags.get(kind) or self._tags.setdefault(kind, event_name(kind))
            try:
                records.append(self._record(now, tag, event))
            except Exception as error:  # of this event alone: the next one has its number
                bad.append(why_not(event, error, lambda value: self._encode(self._in_words(value))))
            else:
                self._sequence += 1
        self._append(b"".join(records))
        if bad:
            raise Unencodable(bad, of=len(events))

    def flush(self) -> None:
        if self._sync is not None:
            self._sync.now()

    def close(self) -> None:
        file, self._file = self._file, None
        sync, self._sync = self._sync, None
        if file is not None:
            try:
                if sync is not None:
                    sync.close()
            finally:
                file.close()

    def _record(self, now: float, tag: str, body: Event | Run) -> bytes:
        try:
            payload = self._encode((tag, self._sequence, now, self._rank, body))
        except _NO_ENCODING:  # one such event must not end the log
            fields = {name: self._in_words(value) for name, value in msgspec.structs.asdict(body).items()}
            payload = self._encode((tag, self._sequence, now, self._rank, fields))
        return pack(payload) + payload

    def _in_words(self, value: Any) -> Any:
        """A field, as text where msgpack has nothing for it, and with escapes in place of lone surrogates."""
        try:
            self._encode(value)
        except UnicodeEncodeError:
            value = encodable(value)
            return value if self._is_encodable(value) else escaped(str(value))
        except _NO_ENCODING:
            return escaped(str(value))
        return value

    def _is_encodable(self, value: Any) -> bool:
        try:
            self._encode(value)
        except _NO_ENCODING:
            return False
        return True

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        place = self._size + len(data)
        if due := place - self._placed >= PLACE_EVERY:
            data += place_record(place, self._sequence, time.time(), self._rank)
        try:
            write_all(self._file, data)
        except OSError:
            with suppress(OSError):  # what there was room for is half a record
                self._file.truncate(self._size)
            raise
        self._size += len(data)
        if due:
            self._placed = place
        if self._sync is not None:
            self._sync.soon()


class _Sync:
    """Syncs a file some time after it was written, on a thread of its own. An error is raised by the next call: after
    a failed sync nobody knows what is on the disk, and trying again would say that all is well.

    Args:
        interval: seconds; 0 to sync at once, on the caller's thread.
    """

    def __init__(self, descriptor: int, interval: float) -> None:
        self._descriptor = descriptor
        self._interval = interval
        self._timer: threading.Timer | None = None  # that waits
        self._syncing = threading.Lock()  # an error of the file is told once, perhaps to the timer
        self._synced = -inf  # when it was synced here, for want of a thread
        self._error: OSError | None = None

    def soon(self) -> None:
        """Sync within the interval."""
        self._raise()
        if not self._interval:
            os.fsync(self._descriptor)
        elif self._timer is None:
            self._start_timer()

    def now(self) -> None:
        """Sync."""
        with self._syncing:
            self._raise()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync for the last time."""
        if (timer := self._timer) is not None:
            timer.cancel()
            timer.join()
        self.now()

    def _start_timer(self) -> None:
        self._timer = timer = threading.Timer(self._interval, self._run)
        timer.daemon = True
        timer.name = "eventloop fsync"
        try:
            timer.start()
        except RuntimeError:  # at the interpreter's exit Python 3.12 starts none
            self._timer = None
            if (
                monotonic() - self._synced >= self._interval
            ):  # not at each write: `close` will have no time left
                os.fsync(self._descriptor)
                self._synced = monotonic()

    def _run(self) -> None:
        with self._syncing:
            self._timer = None  # first: what is written meanwhile needs another one
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _open_log(path: Path) -> tuple[FileIO, LogEnd]:
    """Open a log to append to, or make one.

    Raises:
        EventLogError: what is there is no event log.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "ab+")
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        if not size or not read_header(file, path):
            if size:
                file.truncate(0)
            write_all(file, HEADER)
            return file, LogEnd(len(HEADER), 0, len(HEADER))
        end = find_end(file, size)
        if end.offset < size:
            file.truncate(end.offset)
            logger.warning(
                "%s: the last %s bytes were no whole record and are removed: a kill or a full disk cut it short",
                path, f"{size - end.offset:,}",
            )  # fmt: skip
    except BaseException:
        file.close()
        raise
    return file, end


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_interval(interval: Any) -> float | None:
    if interval is None:
        return None
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise TypeError(f"fsync_interval must be a number of seconds or None, got {interval!r}")
    if not 0 <= interval < threading.TIMEOUT_MAX:
        raise ValueError(f"fsync_interval must be 0 seconds or more, got {interval}")
    return float(interval)
