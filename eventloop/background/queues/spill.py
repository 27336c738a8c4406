"""Store the events that exceed a subscriber's queue in temporary files (overflow="spill").

They are delivered later in their order:

    bus.subscribe(slow, "after_train_iter", offload="thread")      # the default
    subscription.stats.spilled                                     # the number of events stored in files

Events are encoded one by one and written in chunks, never by the emitting thread. One file is written while
another one is read. At the end of the latter, the written file is read next, and a new file is written.
So no file grows forever if a subscriber stays behind for hours. The files are in `tempfile.gettempdir()`,
which the environment variable TMPDIR changes. They have no name, so that a killed process leaves no file.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice
from time import perf_counter
from typing import IO

from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.codec import Frames

logger = logging.getLogger("eventloop")

SPILL_BYTES = 2**30
"""The largest number of bytes of one subscriber's stored events; further events are dropped and counted."""
CHUNK_BYTES = 64 * 2**10
"""The number of bytes that are written together, about 800 events of an iteration, which takes 30 us."""
RETRY_SECONDS = 1.0
"""The seconds after a failed write until the next attempt."""


class SpillFile:
    """A temporary file of encoded events in chunks: written completely, then read from the start."""

    def __init__(self) -> None:
        self.tail = bytearray()  # encoded events that are not in the file yet
        self.sizes: list[int] = []  # the numbers of bytes of the chunks in the file
        self.kept: list[Event] = []  # the events that cannot be encoded, which stay in memory
        self.bytes = 0  # the number of bytes of all encoded events, with those in `tail`
        self._file: IO[bytes] | None = None

    def write_tail(self) -> None:
        """Write the encoded events in `tail` to the file as one chunk, and clear `tail`.

        Raises:
            OSError: there is no room on the disk, or no file can be opened; `tail` is unchanged.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="eventloop-", buffering=0)  # noqa: SIM115
        self._file.seek(sum(self.sizes))
        remaining = memoryview(bytes(self.tail))
        while remaining:
            remaining = remaining[self._file.write(remaining) :]
        self.sizes.append(len(self.tail))
        self.tail.clear()

    def close(self) -> None:
        """Close the temporary file, which frees its disk space."""
        if self._file is not None:
            self._file.close()

    def chunks(self) -> Iterator[bytes]:
        """Yield the chunks in the file in order, then `tail`, which is not in the file; close the file.

        Raises:
            OSError: the file is shorter than the chunks that were written.
        """
        if self._file is not None:
            with self._file:
                self._file.seek(0)
                for size in self.sizes:
                    chunk = self._file.read(size)
                    if len(chunk) < size:
                        raise OSError(f"a spill file ends {size - len(chunk)} bytes early")
                    yield chunk
        yield bytes(self.tail)


class Spill:
    """Store the events beyond a queue's capacity in files, and return them in order.

    At a time one thread adds events and one thread reads them.

    Args:
        name: the subscriber's name.
        kept: the largest number of events that are kept in memory because they cannot be encoded.
    """

    def __init__(self, name: str, kept: int) -> None:
        self.count = 0  # the number of events that are stored now
        self.total = 0  # the number of events that were ever stored
        self._name = name
        self._most_kept = kept
        self._frames = Frames()
        self._lock = threading.Lock()
        self._written = SpillFile()
        self._read: Generator[Event | Exception] | None = None
        self._read_count = 0  # the number of events that are left in the file that is being read
        self._read_bytes = 0  # the size of the file that is being read
        self._warned: set[object] = set()  # the problems that were logged
        self._retry_at = float("-inf")  # the time of the next write after a failed one

    def add(self, event: Event) -> bool:
        """Append an event; return False if there is no room for it."""
        try:
            frame = self._encode(event)
        except Exception as error:
            self._warn_once(
                type(event),
                "%s: events %s cannot be written to a file (%s: %s). Up to %d of them wait in memory, more "
                "are dropped; give the event plain fields",
                self._name,
                event_name(type(event)),
                type(error).__name__,
                error,
                self._most_kept,
            )
            frame = Frames.ELSEWHERE
        with self._lock:
            file = self._written
            if not self._has_room(file, frame):
                return False
            if frame is Frames.ELSEWHERE:
                file.kept.append(event)
            file.tail += frame
            file.bytes += len(frame)
            self.count += 1
            self.total += 1
        return True

    def _encode(self, event: Event) -> bytes:
        """Encode an event for a file; pickle one whose text is no valid Unicode."""
        try:
            return self._frames.encode(event)
        except UnicodeEncodeError:  # a text has lone surrogates, such as a path that is not UTF-8
            return self._frames.pickled(event)

    def _has_room(self, file: SpillFile, frame: bytes) -> bool:
        """Return whether a frame may be added, and write the frames in memory if they fill a chunk."""
        if frame is Frames.ELSEWHERE and len(file.kept) >= self._most_kept:
            return False
        if file.bytes + self._read_bytes + len(frame) > SPILL_BYTES:
            self._warn_once(
                "limit",
                "%s is %d bytes of events behind, the limit; the newest are dropped until it has caught up",
                self._name,
                SPILL_BYTES,
            )
            return False
        return len(file.tail) < CHUNK_BYTES or self._write(file)

    def _write(self, file: SpillFile) -> bool:
        """Write a chunk; return False, and log the error once, if the disk has no room."""
        if perf_counter() < self._retry_at:
            return False
        try:
            file.write_tail()
        except OSError as error:
            self._retry_at = perf_counter() + RETRY_SECONDS
            self._warn_once(
                "disk",
                "%s cannot spill to %s (%s); events beyond its queue are dropped until there is room",
                self._name,
                tempfile.gettempdir(),
                error,
            )
            return False
        if "disk" in self._warned:
            self._warned.remove("disk")
            logger.info("%s can spill again", self._name)
        return True

    def _warn_once(self, problem: object, message: str, *values: object) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning(message, *values)

    def read(self, most: int) -> tuple[list[Event], int]:
        """Remove and return at most `most` events, and the number of events that could not be read back."""
        if self._read is None:
            with self._lock:
                file, self._written = self._written, SpillFile()
                self._read_count, self._read_bytes = self.count, file.bytes
            self._warned.discard("limit")
            self._read = self._decode(file)
        results = list(islice(self._read, most))
        events = [result for result in results if not isinstance(result, Exception)]
        # fewer results than requested: the file is at its end, and all events that it should have are removed
        removed = len(results) if len(results) == most else self._read_count
        with self._lock:
            removed = min(removed, self._read_count)  # 0 if another thread has called `discard` meanwhile
            self.count -= removed
            self._read_count -= removed
            if not self._read_count:
                self._read, self._read_bytes = None, 0
        if lost := removed - len(events):
            reason = next((result for result in results if isinstance(result, Exception)), "see above")
            logger.error("%s: %d events could not be read back and are dropped: %s", self._name, lost, reason)
        return events, lost

    def _decode(self, file: SpillFile) -> Generator[Event | Exception]:
        """Yield the events of a file, or an exception for an event that cannot be decoded."""
        kept_events = iter(file.kept)
        try:
            for chunk in file.chunks():
                yield from self._frames.decode(chunk, kept_events)
        except Exception:  # an error of the disk, or damaged data
            logger.exception("%s cannot read its spill file", self._name)

    def discard(self) -> None:
        """Drop the stored events, and close the files."""
        with self._lock:
            read, written = self._read, self._written
            self._written, self._read = SpillFile(), None
            self.count = self._read_count = self._read_bytes = 0
        written.close()
        if read is not None:
            with suppress(ValueError):  # another thread is reading the file, and closes it at its end
                read.close()
