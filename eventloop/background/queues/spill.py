"""Keep the events that exceed a subscriber's queue in a temporary file (overflow="spill").

They come back in order:

    bus.subscribe(slow, "after_train_iter", offload="thread")      # the default
    subscription.stats.spilled                                     # how many events took this way

Events are encoded one by one into a chunk of `CHUNK_BYTES`, and a full chunk is written with one system call
by the thread that routes, never by the emitting one. The file is in `tempfile.gettempdir()`, which the
environment variable TMPDIR changes, and has no name, so that a killed process leaves nothing behind. It
consists of segments, each closed once all of it was read; thus it does not grow for a subscriber that stays
behind for hours.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from time import perf_counter

from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.codec import Frames

logger = logging.getLogger("eventloop")

SPILL_BYTES = 2**30
"""The largest size of one subscriber's waiting events.

Beyond it, the newest events are dropped and counted.
"""
SEGMENT_BYTES = 64 * 2**20
CHUNK_BYTES = 64 * 2**10
"""Size of about 800 events of an iteration.

Reading a chunk takes half a millisecond, short enough for the loop; writing it costs 30 us.
"""
RETRY_SECONDS = 1.0
"""How long after a failed write the next one is tried."""


class Segment:
    """A part of the file, closed when no reference is left: a read under way keeps it open."""

    def __init__(self) -> None:
        self.end = 0
        self._file = tempfile.TemporaryFile(prefix="eventloop-", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # one position for reading and writing

    def append(self, data: bytes | bytearray) -> int:
        """Write `data` at the end and return its offset; a failed write adds nothing.

        Raises:
            OSError: the data cannot be written, as to a full disk.
        """
        with self._lock:
            self._file.seek(self.end)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            start, self.end = self.end, self.end + len(data)
        return start

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from the offset `start`.

        Raises:
            OSError: the bytes cannot be read.
        """
        parts = []
        with self._lock:
            self._file.seek(start)
            while size:
                part = self._file.read(size)
                if not part:
                    raise OSError(f"a spill file ends {size} bytes early")
                parts.append(part)
                size -= len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # not where it could not be opened
            self._file.close()


class Chunk:
    """Encoded events, in memory until they are written to the file."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.size = 0
        self.count = 0
        self.kept: list[Event] = []
        self.segment: Segment | None = None
        self.start = 0


class Spill:
    """The events beyond a queue's capacity, first in, first out.

    Three parties call it: the feeding threads (`frame`, `add`, `write_out`; one at a time), the delivering
    side (`refill`), and the thread that ends the queue (`discard`, `release`). `add` and `discard` are called
    under the queue's lock, and neither encode nor touch a file; the others take the lock for a moment.

    Args:
        name: the subscriber's name.
        capacity: the capacity of its queue, which limits a refill. As many events that cannot be encoded are
            kept in memory, in their order.
        lock: guards the subscriber's account.
    """

    def __init__(self, name: str, capacity: int, lock: threading.Lock) -> None:
        self.count = 0  # events that wait
        self.total = 0  # events that ever did
        self._name = name
        self._capacity = capacity
        self._lock = lock
        self._frames = Frames()
        self._chunks: deque[Chunk] = deque()
        self._open: Chunk | None = None  # the last one, while it grows
        self._full: Chunk | None = None  # closed, and not yet in the file
        self._reading: Iterator[Event | Exception] | None = None  # what is left of the first one
        self._segment: Segment | None = None  # where the next chunk is written
        self._garbage: list[Chunk | Segment | None] = []
        self._bytes = 0
        self._kept = 0
        self._told: set[object] = set()
        self._retry_at = float("-inf")

    # --- the feeding threads -------------------------------------------------------------------------------

    def frame(self, event: Event) -> bytes | None:
        """Encode an event to be added; return None if there is no room, and the event is to be dropped."""
        if self._full is not None and not self.write_out():
            return None
        try:
            frame = self._encode(event)
        except Exception as error:
            self._tell(
                type(event),
                "%s: events %s cannot be written to a file (%s: %s). Up to %d of them wait in memory, more "
                "are dropped; give the event plain fields", self._name, event_name(type(event)),
                type(error).__name__, error, self._capacity,
            )  # fmt: skip
            frame = Frames.ELSEWHERE
            if self._kept >= self._capacity:
                return None
        if self._bytes + len(frame) > SPILL_BYTES:
            self._tell(
                "limit",
                "%s is %d bytes of events behind, the limit; the newest are dropped until it has caught up",
                self._name, SPILL_BYTES,
            )  # fmt: skip
            return None
        return frame

    def _encode(self, event: Event) -> bytes:
        try:
            return self._frames.encode(event)
        except UnicodeEncodeError:  # a path need not be UTF-8
            return self._frames.pickled(event)

    def add(self, frame: bytes, event: Event) -> None:
        """Append an encoded event."""
        chunk = self._open
        if chunk is None:
            chunk = self._open = Chunk()
            self._chunks.append(chunk)
        if frame is Frames.ELSEWHERE:
            chunk.kept.append(event)
            self._kept += 1
        chunk.data += frame
        chunk.size += len(frame)
        chunk.count += 1
        self._bytes += len(frame)
        self.count += 1
        self.total += 1
        if chunk.size >= CHUNK_BYTES:
            self._full, self._open = chunk, None

    def write_out(self) -> bool:
        """Write the full chunk, if there is one; return False if that fails.

        The chunk then stays in memory, and nothing can be added.
        """
        chunk = self._full
        if chunk is None:
            return True
        if chunk.count:  # else it was read before it was written
            if perf_counter() < self._retry_at:
                return False
            try:
                self._write(chunk)
            except OSError as error:
                self._retry_at = perf_counter() + RETRY_SECONDS
                self._tell(
                    "disk",
                    "%s cannot spill to %s (%s); events beyond its queue are dropped until there is room",
                    self._name, tempfile.gettempdir(), error,
                )  # fmt: skip
                return False
        self._full = None
        if "disk" in self._told:
            self._told.remove("disk")
            logger.info("%s can spill again", self._name)
        return True

    def _write(self, chunk: Chunk) -> None:
        segment = self._segment
        if segment is None or segment.end >= SEGMENT_BYTES:
            segment = Segment()
        start = segment.append(chunk.data)
        with self._lock:
            chunk.segment, chunk.start, chunk.data = segment, start, bytearray()
            self._segment = segment if self._chunks else None

    def _tell(self, what: object, message: str, *values: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *values)

    # --- the lane's own side -------------------------------------------------------------------------------

    def refill(self, queue: deque[Event]) -> int:
        """Decode the next events into the empty queue; return how many could not be read."""
        with self._lock:
            if not self._chunks:
                return 0
            chunk = self._chunks[0]
            if chunk is self._open:
                self._open = None
        if self._reading is None:
            self._reading = self._read(chunk)
        found = list(islice(self._reading, self._capacity))
        events = [event for event in found if not isinstance(event, Exception)]
        count = len(found) or chunk.count  # nothing: the chunk is damaged
        with self._lock:
            if not self._chunks:  # discarded meanwhile
                return 0
            self._take(chunk, count)
            queue.extend(events)
        if lost := count - len(events):
            why = next((error for error in found if isinstance(error, Exception)), "see above")
            logger.error("%s: %d events could not be read back and are dropped: %s", self._name, lost, why)
        return lost

    def _take(self, chunk: Chunk, count: int) -> None:
        chunk.count -= count
        self.count -= count
        if not chunk.count:
            self._chunks.popleft()
            self._bytes -= chunk.size
            self._kept -= len(chunk.kept)
            self._reading = None
        if not self._chunks:
            self._segment = None
            self._told.discard("limit")

    def _read(self, chunk: Chunk) -> Iterator[Event | Exception]:
        with self._lock:
            segment, data = chunk.segment, bytes(chunk.data)
        try:
            if segment is not None:
                data = segment.read(chunk.start, chunk.size)
            yield from self._frames.decode(data, chunk.kept)
        except Exception:  # the disk, or what it gave back
            logger.exception("%s cannot read its spill file", self._name)

    # --- the thread that ends it ---------------------------------------------------------------------------

    def discard(self) -> None:
        """Drop the waiting events; the file stays until `release`, because closing a large one takes time."""
        self._garbage += [*self._chunks, self._segment]
        self._chunks.clear()
        self._open = self._segment = None
        self.count = self._bytes = self._kept = 0

    def release(self) -> None:
        """Close the file of the dropped events."""
        self._garbage.clear()
