"""overflow="spill": what a subscriber's queue has no room for waits in a temporary file, and comes back in order.

    bus.subscribe(slow, "after_train_iter", offload="thread")      # the default
    subscription.stats.spilled                                     # how many events took this way

Events are encoded one by one into a chunk of `CHUNK_BYTES`, and a full chunk is written with one system call, by
the thread that routes: never by the emitting one. The file is in `tempfile.gettempdir()` (the environment variable
TMPDIR chooses another place) and has no name, so that a killed process leaves nothing behind. It is a row of
segments, each closed once all of it was read; thus a subscriber that stays behind for hours does not make it grow.
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
"""What may wait for one subscriber in its file. What comes beyond is dropped, the newest first, and counted."""
SEGMENT_BYTES = 64 * 2**20
CHUNK_BYTES = 64 * 2**10
"""About 800 events of an iteration. Reading a chunk back takes half a millisecond, so it is small enough not to
hold up the loop; writing it costs 30 us."""
RETRY_SECONDS = 1.0
"""How long after a failed write the next one is tried."""


class Segment:
    """A part of the file. It is closed when nobody refers to it any more: a read under way keeps it open."""

    def __init__(self) -> None:
        self.end = 0
        self._file = tempfile.TemporaryFile(prefix="eventloop-", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # one position for reading and writing

    def append(self, data: bytes | bytearray) -> int:
        """Write `data` at the end; returns where it begins. A write that failed has added nothing.

        Raises:
            OSError: the disk is full, or the like.
        """
        with self._lock:
            self._file.seek(self.end)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            start, self.end = self.end, self.end + len(data)
        return start

    def read(self, start: int, size: int) -> bytes:
        """The bytes at a place.

        Raises:
            OSError: they cannot be read.
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
    """Some frames, in memory until they are in the file."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.size = 0
        self.count = 0
        self.kept: list[Event] = []
        self.segment: Segment | None = None
        self.start = 0


class Spill:
    """The events beyond a lane's queue, first in, first out.

    Three parties call it: who feeds the lane (`frame`, `add`, `write_out`; one at a time), the lane's own side
    (`refill`), and who ends it (`discard`, `release`). `add` and `discard` are called under the lane's lock, and
    neither encode nor touch a file; the others take it for a moment.

    Args:
        name: of the subscriber.
        capacity: of its queue, which is refilled to no more. As many events that cannot be encoded are kept in
            memory, in their places.
        lock: under which the lane keeps its account.
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

    # --- who feeds it --------------------------------------------------------------------------------------

    def frame(self, event: Event) -> bytes | None:
        """Encode an event that is about to be added. None: there is no room, and it is to be dropped."""
        if self._full is not None and not self.write_out():
            return None
        try:
            frame = self._encode(event)
        except Exception as error:
            self._tell(
                type(event),
                "%s: events %s cannot be written to a file (%s: %s). Up to %d of them wait in memory, more are "
                "dropped; give the event plain fields", self._name, event_name(type(event)),
                type(error).__name__, error, self._capacity,
            )  # fmt: skip
            frame = Frames.ELSEWHERE
            if self._kept >= self._capacity:
                return None
        if self._bytes + len(frame) > SPILL_BYTES:
            self._tell(
                "limit", "%s is %d bytes of events behind, the limit; the newest are dropped until it has caught up",
                self._name, SPILL_BYTES,
            )  # fmt: skip
            return None
        return frame

    def _encode(self, event: Event) -> bytes:
        try:
            return self._frames.encode(event)
        except UnicodeEncodeError:  # as of a path that is no UTF-8
            return self._frames.pickled(event)

    def add(self, frame: bytes, event: Event) -> None:
        """Append a frame."""
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
        """Write the chunk that is full, if there is one. False as long as that fails: it stays in memory then, and
        nothing can be added."""
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
                    "disk", "%s cannot spill to %s (%s); events beyond its queue are dropped until there is room",
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
        """Move the next events to the empty queue, decoding them; returns how many could not be read."""
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

    # --- who ends it ---------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget what waits. The file is there until `release`: closing a large one takes its time."""
        self._garbage += [*self._chunks, self._segment]
        self._chunks.clear()
        self._open = self._segment = None
        self.count = self._bytes = self._kept = 0

    def release(self) -> None:
        """Close the file of what was discarded."""
        self._garbage.clear()
