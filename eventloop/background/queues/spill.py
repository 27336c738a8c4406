"""Keep the events that exceed a subscriber's queue in temporary files (overflow="spill").

They come back in order:

    bus.subscribe(slow, "after_train_iter", offload="thread")      # the default
    subscription.stats.spilled                                     # how many events took this way

Events are encoded one by one and written in chunks, never by the emitting thread. There are two files: one is
written while the other is read, and when it is read to its end they change places. So neither grows for ever
for a subscriber that stays behind for hours. The files are in `tempfile.gettempdir()`, which the environment
variable TMPDIR changes, and have no name: a killed process leaves nothing behind.
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
"""The largest size of one subscriber's waiting events; beyond it the newest are dropped and counted."""
CHUNK_BYTES = 64 * 2**10
"""Bytes that are written together, about 800 events of an iteration: writing them costs 30 us."""
RETRY_SECONDS = 1.0
"""How long after a failed write the next one is tried."""


class SpillFile:
    """Chunks of encoded events: written to its end, then read from its begin."""

    def __init__(self) -> None:
        self.tail = bytearray()  # not in the file yet
        self.sizes: list[int] = []  # of the chunks in the file
        self.kept: list[Event] = []  # those that cannot be encoded
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
        """Give the file back to the disk."""
        if self._file is not None:
            self._file.close()

    def chunks(self) -> Iterator[bytes]:
        """Read the chunks in order, and close the file."""
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
    """The events beyond a queue's capacity, first in, first out.

    One thread at a time adds and one reads; the reader waits for neither a write nor another reader.

    Args:
        name: the subscriber's name.
        kept: how many events that cannot be encoded wait in memory; more are dropped.
    """

    def __init__(self, name: str, kept: int) -> None:
        self.count = 0  # events that wait
        self.total = 0  # events that ever did
        self._name = name
        self._most_kept = kept
        self._frames = Frames()
        self._lock = threading.Lock()
        self._written = SpillFile()
        self._read: Generator[Event | Exception] | None = None
        self._read_count = 0  # events left in the file that is read
        self._read_bytes = 0
        self._told: set[object] = set()
        self._retry_at = float("-inf")

    def add(self, event: Event) -> bool:
        """Append an event; return False if there is no room, and the event is to be dropped."""
        try:
            frame = self._encode(event)
        except Exception as error:
            self._tell(
                type(event),
                "%s: events %s cannot be written to a file (%s: %s). Up to %d of them wait in memory, more "
                "are dropped; give the event plain fields", self._name, event_name(type(event)),
                type(error).__name__, error, self._most_kept,
            )  # fmt: skip
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
            self._tell(
                "limit",
                "%s is %d bytes of events behind, the limit; the newest are dropped until it has caught up",
                self._name, SPILL_BYTES,
            )  # fmt: skip
            return False
        return len(file.tail) < CHUNK_BYTES or self._write(file)

    def _write(self, file: SpillFile) -> bool:
        if perf_counter() < self._retry_at:
            return False
        try:
            file.write_tail()
        except OSError as error:
            self._retry_at = perf_counter() + RETRY_SECONDS
            self._tell(
                "disk",
                "%s cannot spill to %s (%s); events beyond its queue are dropped until there is room",
                self._name, tempfile.gettempdir(), error,
            )  # fmt: skip
            return False
        if "disk" in self._told:
            self._told.remove("disk")
            logger.info("%s can spill again", self._name)
        return True

    def _tell(self, what: object, message: str, *values: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *values)

    def read(self, most: int) -> tuple[list[Event], int]:
        """Remove the next events, at most `most`; return them, and how many could not be read back."""
        if self._read is None:
            with self._lock:
                file, self._written = self._written, SpillFile()
                self._read_count, self._read_bytes = self.count, file.bytes
            self._told.discard("limit")
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
        except Exception:  # the disk, or what it gave back
            logger.exception("%s cannot read its spill file", self._name)

    def discard(self) -> None:
        """Drop the waiting events, and close the files."""
        with self._lock:
            read, written = self._read, self._written
            self._written, self._read = SpillFile(), None
            self.count = self._read_count = self._read_bytes = 0
        written.close()
        if read is not None:
            with suppress(ValueError):  # the subscriber is reading from it, and closes it at the end
                read.close()
