"""replay: a run's events again, onto a bus or into writers."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop import read_events, replay
from eventloop.bus import Bus
from eventloop.eventlog.format import HEADER, MARK, EventLogError
from eventloop.events import AfterValEpoch, Event, ImageLogged, ScalarsLogged, Timed
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter, TensorBoardWriter, TimedWriter, Writer
from tests.conftest import DEADLINE, Held
from tests.eventlog.conftest import EVENTS, Record


class Kept(Writer):
    """Notes how it is driven."""

    events: tuple[str | type[Event], ...] = (ScalarsLogged, AfterValEpoch)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, run: Run) -> None:
        self.calls.append(run)

    def write(self, event: Event) -> None:
        self.calls.append(event)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class Everything(Kept):
    """Takes every event, several at once."""

    events = ("*",)
    batch: bool | int = True

    def write_batch(self, events: list[Event]) -> None:
        self.calls.append(events)


# --- a bus ------------------------------------------------------------------------------------------------


def test_a_bus_hears_the_run_again(record: Record, bus: Bus) -> None:
    """Sync handlers in the order of the run, and background ones all of it, background-born events too. Filters count as
    in the run; who takes a trainer is given None, as there is none any more."""
    heard: list[Event] = []
    in_background: list[Event] = []
    given: list[Any] = []
    bus.subscribe(heard.append, "*")
    bus.subscribe(in_background.append, "*", offload="thread")
    bus.subscribe(lambda trainer, event: given.append((trainer, event.iter)), "after_train_iter", every=2)

    report = replay(record(), bus)

    assert heard == [event for event in EVENTS if not isinstance(event, ScalarsLogged)]
    assert in_background == EVENTS
    assert given == [(None, 1)]
    assert (report.emitted, report.left_out, report.torn) == (6, 0, None)


def test_only_names_events(record: Record, bus: Bus) -> None:
    """By name or class; the others are counted. A bus captures a replay, too, and keeps the latest events."""
    heard: list[Event] = []
    bus.subscribe(heard.append, "*", offload="thread")

    with bus.capture("scalars_logged") as captured:
        report = replay(record() / "events.evl", bus, only=("scalars_logged", AfterValEpoch))

    assert captured == [event for event in EVENTS if isinstance(event, ScalarsLogged)]
    assert (bus.latest(ScalarsLogged), bus.latest(AfterValEpoch)) == (EVENTS[4], EVENTS[5])

    assert heard == [EVENTS[2], *EVENTS[4:]]
    assert (report.emitted, report.left_out) == (3, 3)
    assert str(report) == "3 events replayed; 3 of kinds that `only` does not name"


def test_a_long_replay_overflows_no_queue(record: Record, bus: Bus) -> None:
    """However slow a subscriber is, one with a queue of 256 gets everything."""
    events = [ScalarsLogged(step=step) for step in range(600)]
    heard: list[Event] = []
    bus.subscribe(heard.append, "scalars_logged", offload="thread", queue=256, overflow="drop_oldest")

    replay(record(events), bus)

    assert heard == events


def test_a_log_can_be_replayed_onto_the_bus_that_writes_it(record: Record, bus: Bus) -> None:
    """The replay ends where the log ended when it began."""
    directory = record()
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(directory)))

    assert replay(directory, bus).emitted == len(EVENTS)

    assert [r.event for r in read_events(directory)] == EVENTS * 2


def test_an_error_of_a_handler_is_raised(record: Record, bus: Bus) -> None:
    """As on any emit, with its note; one in the background where it was asked for, although nobody trains."""
    directory = record()
    divide = bus.subscribe(lambda event: 1 // 0, "after_val_epoch", name="divide")
    with pytest.raises(ZeroDivisionError) as caught:
        replay(directory, bus)
    assert "divide" in "\n".join(caught.value.__notes__)

    def fail(event: Event) -> None:
        raise ValueError("no luck")

    divide.cancel()
    bus.subscribe(fail, "before_train", offload="thread", on_error="raise")
    with pytest.raises(ValueError, match="no luck"):
        replay(directory, bus)


def test_a_bus_that_is_closed_meanwhile_ends_it(record: Record, bus: Bus, held: Held) -> None:
    """With what nobody was given, which it does not wait for."""

    def close() -> None:
        held.entered.wait(DEADLINE)
        bus.close(0.05)

    bus.subscribe(held, "scalars_logged", offload="thread", name="held")
    directory = record([ScalarsLogged(step=1)])
    closing = threading.Thread(target=close)
    closing.start()

    expected = "replay ends after 1 events, because the bus was closed meanwhile; not delivered: held (1)"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        replay(directory, bus)
    closing.join(DEADLINE)


def test_a_handler_that_closes_the_bus_ends_it(record: Record, bus: Bus) -> None:
    """What comes later in the log nobody would be given."""
    bus.subscribe(lambda event: bus.close() and None, "after_train_iter", name="closes")
    heard: list[Event] = []
    bus.subscribe(heard.append, "*", offload="thread")

    with pytest.raises(RuntimeError, match=r"replay ends after 2 events, .*delivered: none"):
        replay(record(), bus)

    assert heard[0] == EVENTS[0]


# --- writers ----------------------------------------------------------------------------------------------


def test_a_writer_is_opened_driven_flushed_and_closed(record: Record) -> None:
    """With the facts of the run, its own events, and a directory beside the run's own files."""
    writer = Kept()
    directory = record(max_epochs=2, iters_per_epoch=7)

    report = replay(directory, writer)

    run = Run(work_dir=str(directory / "replay"), max_epochs=2, iters_per_epoch=7)
    assert writer.calls == [run, EVENTS[2], *EVENTS[4:], "flush", "close"]
    assert (report.emitted, report.left_out) == (3, 3)
    assert (directory / "replay").is_dir()


def test_several_writers_are_driven_at_once(record: Record, tmp_path: Path) -> None:
    """Each gets what it takes; one that takes batches gets batches, and is given none of a resumed run with those
    of the run before."""
    some, everything = Kept(), Everything()
    record()

    report = replay(record(start_iter=2), [some, everything], work_dir=tmp_path / "again")

    assert everything.calls[1:] == [EVENTS, EVENTS, "flush", "close"]
    assert some.calls[1:-2] == [EVENTS[2], *EVENTS[4:]] * 2
    assert some.calls[0] == Run(work_dir=str(tmp_path / "again"))
    assert (report.emitted, report.left_out) == (12, 0)


def test_a_log_without_facts_is_replayed(record: Record) -> None:
    """What the first event says is what the writer is told."""
    directory = record([])
    log = directory / "events.evl"
    EventLogWriter(log).close()
    with Bus() as bus:
        EventLogWriter().attach(bus, lambda: Run(work_dir=str(directory)))
        bus.emit(ScalarsLogged(step=1, max_iters=9))
    data = log.read_bytes()
    log.write_bytes(HEADER + data[data.index(MARK, len(HEADER) + 1) :])
    writer = Kept()

    replay(directory, writer)

    assert writer.calls[0] == Run(work_dir=str(directory / "replay"), max_iters=9)


def test_a_writer_of_batches_is_given_no_larger_ones(record: Record) -> None:
    """Lists of at most as many events as it says, all of them, in order; large events one by one, as a batch holds no more
    than a block of the file."""

    class Batches(Everything):
        batch = 2

    batches, images = Batches(), Everything()
    large: list[Event] = [ImageLogged(data=bytes(200_000), shape=(200_000,)) for _ in range(5)]

    replay(record(), batches)
    replay(record(large), images)

    given = batches.calls[1:-2]
    assert [event for batch in given for event in batch] == EVENTS
    assert max(map(len, given)) == 2
    assert [len(batch) for batch in images.calls[1:-2]] == [6, *[1] * 5]


def test_a_writer_that_takes_times_gets_those_of_the_log(record: Record, tmp_path: Path) -> None:
    """TensorBoard's wall times are those of the training, however much later the replay is."""
    folder = record()

    replay(folder, TensorBoardWriter(log_dir=tmp_path / "curves"))

    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    logged = [each.time for each in read_events(folder) if isinstance(each.event, ScalarsLogged)]
    assert [point.wall_time for point in curves.Scalars("train/loss")] == logged


def test_a_writer_that_takes_times_is_given_no_larger_batches(record: Record) -> None:
    """`batch` limits the events of a call in a replay, too."""
    sizes: list[int] = []

    class Pairs(TimedWriter):
        events = ("*",)
        batch = 2

        def write_timed(self, events: list[Timed]) -> None:
            sizes.append(len(events))

    replay(record(), Pairs())

    assert sizes == [2, 2, 2]


def test_a_writer_that_overrides_write_gets_events_without_times(record: Record, tmp_path: Path) -> None:
    """So does a subclass of a writer that takes times, in a run as in a replay."""
    seen: list[Event] = []

    class Noting(TensorBoardWriter):
        def write(self, event: Event) -> None:
            seen.append(event)

    folder = record()
    replay(folder, Noting(log_dir=tmp_path / "curves"))
    with Bus() as bus:
        Noting(log_dir=tmp_path / "more").attach(bus, lambda: Run(work_dir=str(tmp_path)))
        bus.emit(EVENTS[2])

    assert [type(event) for event in seen].count(ScalarsLogged) == 3


def test_a_writers_error_is_raised_after_it_was_closed(record: Record) -> None:
    """Nobody has to look for it in an account."""

    class Faulty(Kept):
        def write(self, event: Event) -> None:
            raise OSError(28, "No space left on device")

    writer = Faulty()

    with pytest.raises(OSError, match="No space left on device"):
        replay(record(), writer)

    assert writer.calls[1:] == ["close"]


# --- what is reported and refused -------------------------------------------------------------------------


def test_a_torn_tail_is_reported(record: Record, bus: Bus) -> None:
    """Everything before it is replayed; a warning, nothing, or an error, as one likes."""
    directory = record()
    log = directory / "events.evl"
    os.truncate(log, log.stat().st_size - 3)

    with pytest.warns(UserWarning, match="bytes are not a whole record"):
        report = replay(directory, bus)
    assert report.emitted == 5
    assert report.torn is not None
    assert str(report).endswith(f"the last {report.torn.size} bytes are a torn record")
    assert replay(directory, bus, on_torn="ignore") == report
    with pytest.raises(EventLogError, match="bytes are not a whole record"):
        replay(directory, bus, on_torn="raise")


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        (Kept, {}, TypeError, "replay drives a Bus, a writer or several writers, got <class"),
        (["jsonl"], {}, TypeError, "replay drives a Bus, a writer or several writers, got 'jsonl'"),
        ([], {}, ValueError, "replay needs a bus or at least one writer, got none"),
        (Bus(), {"work_dir": "x"}, ValueError, "work_dir is for writers that replay opens"),
        (
            Bus(),
            {"only": "scalars_loged"},
            ValueError,
            "unknown event 'scalars_loged': did you mean 'scalars_logged'",
        ),
    ],
)
def test_what_cannot_be_replayed_onto_is_refused(
    target: Any, options: dict[str, Any], error: type[Exception], message: str, record: Record
) -> None:
    """Before anything is emitted."""
    with pytest.raises(error, match=message):
        replay(record(), target, **options)


def test_a_closed_bus_is_refused(record: Record, bus: Bus) -> None:
    """It would deliver nothing."""
    bus.close()

    with pytest.raises(RuntimeError, match="the bus is closed and delivers no more: replay onto a new one"):
        replay(record(), bus)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import eventloop.eventlog.replay"])
def test_replay_is_the_function_whatever_was_imported_before(before: str, python: Callable[..., Any]) -> None:
    """`from eventloop import replay` is the function of the module, which has the rest."""
    ran = python(
        f"{before}\nimport eventloop\nfrom eventloop import replay\n"
        "from eventloop.eventlog import replay as module\nprint(replay is module.replay is eventloop.replay)"
    )

    assert (ran.stdout, ran.stderr) == ("True\n", "")
