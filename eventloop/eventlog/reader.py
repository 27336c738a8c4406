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

_FIVE = 0x95  # msgpack's array of five items
_FIXSTR, _STR8 = 0xA0, 0xD9  # msgpack's texts of up to 31 bytes, and of up to 255
NAMELESS = "without a name"
"""The key under which `EventReader.unreadable` counts records that do not begin with the name of an event."""

OnTorn = Literal["warn", "ignore", "raise"]


class TornTail(NamedTuple):
    """The end of a log that a kill or a full disk cut short."""

    offset: int
    """The end of the last complete record, in bytes."""
    size: int
    """The number of bytes after it, which are not a record."""


def find_log(run: str | PathLike[str]) -> Path:
    """Return the path of a run's event log: the given file itself, or the log in the given directory."""
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
    """An iterator over the records of a log in order, as the log is when it is opened; see `read_events`.

    A run may continue to write the log. A later reader then continues from `position` of an earlier one.
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
        self._absolute = self.path.absolute()  # the program may change its directory meanwhile
        self.run: Run | None = None
        """The facts of the run whose events are being read; None before the first event, or without facts."""
        self.left_out = 0
        """The number of events that were skipped because the argument `only` does not name them."""
        self.unknown: dict[str, int] = {}
        """The events skipped because no imported module declares them: counts by name."""
        self.unreadable: dict[str, int] = {}
        """The events skipped because their fields do not fit the class, or the class refuses their values.

        The dict has counts by name.
        """
        self.damaged = 0
        """The number of skipped bytes with a wrong checksum that are followed by complete records."""
        self.torn: TornTail | None = None
        """The bytes after the last complete record, once the reader has reached them; None without any."""
        with open(self.path, "rb") as file:
            self._size = fstat(file.fileno()).st_size
            begun = read_header(file, self.path)
        self._frames = Frames(self._size)
        self.position = max(position, len(HEADER)) if begun else 0
        """The number of bytes read so far; a later reader may begin there."""
        self._decoders: dict[bytes, Callable[[bytes], EventRecord[Event] | None]] = {}
        self._records = chain.from_iterable(self.blocks())

    def __next__(self) -> EventRecord[Event]:
        return next(self._records)

    def blocks(self) -> Iterator[list[EventRecord[Event]]]:
        """Yield the remaining records in lists, each with the records of one block of the file and one run.

        A loop over the lists saves a call per record.
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
        """Return the records of the intact frames at the begin of a block, and the end of the last one."""
        unpack, header, size, decoders = FRAME.unpack_from, FRAME.size, len(block), self._decoders
        records: list[EventRecord[Event]] = []
        at = 0
        while size - at >= header:
            mark, length, checksum = unpack(block, at)
            end = at + header + length
            payload = block[at + header : end]
            if mark != MARK_NUMBER or end > size or length < SHORTEST or crc32(payload, length) != checksum:
                break
            kind = payload[1]
            key = payload[: kind - _FIXSTR + 2 if kind < _STR8 else payload[2] + 3]  # to the tag's end
            decode = decoders.get(key) or self._new_decoder(key)
            try:
                if (record := decode(payload)) is not None:
                    records.append(record)
            except _NewRun:
                if records:
                    break
                self._begin_run(payload)
            except Exception:  # the event class runs code of its own: `__post_init__`, the type of a field
                _count(self.unreadable, _tag(key))
            at = end
        return records, at

    def _new_decoder(self, key: bytes) -> Callable[[bytes], EventRecord[Event] | None]:
        if not _has_tag(key):  # such a key may be as long as its record, so it is not kept
            return partial(_count, self.unreadable, NAMELESS)
        self._decoders[key] = self._decoder(key)
        return self._decoders[key]

    def _decoder(self, key: bytes) -> Callable[[bytes], EventRecord[Event] | None]:
        """Return a function that decodes payloads beginning with `key`, or that counts them as skipped."""
        tag = _tag(key)
        if tag == RUN_TAG:
            return _raise_new_run
        if tag.startswith("$"):  # of another version
            return _skip
        if self._only is not None and tag not in self._only:
            return self._count_skipped
        try:
            kind: Any = EventRecord[find_event(tag)]  # type: ignore[misc]
            decode: Callable[[bytes], EventRecord[Event]]
            decode = msgspec.msgpack.Decoder(kind, dec_hook=_rebuild).decode
        except Exception:  # not declared, or declared twice, or with fields that msgspec cannot decode
            return partial(_count, self.unknown, tag)
        return decode

    def _begin_run(self, payload: bytes) -> None:
        try:
            self.run = msgspec.msgpack.decode(payload, type=EventRecord[Run]).event
        except msgspec.DecodeError:
            _count(self.unreadable, RUN_TAG)

    def _count_skipped(self, payload: bytes) -> None:
        self.left_out += 1

    # --- framing -------------------------------------------------------------------------------------------

    def _block_at(self, position: int) -> bytes:
        """Read a block from the file.

        The file is opened each time, so that a reader that is not exhausted leaves no file open.
        """
        with open(self._absolute, "rb", buffering=0) as file:
            return self._frames.block_at(file, position)

    def _skip_damage(self) -> bool:
        """Skip to the next intact frame; return False if there is none, so that the rest is a torn tail."""
        with open(self._absolute, "rb", buffering=0) as file:
            found = self._frames.next_from(file, self.position + 1)
        size = (self._size if found is None else found) - self.position
        if found is None:
            self.torn = TornTail(self.position, size)
            what = f"the last {size:,} bytes are not a whole record: a kill or a full disk cut it short"
        else:
            self.damaged += size
            what = f"{size:,} bytes at {self.position:,} are damaged and skipped"
            self.position = found
        if self._on_torn == "raise":
            raise EventLogError(f"{self.path}: {what}")
        if self._on_torn == "warn":
            warnings.warn(f"{self.path}: {what}", stacklevel=4)
        return found is not None


def read_events(
    path: str | PathLike[str],
    *,
    only: str | type[Event] | Sequence[str | type[Event]] | None = None,
    on_torn: OnTorn = "warn",
) -> EventReader:
    """Return a reader of the events of a log, in the order in which they were written.

        for record in read_events("runs/digits"):
            print(record.sequence, record.event)

    Afterwards the reader has counts of skipped records: `reader.unknown`, `reader.unreadable`,
    `reader.damaged`, `reader.torn`. An event type that is declared outside of eventloop is known once its
    module is imported.

    Args:
        path: the file, or the directory of the run.
        only: names or classes of events; all others are skipped undecoded.
        on_torn: the reaction to a torn tail or damaged bytes: "warn", "ignore", or "raise".

    Raises:
        FileNotFoundError: there is no run, or no log in it.
        EventLogError: the file is not an event log, or of another version, or damaged or torn with
            `on_torn="raise"`.
        TypeError, ValueError: an unknown event, or an unknown `on_torn`.
    """
    return EventReader(path, only=only, on_torn=on_torn)


def _tags(only: str | type[Event] | Sequence[str | type[Event]] | None) -> frozenset[str] | None:
    if only is None:
        return None
    chosen = several(only)
    return None if "*" in chosen else frozenset(event_name(find_event(event)) for event in chosen)


class _NewRun(Exception):
    """Raised when a record is not an event, but holds the facts of the run whose events follow."""


def _raise_new_run(payload: object) -> None:
    raise _NewRun


def _skip(payload: object) -> None:
    """Ignore a record of a later version that is not an event."""


def _has_tag(key: bytes) -> bool:
    """Return whether the first bytes of a payload are the head of a record and a tag."""
    if len(key) < 3 or key[0] != _FIVE or not _FIXSTR < key[1] <= _STR8:
        return False
    return len(key) == (key[2] + 3 if key[1] == _STR8 else key[1] - _FIXSTR + 2)


def _tag(key: bytes) -> str:
    return key[2 if key[1] < _STR8 else 3 :].decode(errors="replace")


def _count(counts: dict[str, int], tag: str, payload: object = None) -> None:
    counts[tag] = counts.get(tag, 0) + 1


def _rebuild(kind: type, value: Any) -> Any:
    """Build a field of a type that msgspec does not know, such as `Path`, from its text."""
    return kind(value)
