"""EventLogWriter and read_events: every event comes back, whatever happened to the file or to the classes."""

from __future__ import annotations

import logging
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from eventloop import read_events
from eventloop.eventlog.format import HEADER, MAGIC, EventLogError, pack
from eventloop.eventlog.frames import BLOCK
from eventloop.events import (
    AfterTrainIter,
    AfterValEpoch,
    BeforeTrain,
    CheckpointSaved,
    Event,
    ImageLogged,
    ScalarsLogged,
)
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter
from tests.writers.conftest import Account, Attach, emit, write
from tests.writers.conftest import train as scalars


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


def steps_of(path: Path, **options: Any) -> list[int]:
    return [record.event.step for record in read_events(path, **options)]  # type: ignore[attr-defined]


def append(path: Path, tag: str, **fields: Any) -> None:
    """A record as another version of eventloop, or a user's own event, would have left it."""
    payload = msgspec.msgpack.encode([tag, 99, 1.5, 0, {"event": tag, **fields}])
    with path.open("ab") as file:
        file.write(pack(payload) + payload)


# --- what is kept -----------------------------------------------------------------------------------------


class FolderFilled(Event):
    """An event of the user's own, with a type that msgpack does not know."""

    folder: Path
    size: int = 0


def test_every_event_is_kept_in_order(attach: Attach, path: Path) -> None:
    """All events are read again, equal, in the order of the emits; a field of another type is written as text, and
    converted back."""
    events: list[Event] = [
        BeforeTrain(max_epochs=3),
        AfterTrainIter(iter=0, batch_idx=0),
        *scalars(1),
        ImageLogged(name="cat", data=bytes(range(256)), shape=(16, 16, 1)),
        AfterValEpoch(metrics={"accuracy": 0.5}),
        CheckpointSaved(path="a/b", bytes=12, seconds=0.5),
        FolderFilled(folder=Path("a/b"), size=3),
    ]

    write(attach(EventLogWriter()), *events)

    assert [record.event for record in read_events(path)] == events


def test_a_record_has_sequence_time_and_rank(attach: Attach, path: Path) -> None:
    """The sequence counts from 0, the time is the wall clock's, the rank the writing process's."""
    before = time.time()
    write(attach(EventLogWriter(), rank=3), *scalars(*range(1, 2 * EventLogWriter.batch + 10)))

    records = list(read_events(path))

    assert [record.sequence for record in records] == list(range(2 * EventLogWriter.batch + 9))
    assert before <= records[0].time <= records[-1].time <= time.time()
    assert {record.rank for record in records} == {3}
    assert {record.tag for record in records} == {"scalars_logged"}


def test_only_chosen_events_are_written(attach: Attach, path: Path) -> None:
    """`events` keeps large ones out."""
    write(attach(EventLogWriter(events="scalars_logged")), *scalars(1), ImageLogged(data=b"x"), *scalars(2))

    assert steps_of(path) == [1, 2]


def test_flush_makes_events_visible(attach: Attach, path: Path) -> None:
    """A log can be read while the run goes on; the reader ends where the log ended when it was opened."""
    bus = attach(EventLogWriter())
    emit(bus, *scalars(1))
    reader = read_events(path)
    emit(bus, *scalars(2))

    assert [record.sequence for record in reader] == [0]
    assert steps_of(path) == [1, 2]


def test_a_resumed_run_appends(attach: Attach, path: Path) -> None:
    """The sequence goes on, also after a run that wrote only its beginning; each run has its facts."""
    write(attach(EventLogWriter(), iters_per_epoch=7), *scalars(1, 2))
    killed = EventLogWriter()
    killed.open(Run(work_dir=str(path.parent)))
    killed.close()
    write(attach(EventLogWriter(), start_iter=2), *scalars(3))

    reader = read_events(path)
    runs = [
        (record.sequence, reader.run and (reader.run.start_iter, reader.run.iters_per_epoch))
        for record in reader
    ]
    assert runs == [(0, (0, 7)), (1, (0, 7)), (2, (2, None))]


def test_two_that_write_one_log_continue_each_other(path: Path) -> None:
    """Each event gets a number of its own, and is behind the facts of its run."""
    writers = [EventLogWriter(fsync_seconds=None), EventLogWriter(fsync_seconds=None)]
    begun = threading.Barrier(2)

    def write_steps(writer: EventLogWriter, start: int) -> None:
        writer.open(Run(work_dir=str(path.parent), start_iter=start))
        begun.wait()
        for step in range(start, start + 200):
            writer.write_timed([Timed(0.0, ScalarsLogged(step=step, mode="train", scalars={}))])
        writer.close()

    with ThreadPoolExecutor(2) as threads:
        for done in [
            threads.submit(write_steps, writer, 1_000 * number) for number, writer in enumerate(writers)
        ]:
            done.result()

    reader = read_events(path, only=ScalarsLogged)
    starts = [(record.sequence, reader.run and reader.run.start_iter) for record in reader]
    steps = steps_of(path)
    assert [sequence for sequence, _ in starts] == [*range(400)]
    assert sorted(steps) == [*range(200), *range(1_000, 1_200)]
    assert [start for _, start in starts] == [step // 1_000 * 1_000 for step in steps]


# --- readers of another version ---------------------------------------------------------------------------


class Unit:
    """A type that msgpack does not know, and that not every text makes."""

    SIZES: ClassVar[dict[str, float]] = {"m": 1.0}

    def __init__(self, name: str) -> None:
        self.size = self.SIZES[name]


class Measured(Event):
    """An event whose class refuses some values."""

    length: int = 0
    unit: Unit | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise RuntimeError("on purpose")


class TypedNowhere(Event):
    """An event with a type that does not exist at run time."""

    value: math.nowhere | None = None  # type: ignore[name-defined]


LONG = "an_event_whose_name_takes_more_than_31_letters"


@pytest.mark.parametrize(
    ("records", "unknown", "unreadable"),
    [
        ([("of_a_plugin", {"size": 1}), ("of_a_plugin", {}), (LONG, {})], {"of_a_plugin": 2, LONG: 1}, {}),
        ([("typed_nowhere", {})], {"typed_nowhere": 1}, {}),
        (
            [("scalars_logged", {"step": "five"}), ("folder_filled", {})],
            {},
            {"scalars_logged": 1, "folder_filled": 1},
        ),
        ([("folder_filled", {"folder": "a", "size": str(2**70)})], {}, {"folder_filled": 1}),
        ([("measured", {"length": -1}), ("measured", {"unit": "yd"})], {}, {"measured": 2}),
    ],
    ids=["of no class", "of no type", "of other fields", "too large", "refused by its class"],
)
def test_an_event_that_cannot_be_decoded_is_counted(
    attach: Attach, path: Path, records: list[tuple[str, Any]], unknown: object, unreadable: object
) -> None:
    """It is skipped, and the reading goes on."""
    write(attach(EventLogWriter()), *scalars(1))
    for tag, fields in records:
        append(path, tag, **fields)
    write(attach(EventLogWriter()), *scalars(2))

    reader = read_events(path)

    assert [record.event for record in reader] == scalars(1, 2)
    assert (reader.unknown, reader.unreadable) == (unknown, unreadable)


def test_fields_may_come_and_go(attach: Attach, path: Path) -> None:
    """A field that was not written has its default, one that is not declared any more is ignored."""
    path.write_bytes(HEADER)
    append(path, "scalars_logged", step=5, color="red", scalars={"loss": 1})
    append(path, "measured", length=2, unit="m")

    scalar, measured = read_events(path)
    assert scalar.event == ScalarsLogged(step=5, scalars={"loss": 1.0})
    assert (measured.event.length, measured.event.unit.size) == (2, 1.0)  # type: ignore[attr-defined]


def test_only_reads_some_events(attach: Attach, path: Path) -> None:
    """By name or class; other events are not decoded, and counted."""
    write(attach(EventLogWriter()), BeforeTrain(), *scalars(1), AfterTrainIter(), AfterValEpoch())

    reader = read_events(path, only=["scalars_logged", AfterValEpoch])

    assert [record.event for record in reader] == [*scalars(1), AfterValEpoch()]
    assert reader.left_out == 2


# --- what a kill leaves -----------------------------------------------------------------------------------


def test_a_log_that_ends_anywhere_is_read_to_its_last_whole_record(attach: Attach, path: Path) -> None:
    """At whatever byte a kill cut the last record, everything before is there, and the tail is reported."""
    write(attach(EventLogWriter()), *scalars(1, 2))
    whole = path.stat().st_size
    write(attach(EventLogWriter(events="*")), *scalars(3))
    data = path.read_bytes()
    start = data.rindex(b"\xc1evl")

    for cut in range(start + 1, len(data)):
        path.write_bytes(data[:cut])
        reader = read_events(path, on_torn="ignore")
        assert [record.event for record in reader] == scalars(1, 2)
        assert reader.torn == (start, cut - start)
    assert start > whole  # the facts of the second run lie between
    reader = read_events(path, on_torn="raise")
    assert [next(reader).event, next(reader).event] == scalars(1, 2)
    with pytest.raises(EventLogError, match="bytes are not a whole record: a kill"):
        next(reader)


def test_a_torn_tail_is_removed_and_the_sequence_goes_on(
    attach: Attach, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run cuts the log back to its last whole record, with a warning."""
    write(attach(EventLogWriter()), *scalars(1, 2, 3))
    os.truncate(path, path.stat().st_size - 5)

    with caplog.at_level(logging.WARNING, "eventloop"):
        write(attach(EventLogWriter()), *scalars(4))

    reader = read_events(path)
    assert [(record.sequence, record.event) for record in reader] == list(enumerate(scalars(1, 2, 4)))
    assert (reader.torn, reader.damaged) == (None, 0)
    assert "an incomplete record and are removed" in caplog.text


def test_a_tail_of_zeros_is_torn(attach: Attach, path: Path) -> None:
    """A crash of the machine may leave a file that is longer than the data that reached the disk."""
    write(attach(EventLogWriter()), *scalars(1))
    with path.open("ab") as file:
        file.write(bytes(3 * BLOCK))

    with pytest.warns(UserWarning, match=r"events\.evl: the last 196,608 bytes .*record: a kill or a full"):
        assert steps_of(path) == [1]
    write(attach(EventLogWriter()), *scalars(2))
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("cut", range(len(HEADER)))
def test_a_torn_header_is_begun_again(attach: Attach, path: Path, cut: int) -> None:
    """A log whose writer was killed in its first write is a new one."""
    path.write_bytes(HEADER[:cut])
    reader = read_events(path, on_torn="ignore")
    assert list(reader) == []
    assert reader.torn == ((0, cut) if cut else None)

    write(attach(EventLogWriter()), *scalars(1))

    assert steps_of(path) == [1]


def test_damage_costs_the_records_it_hit(attach: Attach, path: Path) -> None:
    """A flipped bit anywhere in a record loses that record alone; it is reported, and no run removes the records behind
    it."""
    write(attach(EventLogWriter()), *scalars(1, 2, 3))
    data = path.read_bytes()
    starts = [i for i in range(len(data)) if data.startswith(b"\xc1evl", i)]

    for at in range(starts[2], starts[3]):  # the facts of the run are the first record
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        reader = read_events(path, on_torn="ignore")
        assert [record.event for record in reader] == scalars(1, 3)
        assert (reader.damaged, reader.torn) == (starts[3] - starts[2], None)
    write(attach(EventLogWriter()), *scalars(4))
    with pytest.warns(UserWarning, match=rf"\d+ bytes at {starts[2]} are damaged"):
        assert [(record.sequence, record.event) for record in read_events(path)] == [
            (0, scalars(1)[0]),
            (2, scalars(3)[0]),
            (3, scalars(4)[0]),
        ]


def test_events_larger_than_a_block(attach: Attach, path: Path) -> None:
    """Records may be of any size, before, between and behind small ones, torn or not."""
    image = ImageLogged(name="cat", data=os.urandom(3 * BLOCK), shape=(BLOCK, 3, 1))
    events = [image, *scalars(1), image, *scalars(2), image]
    write(attach(EventLogWriter()), *events)

    assert [record.event for record in read_events(path)] == events

    os.truncate(path, path.stat().st_size - BLOCK)
    write(attach(EventLogWriter()), *scalars(3))
    assert [record.event for record in read_events(path)] == [*events[:-1], *scalars(3)]


def test_a_reader_that_is_left_keeps_no_file_open(attach: Attach, path: Path) -> None:
    """Breaking off needs no closing; a ResourceWarning would be an error here."""
    write(attach(EventLogWriter()), *scalars(1, 2))

    before = len(os.listdir("/proc/self/fd"))
    reader = read_events(path)
    next(reader)
    assert len(os.listdir("/proc/self/fd")) == before


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\n1,0.5\n", r"events\.evl is not an event log: expected it to begin with"),
        (MAGIC.replace(b"\r\n", b"\n") + b"1234", r"events\.evl is not an event log: expected"),
        (b"x", r"events\.evl is not an event log: expected"),
        (MAGIC + struct.pack("<I", 2), "of version 2, and this eventloop reads version 1"),
    ],
)
def test_another_file_is_refused_and_kept(
    attach: Attach, account: Account, path: Path, content: bytes, message: str
) -> None:
    """The writer refuses it when it is attached, or, if the file appears later, fails with the same error."""
    early = attach(EventLogWriter())
    path.write_bytes(content)

    with pytest.raises(EventLogError, match=message):
        attach(EventLogWriter())
    with pytest.raises(EventLogError, match=message):
        read_events(path)
    write(early, *scalars(1))

    assert re.search(message, account(early).error)
    assert path.read_bytes() == content


def test_no_log_is_named(tmp_path: Path) -> None:
    """A run's directory stands for the log in it, also for one of another name where that is the only one."""
    with pytest.raises(
        FileNotFoundError, match=r"no run at .*nowhere: give the run's directory or its events\.evl"
    ):
        read_events(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no event log \(events\.evl\): a run writes one with"):
        read_events(tmp_path)
    (tmp_path / "a.evl").write_bytes(HEADER)
    assert list(read_events(tmp_path)) == []
    (tmp_path / "b.evl").write_bytes(HEADER)
    with pytest.raises(EventLogError, match=r"holds several event logs, give one: a\.evl, b\.evl"):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: EventLogWriter(events="scalars_loged"), ValueError, "'scalars_loged': did you mean"),
        (lambda path: read_events(path, only="scalars_loged"), ValueError, "'scalars_loged': did you mean"),
        (
            lambda path: read_events(path, on_torn="rais"),  # type: ignore[arg-type]
            ValueError,
            "on_torn must be 'warn' or 'ignore' or 'raise', got 'rais': did you mean 'raise'",
        ),
        (
            lambda path: EventLogWriter(fsync_seconds="1"),  # type: ignore[arg-type]
            TypeError,
            "fsync_seconds must be a number of seconds, got '1'",
        ),
        (
            lambda path: EventLogWriter(fsync_seconds=-1),
            ValueError,
            "fsync_seconds must be at least 0 seconds, got -1",
        ),
    ],
)
def test_bad_options_are_refused(
    path: Path, make: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    """The constructor, and `read_events` itself, raise."""
    with pytest.raises(error, match=message):
        make(path)
