"""Store the events that exceed a subscriber's queue in temporary files (overflow="spill").

They are delivered later in their order:

    bus.subscribe(slow, "after_train_iter", offload="thread")      # the default
    subscription.stats.spilled                                     # the number of events stored in files

Events are encoded one by one and written in chunks, never by the emitting thread. There are two files. One is
written while the other is read, and they swap when the second one is read to its end. So neither file grows
forever if a subscriber stays behind for hours. The files are in `tempfile.gettempdir()`, which the
environment variable TMPDIR changes, and have no name: a killed process leaves nothing behind.
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
"""The largest size of one subscriber's stored events; further events are dropped and counted."""
CHUNK_BYTES = 64 * 2**10
"""The number of bytes that are written together, about 800 events of an iteration: writing takes 30 us."""
RETRY_SECONDS = 1.0
"""The seconds after a failed write until the next attempt."""


class SpillFile:
    """A temporary file of encoded events in chunks: written completely, then read from the start."""

    def __init__(self) -> None:
        self.tail = bytearray()  # not in the file yet
        self.sizes: list[int] = []  # sizes of the chunks in the file
        self.kept: list[Event] = []  # events that cannot be encoded
        self.bytes = 0
        self._file: IO[bytes] | None = None

    def write_tail(self) -> None:
        """Write the encoded events that are collected in `tail` to the file, as one chunk.

        Raises:
            OSError: there is no room on the disk, or no file can be opened; `tail` stays as it was.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="eventloop-", buffering=0)  # noqa: SIM115
        self._file.seek(sum(self.sizes))
        left = memoryview(bytes(self.tail))
        while left:
            left = left[self._file.write(left) :]
        self.sizes.append(len(self.tail))
        self.tail.clear()

    def close(self) -> None:
        """Close the temporary file, which frees its disk space."""
        if self._file is not None:
            self._file.close()

    def chunks(self) -> Iterator[bytes]:
        """Yield the chunks in order, and close the file."""
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

    One thread at a time adds and one reads. The reader waits neither for a write nor for another reader.

    Args:
        name: the subscriber's name.
        kept: the largest number of events that are kept in memory because they cannot be encoded.
    """

    def __init__(self, name: str, kept: int) -> None:
        self.count = 0  # stored events
        self.total = 0  # events stored so far, including those read again
        self._name = name
        self._most_kept = kept
        self._frames = Frames()
        self._lock = threading.Lock()
        self._written = SpillFile()
        self._read: Generator[Event | Exception] | None = None
        self._read_count = 0  # events left in the file being read
        self._read_bytes = 0
        self._warned: set[object] = set()
        self._retry_at = float("-inf")

    def add(self, event: Event) -> bool:
        """Append an event; return False without appending it if there is no room."""
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
        try:
            return self._frames.encode(event)
        except UnicodeEncodeError:  # a path need not be UTF-8
            return self._frames.pickled(event)

    def _has_room(self, file: SpillFile, frame: bytes) -> bool:
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

    def _warn_once(self, what: object, message: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(message, *values)

    def read(self, most: int) -> tuple[list[Event], int]:
        """Remove the next events, at most `most`; return them, and the number that could not be read back."""
        if self._read is None:
            with self._lock:
                file, self._written = self._written, SpillFile()
                self._read_count, self._read_bytes = self.count, file.bytes
            self._warned.discard("limit")
            self._read = self._decode(file)
        found = list(islice(self._read, most))
        events = [event for event in found if not isinstance(event, Exception)]
        gone = len(found) if len(found) == most else self._read_count  # a file that ends early loses the rest
        with self._lock:
            gone = min(gone, self._read_count)
            self.count -= gone
            self._read_count -= gone
            if not self._read_count:
                self._read, self._read_bytes = None, 0
        if lost := gone - len(events):
            why = next((error for error in found if isinstance(error, Exception)), "see above")
            logger.error("%s: %d events could not be read back and are dropped: %s", self._name, lost, why)
        return events, lost

    def _decode(self, file: SpillFile) -> Generator[Event | Exception]:
        kept = iter(file.kept)
        try:
            for chunk in file.chunks():
                yield from self._frames.decode(chunk, kept)
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
            with suppress(ValueError):  # the subscriber is reading from it, and closes it when done
                read.close()
