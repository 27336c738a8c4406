"""Read event logs, which `EventLogWriter` writes; `eventloop.eventlog.format` describes the format.

    for record in read_events("runs/digits"):
        print(record.sequence, record.time, record.event)

Records that the reader cannot read are skipped and counted. This module imports no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from os import PathLike, fstat
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from zlib import crc32

import msgspec

from eventloop.eventlog.format import (
    FILE_NAME,
    FRAME,
    HEADER,
    MARK_NUMBER,
    RUN_TAG,
    SHORTEST,
    EventLogError,
    EventRecord,
    read_header,
)
from eventloop.eventlog.frames import Frames
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import find_event, several
from eventloop.events.run import Run
from eventloop.util.checks import check_choice

_ARRAY_OF_5 = 0x95
"""The first byte of a msgpack array of five items."""
_FIXSTR, _STR8 = 0xA0, 0xD9
"""The first bytes of texts in msgpack: 0xA0 plus the length for up to 31 bytes, 0xD9 for up to 255 bytes.

The second form has the length in its second byte.
"""
NAMELESS = "without a name"
"""The key under which `EventReader.unreadable` counts records that do not begin with the name of an event."""

OnTorn = Literal["warn", "ignore", "raise"]
"""What follows damaged bytes or an incomplete record at the end of a log."""


class TornTail(NamedTuple):
    """The bytes at the end of a log that are no complete record, because of a kill or a full disk."""

    offset: int
    """The end of the last complete record, in bytes."""
    size: int
    """The number of bytes after the last complete record."""


def find_log(run: str | PathLike[str]) -> Path:
    """Return the path of a run's event log.

    Args:
        run: the log itself, or the directory of the run.

    Raises:
        FileNotFoundError: there is no such path, or no log in the directory.
        EventLogError: the directory has several logs.
    """
    path = Path(run)
    if not path.exists():
        raise FileNotFoundError(f"no run at {path}: give the run's directory or its {FILE_NAME}")
    if not path.is_dir():
        return path
    if (usual := path / FILE_NAME).is_file():
        return usual
    logs = sorted(path.glob("*.evl"))
    if not logs:
        raise FileNotFoundError(
            f"{path} holds no event log ({FILE_NAME}): a run writes one with writers=[EventLogWriter()]"
        )
    if len(logs) > 1:
        raise EventLogError(f"{path} holds several event logs, give one: {', '.join(p.name for p in logs)}")
    return logs[0]


class EventReader(Iterator[EventRecord[Event]]):
    """Iterate over the records that a log has when it is opened, in order.

    `read_events` describes the arguments. If a run continues to write the log, a later reader that is created
    with the `position` of this reader reads the records that follow.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        only: str | type[Event] | Sequence[str | type[Event]] | None = None,
        on_torn: OnTorn = "warn",
        position: int = 0,
    ) -> None:
        check_choice("on_torn", on_torn, get_args(OnTorn))
        self._only = _tags(only)
        self._on_torn = on_torn
        self.path = find_log(path)
        self._absolute = self.path.absolute()  # the program may change its working directory while it reads
        self.run: Run | None = None
        """The facts of the run whose events are being read; None before the first event, or without facts."""
        self.left_out = 0
        """The number of events that were skipped because the argument `only` does not name them."""
        self.unknown: dict[str, int] = {}
        """The events skipped because no imported module declares them: counts by name."""
        self.unreadable: dict[str, int] = {}
        """The events skipped because their class refuses their fields or values: counts by name."""
        self.damaged = 0
        """The number of skipped bytes that are no intact record and are followed by complete records."""
        self.torn: TornTail | None = None
        """The bytes after the last complete record, once the reader has reached them; None without any."""
        with open(self.path, "rb") as file:
            self._size = fstat(file.fileno()).st_size
            has_header = read_header(file, self.path)
        self._frames = Frames(self._size)
        self.position = max(position, len(HEADER)) if has_header else 0
        """The number of bytes read so far; a later reader may begin there."""
        self._decoders: dict[bytes, Callable[[bytes], EventRecord[Event] | None]] = {}
        self._records = chain.from_iterable(self.blocks())

    def __next__(self) -> EventRecord[Event]:
        return next(self._records)

    def blocks(self) -> Iterator[list[EventRecord[Event]]]:
        """Yield the remaining records in lists; the records of a list are of one run.

        A loop over the lists takes less time than one over the records.
        """
        while self.position < self._size:
            block = self._block_at(self.position)
            records, end = self._records_in(block)
            self.position += end
            if records:
                yield records
            if not end and not self._skip_damage():
                return

    def _records_in(self, block: bytes) -> tuple[list[EventRecord[Event]], int]:
        """Return the records of the intact frames at the begin of a block, and the end of the last frame.

        All records of a list belong to one run, so this stops before the facts of another run.
        """
        unpack, header_size, size, decoders = FRAME.unpack_from, FRAME.size, len(block), self._decoders
        records: list[EventRecord[Event]] = []
        position = 0
        while size - position >= header_size:
            mark, length, checksum = unpack(block, position)
            end = position + header_size + length
            payload = block[position + header_size : end]
            if mark != MARK_NUMBER or end > size or length < SHORTEST or crc32(payload, length) != checksum:
                break
            # Byte 0 begins the array, whose first item is the tag, the event's name. Byte 1 has the length
            # of a short name, which begins at byte 2. For a longer one byte 2 is the length.
            text_type = payload[1]
            tag_end = 2 + text_type - _FIXSTR if text_type < _STR8 else 3 + payload[2]
            key = payload[:tag_end]  # the tag with the bytes before it, by which the decoders are stored
            decode = decoders.get(key) or self._new_decoder(key)
            try:
                if (record := decode(payload)) is not None:
                    records.append(record)
            except _NewRun:
                if records:
                    break
                self._begin_run(payload)
            except Exception:  # raised by code of the event's class, such as `__post_init__`
                _count(self.unreadable, _tag(key))
            position = end
        return records, position

    def _new_decoder(self, key: bytes) -> Callable[[bytes], EventRecord[Event] | None]:
        """Return and cache the decoder of payloads that begin with `key`, the bytes up to the tag's end."""
        if not _has_tag(key):  # not cached, because such a key may be as long as its record
            return partial(_count, self.unreadable, NAMELESS)
        self._decoders[key] = self._decoder(key)
        return self._decoders[key]

    def _decoder(self, key: bytes) -> Callable[[bytes], EventRecord[Event] | None]:
        """Return a function that decodes payloads beginning with `key`, or that counts them as skipped."""
        tag = _tag(key)
        if tag == RUN_TAG:
            return _raise_new_run
        if tag.startswith("$"):  # a record of a later version that is not an event
            return _skip
        if self._only is not None and tag not in self._only:
            return self._count_skipped
        try:
            record_type: Any = EventRecord[find_event(tag)]  # type: ignore[misc]
            decode: Callable[[bytes], EventRecord[Event]]
            decode = msgspec.msgpack.Decoder(record_type, dec_hook=_rebuild).decode
        except Exception:  # the event is not declared, declared twice, or has fields that msgspec refuses
            return partial(_count, self.unknown, tag)
        return decode

    def _begin_run(self, payload: bytes) -> None:
        """Read the facts of the run whose events follow."""
        try:
            self.run = msgspec.msgpack.decode(payload, type=EventRecord[Run]).event
        except msgspec.DecodeError:
            _count(self.unreadable, RUN_TAG)

    def _count_skipped(self, payload: bytes) -> None:
        self.left_out += 1

    # --- framing -------------------------------------------------------------------------------------------

    def _block_at(self, position: int) -> bytes:
        """Read a block from the file, which is opened each time, so that no reader has it open."""
        with open(self._absolute, "rb", buffering=0) as file:
            return self._frames.block_at(file, position)

    def _skip_damage(self) -> bool:
        """Skip to the next intact frame; return False if there is none, and `torn` is set.

        Raises:
            EventLogError: `on_torn` is "raise".
        """
        with open(self._absolute, "rb", buffering=0) as file:
            next_frame = self._frames.next_from(file, self.position + 1)
        if next_frame is None:
            size = self._size - self.position
            self.torn = TornTail(self.position, size)
            text = f"the last {size:,} bytes are not a whole record: a kill or a full disk cut it short"
        else:
            size = next_frame - self.position
            self.damaged += size
            text = f"{size:,} bytes at {self.position:,} are damaged and skipped"
            self.position = next_frame
        if self._on_torn == "raise":
            raise EventLogError(f"{self.path}: {text}")
        if self._on_torn == "warn":
            warnings.warn(f"{self.path}: {text}", stacklevel=4)
        return next_frame is not None


def read_events(
    path: str | PathLike[str],
    *,
    only: str | type[Event] | Sequence[str | type[Event]] | None = None,
    on_torn: OnTorn = "warn",
) -> EventReader:
    """Return a reader of the events of a log, in the order in which they were written.

        for record in read_events("runs/digits"):
            print(record.sequence, record.event)

    Afterwards the reader has the counts of skipped records and bytes: `reader.unknown`, `reader.unreadable`,
    `reader.damaged`, `reader.torn`. An event type that is declared outside of eventloop is known once its
    module is imported.

    Args:
        path: the file, or the directory of the run.
        only: names or classes of events; all others are skipped.
        on_torn: what follows damaged bytes or an incomplete record at the end: "warn", "ignore" or "raise".

    Raises:
        FileNotFoundError: there is no run, or no log in it.
        EventLogError: the file is not an event log, has another version, or with `on_torn="raise"` is damaged
            or ends with an incomplete record.
        TypeError, ValueError: `only` has an unknown event, or `on_torn` is unknown.
    """
    return EventReader(path, only=only, on_torn=on_torn)


def _tags(only: str | type[Event] | Sequence[str | type[Event]] | None) -> frozenset[str] | None:
    """Return the names of the chosen events; None for all events."""
    if only is None:
        return None
    chosen = several(only)
    return None if "*" in chosen else frozenset(event_name(find_event(event)) for event in chosen)


class _NewRun(Exception):
    """Raised by a decoder if a record has the facts of the run whose events follow."""


def _raise_new_run(payload: object) -> None:
    raise _NewRun


def _skip(payload: object) -> None:
    """Ignore a record of a later version that is not an event."""


def _has_tag(key: bytes) -> bool:
    """Return whether the bytes `key` of a payload begin an array of five items and have the whole tag."""
    if len(key) < 3 or key[0] != _ARRAY_OF_5 or not _FIXSTR < key[1] <= _STR8:
        return False
    expected_length = 3 + key[2] if key[1] == _STR8 else 2 + key[1] - _FIXSTR
    return len(key) == expected_length


def _tag(key: bytes) -> str:
    """Return the tag, given the bytes of a payload up to the tag's end."""
    begin = 2 if key[1] < _STR8 else 3
    return key[begin:].decode(errors="replace")


def _count(counts: dict[str, int], tag: str, payload: object = None) -> None:
    """Count a record; with `counts` and `tag` bound, this is the decoder of records that are skipped."""
    counts[tag] = counts.get(tag, 0) + 1


def _rebuild(kind: type, value: Any) -> Any:
    """Build a field of a type that msgspec does not know, such as `Path`, from its text."""
    return kind(value)
