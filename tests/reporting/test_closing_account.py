"""What a run says at its end of what was not delivered: all of it, once, and nothing that was."""

from __future__ import annotations

import re
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eventloop import replay
from eventloop.background import closing
from eventloop.bus import Bus
from eventloop.eventlog.redelivery import find_undelivered
from eventloop.events import BeforeRun, Event, EventsDropped, HandlerFailed, StopRequested
from eventloop.events.run import Run
from eventloop.util.text import UnavailableError
from eventloop.writers import EventLogWriter, Writer
from tests.support.internals import substitute
from tests.support.trainers import MakeTrainer, Stuck, batches


class Kept(Writer):
    """Keeps in memory what it is given."""

    events = ("*",)

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def write(self, event: Event) -> None:
        self.seen.append(event)


class Fails(Writer):
    """Fails at its first event, and is given no more."""

    events = ("*",)

    def __init__(self, error: str = "disk full") -> None:
        self._why = error

    def write(self, event: Event) -> None:
        raise OSError(self._why)


class Away(Writer):
    """A writer whose server is away."""

    def write(self, event: Event) -> None:
        raise UnavailableError("no route to the server")


ENDS = {
    False: (
        "not everything was delivered in time",
        "What is left when the program ends is kept for `eventloop replay .*`",
    ),
    True: (r"closed after 0\.1 s; events left undelivered", "`eventloop replay .*` says how to deliver them"),
}
"""The begin and the end of the line about a writer that hangs, by whether the run failed."""


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_who_was_given_everything_is_not_named(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The reports of another's failure and drops reach the other writers before the run ends, and leave none of them in
    the summary."""
    kept = Kept()
    trainer = make_trainer(writers=[EventLogWriter(), kept, Fails()], default_hooks={"checkpoint": None})
    trainer.train()
    losses = trainer.summary().partition("not everything was delivered:")[2].split("\n")
    (failed,) = (event for event in kept.seen if isinstance(event, HandlerFailed))
    dropped = [event for event in kept.seen if isinstance(event, EventsDropped)]

    assert [line.split(":")[0].strip() for line in losses if line.strip()] == ["Fails"]
    assert (failed.handler, {event.handler for event in dropped}) == ("Fails", {"Fails"})
    (line,) = warnings_of(caplog)
    # told in parts when the run is slow; the reports themselves are dropped, too, and not reported
    total = sum(event.count for event in dropped) + len(dropped)
    assert line.startswith(f"not everything was delivered: Fails: {total} dropped, 1 failed")


@pytest.mark.parametrize("late", [False, True])
def test_what_the_run_told_its_close_does_not_repeat(
    late: bool, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said twice; what is lost after the run is told, in the line of every bus."""
    trainer = make_trainer(writers=[Fails()], default_hooks={"checkpoint": None})
    trainer.train()
    told = len(warnings_of(caplog))
    if late:
        trainer.bus.emit(StopRequested(reason="late"))
    trainer.close()

    assert told == 1
    if not late:
        assert len(warnings_of(caplog)) == told
        return
    (line,) = warnings_of(caplog)[told:]
    assert line.startswith("the bus is closed, and not everything was delivered: Fails: ")


def test_a_long_error_is_logged_once(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """The line at the end of the run has the counts, and only the begin of an error that the log has already."""
    error = f"no space in {'a' * 80}, free some"
    trainer = make_trainer(writers=[Fails(error)], default_hooks={"checkpoint": None})

    trainer.train()

    (line,) = warnings_of(caplog)
    assert re.fullmatch(
        r"not everything was delivered: Fails: \d+ dropped, 1 failed, 0 left - \[error\] OSError: no space in a+"
        r"\.\.\. \(logged when it failed\)",
        line,
    )
    assert error in trainer.summary()


def test_a_server_that_is_away_is_one_line(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says that the events are lost, and neither the end of the run nor its close repeats it; the summary has
    the counts."""
    trainer = make_trainer(writers=[Away()], default_hooks={"checkpoint": None})

    trainer.train()
    trainer.close()

    (line,) = warnings_of(caplog)
    assert (
        "subscriber Away failed and is disabled: no route to the server; the run goes on without it" in line
    )
    losses = trainer.summary().partition("not everything was delivered:")[2]
    assert re.search(r"Away: \d+ dropped, 1 failed, 0 left - \[error\] UnavailableError: no route", losses)


def test_a_second_training_tells_again_what_it_lost(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of the first training, about the missing server, may be hours old."""
    trainer = make_trainer(writers=[Away()], val_loader=batches(1), default_hooks={"checkpoint": None})
    trainer.train()
    told = len(warnings_of(caplog))

    trainer.val()

    (line,) = warnings_of(caplog)[told:]
    assert line.startswith("not everything was delivered: Away: ")


def test_what_was_lost_for_another_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Events that found no room in the queue, before the server was missed, are counted at the end."""
    bus, gate = Bus(), threading.Event()

    def write(event: Event) -> None:
        gate.wait(60)
        raise UnavailableError("no route to the server")

    bus.subscribe(
        write, BeforeRun, offload="thread", name="away", queue=1, overflow="drop_newest", on_error="disable"
    )
    for _ in range(300):
        bus.emit(BeforeRun())
    gate.set()

    bus.close()

    assert any("not everything was delivered: away: " in line for line in warnings_of(caplog))


def test_a_writer_that_goes_on_tells_its_losses(caplog: pytest.LogCaptureFixture) -> None:
    """With `on_error="log"` no line says that all further events are lost."""
    bus, away = Bus(), Away()
    away.events, away.on_error = (BeforeRun,), "log"
    away.attach(bus, lambda: Run(work_dir=""))
    bus.emit(BeforeRun())

    bus.close()

    assert "not everything was delivered: Away: 0 dropped, 1 failed" in warnings_of(caplog)[-1]


def test_a_server_that_is_away_is_one_line_of_a_bus(caplog: pytest.LogCaptureFixture) -> None:
    """The close of a bus without a trainer does not repeat it, either; its report names the subscriber."""
    bus = Bus()
    writer = Away()
    writer.events = (BeforeRun,)
    writer.attach(bus, lambda: Run(work_dir=""))
    for _ in range(3):
        bus.emit(BeforeRun())

    report = bus.close()

    assert len(warnings_of(caplog)) == 1
    assert (report.ok, report.stats[0].losses_logged) == (False, True)


def test_a_run_that_fails_tells_once(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """It closes the bus itself, which leaves it to the run."""
    trainer = make_trainer(writers=[Fails()], default_hooks={"checkpoint": None})

    @trainer.bus.on("after_train_iter")
    def faulty(event: Event) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trainer.train()

    (line,) = warnings_of(caplog)
    assert line.startswith("not everything was delivered: Fails: ")


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_that_hangs_is_named_once(
    fails: bool,
    make_trainer: MakeTrainer,
    stuck: Stuck,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says what is waited for, how many events it was not given, and how they are delivered later; a close
    keeps them without another line."""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.0)
    trainer = make_trainer(writers=[stuck], default_hooks={"checkpoint": None})
    trainer.bus.drain_timeout = 0.1
    if fails:
        trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", name="ends the run")

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        trainer.train()
    trainer.close()

    (line,) = warnings_of(caplog)
    begin, end = ENDS[fails]
    assert re.fullmatch(rf"{begin}: Stuck \([1-9]\d*\), stuck for \d\.\d s in one delivery\. {end}", line), (
        line
    )
    assert f"`eventloop replay {trainer.work_dir}`" in line
    assert list(find_undelivered(Path(trainer.work_dir)))


def test_later_events_are_told_though_earlier_ones_were(caplog: pytest.LogCaptureFixture) -> None:
    """A flush told of events that have arrived since; a close tells of those that were emitted after it."""
    bus, gate = Bus(drain_timeout=0.1), threading.Event()

    def slow(event: Event) -> None:
        gate.wait(60)

    bus.subscribe(slow, BeforeRun, offload="thread", name="slow")
    bus.emit(BeforeRun())
    bus.emit(BeforeRun())
    assert not bus.flush().complete
    gate.set()
    assert bus.flush(60).complete
    gate.clear()
    bus.emit(BeforeRun())

    bus.close()
    gate.set()

    first, second = warnings_of(caplog)[:2]
    assert "not everything was delivered in time: slow (2)" in first
    assert "events left undelivered: slow (1)" in second


@pytest.mark.parametrize("late", [False, True])
def test_what_a_close_delivers_in_its_last_moment_is_no_loss(
    late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to wait until all is quiet was over, but the end of the queues had time for what was left. An event that
    was emitted after that is told."""
    bus, end = Bus(), closing._end

    def end_and_emit(*args: Any) -> bool:
        ended = end(*args)
        if late:
            bus.emit(BeforeRun())
        return ended

    substitute(monkeypatch, "closing._flush_until_quiet", lambda *args: False)
    substitute(monkeypatch, "closing._end", end_and_emit)
    kept = Kept()
    bus.subscribe(kept.write, BeforeRun, offload="thread", name="kept")
    for _ in range(3):
        bus.emit(BeforeRun())

    report = bus.close(60)

    assert (len(kept.seen), report.ok) == (3, not late)
    assert ("subscribers or other threads went on emitting" in caplog.text) == late
    assert bool(caplog.messages) == late


@pytest.mark.slow
def test_who_waits_beside_one_that_hangs_ends_well(
    make_trainer: MakeTrainer, stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    """When a run is ended at once, beside a writer that hangs, the event log is closed; it is not named."""
    trainer = make_trainer(writers=[stuck, EventLogWriter()], default_hooks={"checkpoint": None})
    trainer.bus.drain_timeout = 0.5

    @trainer.bus.on("after_train_iter")
    def faulty(event: Event) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trainer.train()
    log = next(stats for stats in trainer.bus.stats() if stats.name == "EventLogWriter")

    assert (log.dropped, log.failed, log.queued, log.error, log.shortfall) == (0, 0, 0, "", "")
    assert not any("EventLogWriter" in line for line in warnings_of(caplog))
    assert "EventLogWriter:" not in trainer.summary()
    seen = Kept()
    replay(trainer.work_dir, seen)
    assert len(seen.seen) == log.delivered


class FailsAtItsEnd(Kept):
    """Its last rows never reach the disk."""

    def close(self) -> None:
        raise OSError("disk full")


def test_what_fails_at_the_very_end_is_no_loss_of_another(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that fails to close is reported in one line; the event log, which ends at the same time, has dropped
    nothing."""
    trainer = make_trainer(writers=[FailsAtItsEnd(), EventLogWriter()], default_hooks={"checkpoint": None})

    trainer.train()
    trainer.close()

    writers = [stats for stats in trainer.bus.stats() if stats.runs_on != "sync"]
    assert {stats.name: (stats.dropped, stats.failed, stats.queued) for stats in writers} == {
        "FailsAtItsEnd": (0, 0, 0),
        "EventLogWriter": (0, 0, 0),
    }
    (record,) = (each for each in caplog.records if each.levelname in ("WARNING", "ERROR"))
    assert record.getMessage() == "background subscriber FailsAtItsEnd failed in on_close"


def test_a_handler_hears_of_what_fails_at_the_very_end(make_trainer: MakeTrainer) -> None:
    """A synchronous one too: no iteration follows in which it could."""
    trainer = make_trainer(writers=[FailsAtItsEnd()], default_hooks={"checkpoint": None})
    told: list[str] = []
    trainer.bus.subscribe(lambda event: told.append(event.error), "handler_failed")
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", name="ends the run")

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert told == ["OSError: disk full"]
