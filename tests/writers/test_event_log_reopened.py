"""A log that another run goes on with: what is whole stays, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path

import msgspec
import pytest

from eventloop import read_events
from eventloop.eventlog.format import HEADER, pack
from eventloop.eventlog.frames import BLOCK, LogEnd, find_end
from eventloop.events import Event, ImageLogged
from eventloop.writers import EventLogWriter
from tests.writers.conftest import Attach
from tests.writers.conftest import train as scalars
from tests.writers.conftest import write as emit_all

Write = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


@pytest.fixture
def write(attach: Attach) -> Write:
    """`write(*events)` is another run, which emits these events."""
    return lambda *events: emit_all(attach(EventLogWriter()), *events)


class BlobKept(Event):
    """An event of the user's own that ends with bytes."""

    data: bytes = b""


def image(data: bytes) -> Event:
    return ImageLogged(name="log", data=data, shape=(len(data),))


def blob(data: bytes) -> Event:
    return BlobKept(data=data)


def frame(*record: object) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return pack(payload) + payload


def end_of(path: Path) -> LogEnd:
    """The end at which another run goes on."""
    with FileIO(path) as file:
        return find_end(file, path.stat().st_size)


# --- what an event holds -----------------------------------------------------------------------------------

LOGS: dict[str, Callable[[bytes], bytes]] = {
    "a whole log": lambda log: log,
    "a log without its head": lambda log: log[len(HEADER) :],
    "a torn log": lambda log: log[:-5],
    "a log behind something": lambda log: bytes(1000) + log,
    "a log several times": lambda log: log * 3,
    "a mark": lambda log: log[len(HEADER) : len(HEADER) + 4],
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
    end = end_of(path)

    write(*scalars(4))

    assert whole < end.offset < path.stat().st_size
    assert [record.event for record in read_events(path)] == [*scalars(1, 2), held, *scalars(3, 4)]


# --- damage ------------------------------------------------------------------------------------------------


def test_records_of_another_version_are_skipped(write: Write, path: Path) -> None:
    """A `$` record that this version does not know is neither an event nor in the sequence."""
    write(*scalars(1))
    with path.open("ab") as file:
        file.write(frame("$place", 1, 1.5, 0, 12))

    write(*scalars(2))

    reader = read_events(path)
    assert [(record.sequence, record.event) for record in reader] == [*enumerate(scalars(1, 2))]
    assert (reader.unknown, reader.unreadable, reader.left_out, reader.damaged) == ({}, {}, 0, 0)


def test_a_mark_across_two_blocks(write: Write, path: Path) -> None:
    """The first whole record behind damaged bytes is found wherever it begins."""
    for shift in range(-4, 4):
        path.write_bytes(HEADER + bytes(BLOCK + shift) + frame("text_logged", 5, 1.5, 0, {}))
        end = end_of(path)
        assert (end.offset, end.sequence) == (path.stat().st_size, 6)
