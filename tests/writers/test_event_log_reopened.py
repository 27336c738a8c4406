"""A log that another run goes on with: what is whole stays, whatever it holds, and a long one takes no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import msgspec
import pytest

from eventloop.bus import Bus
from eventloop.eventlog.format import (
    BLOCK,
    FRAME,
    HEADER,
    PLACE_EVERY,
    LogEnd,
    find_end,
    pack,
    payload_at,
    place_record,
)
from eventloop.eventlog.reader import read_events
from eventloop.events import Event, ImageLogged, ScalarsLogged, TextLogged
from eventloop.writers.event_log_writer import EventLogWriter

Attach = Callable[..., Bus]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


@pytest.fixture
def write(attach: Attach) -> Callable[..., None]:
    """Another run, which emits these events."""

    def run(*events: Event) -> None:
        bus = attach(EventLogWriter())
        for event in events:
            bus.emit(event)
        bus.close()

    return run


Write = Callable[..., None]


class BlobKept(Event):
    """An event of the user's own that ends with bytes."""

    data: bytes = b""


def image(data: bytes) -> Event:
    return ImageLogged(name="log", data=data, shape=(len(data),))


def blob(data: bytes) -> Event:
    return BlobKept(data=data)


def scalars(*steps: int) -> list[Event]:
    return [ScalarsLogged(step=step, iter=step - 1, scalars={"loss": 1 / step}) for step in steps]


def texts(size: int) -> list[Event]:
    """Of so many bytes in all, 8 KiB each."""
    return [TextLogged(step=step, text="x" * 8192) for step in range(size // 8192)]


def frame(*record: object) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return pack(payload) + payload


def frames_of(path: Path) -> Iterator[tuple[int, str]]:
    """Offset and tag of each record of an intact log."""
    data, at = path.read_bytes(), len(HEADER)
    while (payload := payload_at(data, at)) is not None:
        yield at, msgspec.msgpack.decode(payload)[0]
        at += FRAME.size + len(payload)
    assert at == len(data)


class Counted(FileIO):
    """Knows how many bytes were read of it."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


def end_of(path: Path) -> tuple[LogEnd, int]:
    """Where it is gone on with, and how many bytes are read to find that."""
    with Counted(path) as file:
        return find_end(file, path.stat().st_size), file.count


# --- what an event holds -----------------------------------------------------------------------------------

LOGS: dict[str, Callable[[bytes], bytes]] = {
    "a whole log": lambda log: log,
    "a log without its head": lambda log: log[len(HEADER) :],
    "a torn log": lambda log: log[:-5],
    "a log behind something": lambda log: bytes(1000) + log,
    "a log several times": lambda log: log * 3,
    "a mark": lambda log: log[len(HEADER) : len(HEADER) + 4],
    "a place": lambda log: place_record(12, 900, 1.5, 0),
    "what looks like a place": lambda log: frame("$place", 900, 1.5, 0, "here"),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("event", [image, blob])
@pytest.mark.parametrize("what", LOGS)
def test_an_intact_log_is_never_changed(
    write: Write, path: Path, caplog: pytest.LogCaptureFixture, what: str, event: Callable[[bytes], Event]
) -> None:
    """Frames of another log in the payload of the last event are no records: a next run leaves that event, says
    nothing, and its sequence goes on behind it."""
    write(*scalars(1, 2, 3, 4, 5))
    other = LOGS[what](path.read_bytes())
    path.unlink()
    events = [*scalars(6), event(other)]
    write(*events)
    before = path.read_bytes()

    write(*scalars(7))

    reader = read_events(path)
    assert [(record.sequence, record.event) for record in reader] == [*enumerate([*events, *scalars(7)])]
    assert path.read_bytes().startswith(before)
    assert not caplog.records


@pytest.mark.parametrize("event", [image, blob])
def test_a_long_log_in_a_long_log(
    write: Write, path: Path, event: Callable[[bytes], Event], caplog: pytest.LogCaptureFixture
) -> None:
    """The places in the one do not lie where they say any more once it is in the other."""
    events = texts(3 * PLACE_EVERY)
    write(*events)
    events.append(event(path.read_bytes()))
    write(events[-1])
    before = path.read_bytes()
    events.append(event(before))
    write(events[-1])

    write(*scalars(1))

    assert [(record.sequence, record.event) for record in read_events(path)] == [
        *enumerate([*events, *scalars(1)])
    ]
    assert path.read_bytes().startswith(before)
    assert not caplog.records


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_torn_event_behind_one_that_holds_a_log(write: Write, path: Path, cut: int) -> None:
    """It is removed, and the one before stays."""
    write(*scalars(1, 2))
    held = image(path.read_bytes())
    write(held)
    whole = path.stat().st_size
    write(*scalars(3))
    with path.open("ab") as file:
        file.write(pack(bytes(6000)) + bytes(6000)[:-cut])
    end, _ = end_of(path)

    write(*scalars(4))

    assert whole < end.offset < path.stat().st_size
    assert [record.event for record in read_events(path)] == [*scalars(1, 2), held, *scalars(3, 4)]


# --- places ------------------------------------------------------------------------------------------------


def test_places_lie_where_they_say(write: Write, path: Path) -> None:
    """There is one in each `PLACE_EVERY` bytes, over several runs; none in a short log."""
    for _ in range(3):
        write(*texts(3 * PLACE_EVERY // 2))

    data = path.read_bytes()
    places = [at for at, tag in frames_of(path) if tag == "$place"]

    assert all(msgspec.msgpack.decode(payload_at(data, at) or b"")[4] == at for at in places)
    gaps = [b - a for a, b in zip([len(HEADER), *places], [*places, len(data)], strict=True)]
    assert all(PLACE_EVERY <= gap < PLACE_EVERY + 2 * EventLogWriter.batch * 8192 for gap in gaps[:-1])
    assert len(places) >= 2
    path.unlink()
    write(*scalars(1, 2))
    assert [tag for _, tag in frames_of(path)] == ["$run", "scalars_logged", "scalars_logged"]


def test_readers_do_not_see_places(write: Write, path: Path) -> None:
    """They are no events: none is unknown, left out, or in the sequence."""
    events = texts(3 * PLACE_EVERY)
    write(*events)
    assert "$place" in {tag for _, tag in frames_of(path)}

    for only in (None, "text_logged"):
        reader = read_events(path, only=only)
        assert [(record.sequence, record.event) for record in reader] == [*enumerate(events)]
        assert (reader.unknown, reader.unreadable, reader.left_out, reader.damaged) == ({}, {}, 0, 0)


def test_a_long_log_is_read_from_its_last_place(write: Write, path: Path) -> None:
    """What is before is not read, however much it is."""
    counts = []
    for megabytes in (4, 16):
        write(*texts(megabytes * PLACE_EVERY))
        end, count = end_of(path)
        counts.append(count)
        assert end.offset == path.stat().st_size

    assert end.sequence == 20 * PLACE_EVERY // 8192
    assert max(counts) < 5 * PLACE_EVERY  # to the place and back again; a batch of these events is a MiB too


@pytest.mark.parametrize("shift", range(FRAME.size + 12))
def test_a_place_is_found_anywhere(path: Path, shift: int) -> None:
    """Also across two of the stretches it is looked for in, and before what only looks like one."""
    first = frame("text_logged", 0, 1.5, 0, {})
    at = len(HEADER) + len(first)
    place, false = place_record(at, 1, 1.5, 0), place_record(len(HEADER), 9, 1.5, 0)
    around = len(frame("blob_kept", 1, 1.5, 0, {"data": bytes(BLOCK)})) - BLOCK
    data = bytes(PLACE_EVERY + shift - len(place) - around - len(false)) + false
    path.write_bytes(HEADER + first + place + frame("blob_kept", 1, 1.5, 0, {"data": data}))

    end, _ = end_of(path)

    assert end == (at + shift + PLACE_EVERY, 2, at)


def test_a_log_without_places_is_read_whole_once(write: Write, path: Path) -> None:
    """One that was written by hand, say; the next run leaves a place at its own beginning."""
    log = bytearray(HEADER)
    for sequence, event in enumerate(texts(8 * PLACE_EVERY)):
        log += frame("text_logged", sequence, 1.5, 0, msgspec.structs.asdict(event))
    path.write_bytes(log)
    assert end_of(path)[0] == (len(log), 1024, len(HEADER))

    write(*scalars(1))

    end, count = end_of(path)
    assert (end.offset, end.sequence) == (path.stat().st_size, 1025)
    assert count < 2 * PLACE_EVERY


def test_a_log_that_ends_anywhere_in_a_place(write: Write, path: Path) -> None:
    """It is a torn record as any other, and the sequence does not notice."""
    write(*texts(PLACE_EVERY + 2 * 8192))
    data = path.read_bytes()
    (start,) = (at for at, tag in frames_of(path) if tag == "$place")
    rest = data[start:]
    length = FRAME.size + FRAME.unpack_from(rest)[1]
    before = sum(tag == "text_logged" for at, tag in frames_of(path) if at < start)

    for cut in range(length + 1):
        path.write_bytes(data[: start + cut])
        end, _ = end_of(path)
        assert end.offset == start + (length if cut == length else 0)
        assert (end.sequence, end.place) == (before, start if cut == length else len(HEADER))


@pytest.mark.parametrize("where", ["before the place", "the place", "behind the place"])
def test_damage_is_not_the_end(write: Write, path: Path, where: str) -> None:
    """No run removes the records behind damaged bytes, wherever these are."""
    write(*texts(2 * PLACE_EVERY))
    write(*scalars(1, 2, 3))
    data = bytearray(path.read_bytes())
    offsets = [(at, tag) for at, tag in frames_of(path)]
    place = max(at for at, tag in offsets if tag == "$place")
    hit = {
        "before the place": max(at for at, tag in offsets if at < place),
        "the place": place,
        "behind the place": min(at for at, tag in offsets if tag == "scalars_logged"),
    }[where]
    data[hit + 20] ^= 0x10
    path.write_bytes(data)

    write(*scalars(4))

    assert path.read_bytes().startswith(data)
    sequence = [record.sequence for record in read_events(path, on_torn="ignore")]
    assert sequence[-1] == 2 * PLACE_EVERY // 8192 + 3
    assert len(sequence) == sequence[-1] + 1 - (where != "the place")


def test_a_mark_across_two_blocks(write: Write, path: Path) -> None:
    """The first whole record behind damaged bytes is found wherever it begins."""
    for shift in range(-4, 4):
        path.write_bytes(HEADER + bytes(BLOCK + shift) + frame("text_logged", 5, 1.5, 0, {}))
        end, _ = end_of(path)
        assert (end.offset, end.sequence) == (path.stat().st_size, 6)
