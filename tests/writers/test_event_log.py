"""EventLogWriter and read_events: every event comes back, whatever happened to the file or to the classes."""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.eventlog.format import BLOCK, HEADER, MAGIC, EventLogError, pack
from eventloop.eventlog.reader import read_events
from eventloop.events import (
    AfterTrainIter,
    AfterValEpoch,
    BeforeTrain,
    CheckpointSaved,
    Event,
    ImageLogged,
    ScalarsLogged,
)
from eventloop.events.run import Run
from eventloop.writers import event_log_writer
from eventloop.writers.event_log_writer import EventLogWriter
from tests import no_threads
from tests.conftest import DEADLINE

Attach = Callable[..., Bus]
Account = Callable[[Bus], SubscriptionStats]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


def write(bus: Bus, *events: Event) -> None:
    for event in events:
        bus.emit(event)
    bus.close()


def scalars(*steps: int) -> list[Event]:
    return [ScalarsLogged(step=step, iter=step - 1, scalars={"loss": 1 / step}) for step in steps]


def steps_of(path: Path, **options: Any) -> list[int]:
    return [record.event.step for record in read_events(path, **options)]  # type: ignore[attr-defined]


def append(path: Path, tag: str, **fields: Any) -> None:
    """A record as another version of eventloop, or somebody's own event, would have left it."""
    payload = msgspec.msgpack.encode([tag, 99, 1.5, 0, {"event": tag, **fields}])
    with path.open("ab") as file:
        file.write(pack(payload) + payload)


# --- what is kept -----------------------------------------------------------------------------------------


def test_every_event_is_kept_in_order(attach: Attach, path: Path) -> None:
    """Whatever is emitted is read again, equal, in the order of the emits, background-born or not."""
    events: list[Event] = [
        BeforeTrain(max_epochs=3), AfterTrainIter(iter=0, batch_idx=0), *scalars(1),
        ImageLogged(name="cat", data=bytes(range(256)), shape=(16, 16, 1)), AfterValEpoch(metrics={"accuracy": 0.5}),
        CheckpointSaved(path="a/b", bytes=12, seconds=0.5), AfterTrainIter(iter=1, batch_idx=1),
    ]  # fmt: skip

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, -0.0, 5e-324, 1.7976931348623157e308])
def test_every_float_survives(attach: Attach, path: Path, value: float) -> None:
    """What is read is bit for bit what was written: a diverged run is readable."""
    write(attach(EventLogWriter()), ScalarsLogged(scalars={"loss": value}))

    (record,) = read_events(path)
    assert isinstance(record.event, ScalarsLogged)
    assert struct.pack("d", record.event.scalars["loss"]) == struct.pack("d", value)


def test_numpy_numbers_are_numbers(attach: Attach, path: Path) -> None:
    """A handwritten event with numpy's scalars comes back with Python's."""
    logged: dict[str, Any] = {"half": np.float32(0.5), "three": np.int64(3)}
    write(attach(EventLogWriter()), ScalarsLogged(scalars=logged))

    (record,) = read_events(path)
    assert record.event == ScalarsLogged(scalars={"half": 0.5, "three": 3.0})


class FolderFilled(Event):
    """An event of the user's own, with a type that msgpack does not know."""

    folder: Path
    size: int = 0


def test_an_event_of_the_users_own_comes_back(attach: Attach, path: Path) -> None:
    """A field of another type is written as text, and made of it again."""
    write(attach(EventLogWriter()), FolderFilled(folder=Path("a/b"), size=3))

    assert [record.event for record in read_events(path)] == [FolderFilled(folder=Path("a/b"), size=3)]


def test_an_event_that_cannot_be_encoded_does_not_end_the_log(attach: Attach, path: Path) -> None:
    """A number that msgpack has no room for is a text; readers count that event, and go on."""
    write(attach(EventLogWriter()), *scalars(1), FolderFilled(folder=Path("a"), size=2**70), *scalars(2))

    reader = read_events(path)
    assert [record.sequence for record in reader] == [0, 2]
    assert reader.unreadable == {"folder_filled": 1}


def test_only_chosen_events_are_written(attach: Attach, path: Path) -> None:
    """`events` keeps large ones out."""
    write(attach(EventLogWriter(events="scalars_logged")), *scalars(1), ImageLogged(data=b"x"), *scalars(2))

    assert steps_of(path) == [1, 2]


def test_flush_makes_events_visible(attach: Attach, path: Path) -> None:
    """A log can be read while the run goes on; the reader ends where the log ended when it was opened."""
    bus = attach(EventLogWriter())
    bus.emit(scalars(1)[0])
    bus.flush()
    reader = read_events(path)
    bus.emit(scalars(2)[0])
    bus.flush()

    assert [record.sequence for record in reader] == [0]
    assert steps_of(path) == [1, 2]


def test_a_resumed_run_appends(attach: Attach, path: Path) -> None:
    """The sequence goes on, also over a run of which nothing but its beginning is there; each run has its facts."""
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


# --- readers of another version ---------------------------------------------------------------------------


def test_an_unknown_event_is_skipped_and_counted(attach: Attach, path: Path) -> None:
    """What nothing imported declares does not end the reading."""
    write(attach(EventLogWriter()), *scalars(1))
    append(path, "of_a_plugin", size=1)
    append(path, "of_a_plugin", size=2)
    append(path, "an_event_whose_name_takes_more_than_31_letters")
    write(attach(EventLogWriter()), *scalars(2))

    reader = read_events(path)

    assert [record.event for record in reader] == scalars(1, 2)
    assert reader.unknown == {"of_a_plugin": 2, "an_event_whose_name_takes_more_than_31_letters": 1}


def test_fields_may_come_and_go(attach: Attach, path: Path) -> None:
    """A field that was not written has its default, one that is not declared any more is ignored."""
    path.write_bytes(HEADER)
    append(path, "scalars_logged", step=5, color="red", scalars={"loss": 1})

    (record,) = read_events(path)
    assert record.event == ScalarsLogged(step=5, scalars={"loss": 1.0})


def test_an_event_with_other_fields_is_counted(attach: Attach, path: Path) -> None:
    """Fields of another type, or required ones that are missing, make the event unreadable and no other."""
    write(attach(EventLogWriter()), *scalars(1))
    append(path, "scalars_logged", step="five")
    append(path, "folder_filled")

    reader = read_events(path)

    assert [record.event for record in reader] == scalars(1)
    assert reader.unreadable == {"scalars_logged": 1, "folder_filled": 1}


class Measured(Event):
    """An event whose class has its own opinion of its values."""

    length: int = 0
    unit: Unit | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise RuntimeError("on purpose")


class Unit:
    """A type that msgpack does not know, and that not every text makes."""

    SIZES: ClassVar[dict[str, float]] = {"m": 1.0}

    def __init__(self, name: str) -> None:
        self.size = self.SIZES[name]


def test_an_event_that_its_class_refuses_is_counted(attach: Attach, path: Path) -> None:
    """Whatever its `__post_init__`, or what makes its fields, raises: the event is unreadable, and no other."""
    write(attach(EventLogWriter()), *scalars(1))
    append(path, "measured", length=-1)
    append(path, "measured", unit="yd")
    append(path, "measured", length=2, unit="m")

    reader = read_events(path)
    records = list(reader)

    assert [record.tag for record in records] == ["scalars_logged", "measured"]
    assert reader.unreadable == {"measured": 2}


class TypedNowhere(Event):
    """An event with a type that nobody can find at run time."""

    value: math.nowhere | None = None  # type: ignore[name-defined]


def test_an_event_with_a_type_that_is_nowhere_is_counted(attach: Attach, path: Path) -> None:
    """Nobody can decode it, as if nothing declared it."""
    write(attach(EventLogWriter()), *scalars(1), TypedNowhere(), *scalars(2))

    reader = read_events(path)

    assert [record.event for record in reader] == scalars(1, 2)
    assert reader.unknown == {"typed_nowhere": 1}


def test_only_reads_some_events(attach: Attach, path: Path) -> None:
    """By name or class; what is left out is not decoded, and counted."""
    write(attach(EventLogWriter()), BeforeTrain(), *scalars(1), AfterTrainIter(), AfterValEpoch())

    reader = read_events(path, only=["scalars_logged", AfterValEpoch])

    assert [record.event for record in reader] == [*scalars(1), AfterValEpoch()]
    assert reader.left_out == 2


# --- what a kill leaves -----------------------------------------------------------------------------------


def test_a_log_that_ends_anywhere_is_read_to_its_last_whole_record(attach: Attach, path: Path) -> None:
    """Whatever byte a kill cut the last record at, everything before is there, and the tail is reported."""
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


def test_a_torn_tail_is_removed_and_the_sequence_goes_on(
    attach: Attach, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run cuts the log back to its last whole record, and says so."""
    write(attach(EventLogWriter()), *scalars(1, 2, 3))
    os.truncate(path, path.stat().st_size - 5)

    with caplog.at_level(logging.WARNING, "eventloop"):
        write(attach(EventLogWriter()), *scalars(4))

    reader = read_events(path)
    assert [(record.sequence, record.event) for record in reader] == list(enumerate(scalars(1, 2, 4)))
    assert (reader.torn, reader.damaged) == (None, 0)
    assert "an incomplete record and are removed" in caplog.text


def test_a_tail_of_zeros_is_torn(attach: Attach, path: Path) -> None:
    """What a crash of the machine may leave: a file that is longer than what reached the disk."""
    write(attach(EventLogWriter()), *scalars(1))
    with path.open("ab") as file:
        file.write(bytes(3 * BLOCK))

    with pytest.warns(
        UserWarning, match=r"events\.evl: the last 196,608 bytes are .*record: a kill or a full"
    ):
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
    """A flipped bit anywhere in a record loses that record and no other; it is reported, and no run removes what is
    behind it."""
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
        assert steps_of(path) == [1, 3, 4]


def test_events_larger_than_a_block(attach: Attach, path: Path) -> None:
    """Records may be of any size, before, between and behind small ones, torn or not."""
    image = ImageLogged(name="cat", data=os.urandom(3 * BLOCK), shape=(BLOCK, 3, 1))
    events = [image, *scalars(1), image, *scalars(2), image]
    write(attach(EventLogWriter()), *events)

    assert [record.event for record in read_events(path)] == events

    os.truncate(path, path.stat().st_size - BLOCK)
    write(attach(EventLogWriter()), *scalars(3))
    assert [record.event for record in read_events(path)] == [*events[:-1], *scalars(3)]


def test_on_torn_raise(attach: Attach, path: Path) -> None:
    """Who wants to know of a torn log gets an error in the place of a warning."""
    write(attach(EventLogWriter()), *scalars(1, 2))
    os.truncate(path, path.stat().st_size - 1)
    reader = read_events(path, on_torn="raise")

    assert next(reader).event == scalars(1)[0]
    with pytest.raises(EventLogError, match="bytes are not a whole record: a kill"):
        next(reader)


def test_a_reader_that_is_left_keeps_no_file_open(attach: Attach, path: Path) -> None:
    """Breaking off needs no closing; a ResourceWarning would be an error here."""
    write(attach(EventLogWriter()), *scalars(1, 2))

    before = len(os.listdir("/proc/self/fd"))
    reader = read_events(path)
    next(reader)
    assert len(os.listdir("/proc/self/fd")) == before


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"step,loss\n1,0.5\n", MAGIC.replace(b"\r\n", b"\n") + b"1234", b"x"])
def test_another_file_is_refused_and_kept(attach: Attach, path: Path, content: bytes) -> None:
    """When the writer is attached, and so at the line that built the Trainer."""
    path.write_bytes(content)

    with pytest.raises(EventLogError, match=r"events\.evl is not an event log: expected it to begin with"):
        attach(EventLogWriter())
    with pytest.raises(EventLogError, match=r"events\.evl is not an event log"):
        read_events(path)

    assert path.read_bytes() == content


def test_a_file_that_appears_later_is_refused_too(attach: Attach, account: Account, path: Path) -> None:
    """Then the writer fails where everybody sees it."""
    bus = attach(EventLogWriter())
    path.write_text("something else")

    write(bus, *scalars(1))

    assert "is not an event log" in account(bus).error
    assert path.read_text() == "something else"


def test_a_newer_version_is_refused(attach: Attach, path: Path) -> None:
    """Nobody guesses at a format."""
    path.write_bytes(MAGIC + struct.pack("<I", 2))

    with pytest.raises(EventLogError, match="of version 2, and this eventloop reads version 1"):
        read_events(path)
    with pytest.raises(EventLogError, match="of version 2"):
        attach(EventLogWriter())


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


def test_bad_options_are_refused(path: Path) -> None:
    """At the line that made them."""
    with pytest.raises(ValueError, match="unknown event 'scalars_loged': did you mean 'scalars_logged'"):
        EventLogWriter(events="scalars_loged")
    with pytest.raises(ValueError, match="unknown event 'scalars_loged': did you mean 'scalars_logged'"):
        read_events(path, only="scalars_loged")
    with pytest.raises(ValueError, match="unknown on_torn 'rais': did you mean 'raise'"):
        read_events(path, on_torn="rais")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fsync_interval must be a number of seconds or None, got '1'"):
        EventLogWriter(fsync_interval="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fsync_interval must be 0 seconds or more, got -1"):
        EventLogWriter(fsync_interval=-1)


# --- syncing ----------------------------------------------------------------------------------------------


class Synced:
    """Stands for `os.fsync`: counts the calls for the log, and knows its size at the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = self.calls = 0
        self.called = threading.Event()
        self.error: OSError | None = None
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self._fsync(descriptor)
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            self.calls += 1
            self.size = os.fstat(descriptor).st_size
            self.called.set()
            if self.error is not None:
                raise self.error


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    return Synced(monkeypatch)


def test_a_write_is_synced_within_the_interval(attach: Attach, path: Path, synced: Synced) -> None:
    """Also when no other event follows; and what was written since is synced by close."""
    bus = attach(EventLogWriter(fsync_interval=0.01))
    bus.emit(scalars(1)[0])

    assert synced.called.wait(DEADLINE)
    bus.close()

    assert synced.size == path.stat().st_size


def test_flush_syncs(attach: Attach, path: Path, synced: Synced) -> None:
    """What was flushed survives a crash of the machine, however long the interval is."""
    bus = attach(EventLogWriter(fsync_interval=3600))
    bus.emit(scalars(1)[0])
    bus.flush()

    assert synced.size == path.stat().st_size


def test_interval_zero_syncs_each_write(attach: Attach, path: Path, synced: Synced) -> None:
    """For who would rather wait than lose anything."""
    write(attach(EventLogWriter(fsync_interval=0)), *scalars(*range(1, EventLogWriter.batch + 2)))

    assert synced.calls >= 3  # the facts of the run, two pieces, and the close
    assert synced.size == path.stat().st_size


def test_interval_none_never_syncs(attach: Attach, synced: Synced) -> None:
    """For scratch runs on slow disks."""
    write(attach(EventLogWriter(fsync_interval=None)), *scalars(1))

    assert synced.calls == 0


def test_without_a_thread_writes_sync_themselves(
    path: Path, synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be started: one write in each interval, so that a slow disk holds up the others no more than it
    must; and the close."""
    no_threads.refuse(monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(event_log_writer, "monotonic", lambda: now[0])
    writer = EventLogWriter(fsync_interval=10.0)
    writer.open(Run(work_dir=str(path.parent)))
    calls = []
    for now[0] in (1001.0, 1009.0, 1010.0, 1011.0):
        writer.write_batch(scalars(1))
        calls.append(synced.calls)
    writer.close()

    assert calls == [1, 1, 2, 2]
    assert (synced.calls, synced.size) == (3, path.stat().st_size)


class FailingSync:
    """Stands for `os.fsync`: the first one on the writer's own thread waits until it is let go, and fails; no other does."""

    def __init__(self) -> None:
        self.began, self._fails = threading.Event(), threading.Event()

    def __call__(self, descriptor: int) -> None:
        if threading.current_thread().name == "eventloop fsync" and not self.began.is_set():
            self.began.set()
            assert self._fails.wait(DEADLINE)
            raise OSError(5, "Input/output error")

    def beside_a_close(self, writer: EventLogWriter) -> list[str]:
        """Let it fail while the writer is being closed; the errors that the close raised."""
        errors: list[str] = []

        def close() -> None:
            try:
                writer.close()
            except OSError as error:
                errors.append(str(error))

        closing = threading.Thread(target=close)
        closing.start()
        closing.join(0.05)  # one that does not wait is over by then
        self._fails.set()
        closing.join(DEADLINE)
        return errors


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingSync:
    failing = FailingSync()
    monkeypatch.setattr(os, "fsync", failing)
    return failing


@pytest.fixture
def syncing(path: Path, failing: FailingSync) -> EventLogWriter:
    """A writer that is at a sync which is going to fail."""
    writer = EventLogWriter(fsync_interval=0.001)
    writer.open(Run(work_dir=str(path.parent)))
    writer.write_batch(scalars(1))
    assert failing.began.wait(DEADLINE)
    return writer


def test_a_sync_that_fails_beside_a_close_is_told(failing: FailingSync, syncing: EventLogWriter) -> None:
    """A close waits for the one under way: the system tells an error of the file once, to whoever syncs it first."""
    assert failing.beside_a_close(syncing) == ["[Errno 5] Input/output error"]


def test_a_sync_that_outlasts_its_interval_is_told_when_it_fails(
    failing: FailingSync, syncing: EventLogWriter
) -> None:
    """A close waits for it also where something was written since, whose own sync waits for its turn."""
    for _ in range(3):
        syncing.write_batch(scalars(1))
    threads = [thread for thread in threading.enumerate() if thread.name == "eventloop fsync"]

    assert failing.beside_a_close(syncing) == ["[Errno 5] Input/output error"]
    assert len(threads) <= 2


def test_a_failed_sync_is_no_secret(attach: Attach, account: Account, synced: Synced) -> None:
    """It ends the writer at the next write: what is on the disk nobody knows."""
    synced.error = OSError(5, "Input/output error")
    bus = attach(EventLogWriter(fsync_interval=0.001))
    bus.emit(scalars(1)[0])
    assert synced.called.wait(DEADLINE)

    while not account(bus).failed:
        bus.emit(scalars(2)[0])
        bus.flush()

    assert "Input/output error" in account(bus).error
