"""TrackerWriter: what every writer of an experiment tracker does, with a tracker in memory."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import replay
from eventloop.bus import Bus
from eventloop.eventlog.sinks import Written
from eventloop.events import (
    AfterRun,
    BeforeRun,
    BeforeTrain,
    Event,
    PreemptionRequested,
    ScalarsLogged,
    Timed,
)
from eventloop.events.run import Run
from eventloop.writers import (
    EventLogWriter,
    MLflowWriter,
    OpenTelemetryWriter,
    TrackioWriter,
    WandbWriter,
)
from eventloop.writers.tracker import TrackerWriter
from eventloop.writers.tracker_arguments import basic_login, masked
from eventloop.writers.tracker_state import Known
from tests.support.internals import substitute
from tests.writers.conftest import Account, Attach, emit, train, val, write

SECRET = "s3cr3t"


class Tracker(TrackerWriter):
    """A tracker in memory, which may be away."""

    service = "Tracker"
    target = "tracker"
    secret_variables = ("TRACKER_KEY",)
    events = (ScalarsLogged, BeforeRun, BeforeTrain, AfterRun, PreemptionRequested)

    def __init__(self, name: str | None = None, offload: str | None = "thread") -> None:
        super().__init__(name, offload)
        self.rows: list[tuple[str, int, float]] = []
        self.times: list[float] = []
        self.statuses: list[str] = []
        self.away = ""
        self.opened: list[str] = []

    def connect(self, run: Run, known: Known) -> Known:
        if self.away:
            raise ConnectionError(self.away)
        self.opened.append(known.id)
        return Known(known.id or "run-1", known.last)

    def send(self, events: list[Timed]) -> None:
        if self.away:
            raise ConnectionError(self.away)
        for when, event in events:
            if isinstance(event, ScalarsLogged):
                self.times.append(when)
                self.rows += [(f"{event.mode}/{n}", event.step, v) for n, v in event.scalars.items()]

    def end(self, status: str) -> None:
        self.statuses.append(status)

    def secrets(self) -> list[str]:
        return [SECRET, *super().secrets()]

    @property
    def steps(self) -> list[int]:
        return [step for _, step, _ in self.rows]


def test_a_resumed_run_continues_its_own_run(attach: Attach) -> None:
    """The id is in the work dir, and steps that are run again are not written again."""
    write(attach(Tracker()), BeforeTrain(), *train(1, 2, 3), AfterRun())
    again = Tracker()

    write(attach(again, start_iter=2), BeforeTrain(iter=2), *train(3, 4), val(3, acc=0.5), AfterRun())

    assert again.opened == ["run-1"]
    assert [(name, step) for name, step, _ in again.rows] == [("train/loss", 4), ("val/acc", 3)]


def test_a_training_from_the_beginning_has_a_run_of_its_own(attach: Attach) -> None:
    """Another trainer that begins at step 0 in the same work dir does not go on with the former run."""
    first, worker, resumed, fresh = (Tracker() for _ in range(4))
    write(attach(first, trainer_id="a"), BeforeTrain(), *train(1, 2))
    write(attach(worker, trainer_id="a"), *train(3))  # a worker process that was started again
    write(attach(resumed, trainer_id="b", start_iter=2), BeforeTrain(iter=2), *train(3, 4))

    write(attach(fresh, trainer_id="c"), BeforeTrain(), *train(1, 2))

    assert [each.opened for each in (first, worker, resumed, fresh)] == [[""], *([["run-1"]] * 2), [""]]
    assert (resumed.steps, fresh.steps) == ([4], [1, 2])


def test_a_second_training_on_the_same_bus_repeats_no_step(attach: Attach) -> None:
    """A training that goes back to a checkpoint in the same program writes only later steps."""
    tracker = Tracker()

    write(attach(tracker), BeforeTrain(), *train(1, 2, 3), BeforeTrain(iter=1), *train(2, 3, 4))

    assert tracker.steps == [1, 2, 3, 4]


def test_two_values_of_a_step_in_one_training_are_both_written(attach: Attach) -> None:
    """Only a former training's steps are left out."""
    tracker = Tracker()

    write(attach(tracker), BeforeTrain(), *train(2, 1, 2))

    assert tracker.steps == [2, 1, 2]


def test_a_resumed_run_writes_what_a_kill_took(attach: Attach, tmp_path: Path) -> None:
    """Steps up to the checkpoint that only the event log has are written first, with their times."""
    with_log = Bus()
    EventLogWriter().attach(with_log, lambda: Run(work_dir=str(tmp_path)))
    write(with_log, BeforeTrain(), *train(1, 2, 3, 4, 5, 6))
    write(attach(Tracker()), BeforeTrain(), *train(1, 2))  # the tracker was behind
    again = Tracker()

    write(attach(again, start_iter=4), BeforeTrain(iter=4), *train(5, 6, 7))

    assert again.steps == [3, 4, 5, 6, 7]
    assert again.times[0] < again.times[-1]


def test_a_tracker_that_is_away_gets_the_events_later(
    attach: Attach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says that it is away, without the password, and everything is written when it is back."""
    substitute(monkeypatch, "tracker.RETRY_SECONDS", 0.0)
    tracker = Tracker()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = f"no route to {SECRET}@host"
    with caplog.at_level(logging.WARNING, "eventloop"):
        emit(bus, *train(2))
        emit(bus, *train(3))
    tracker.away = ""

    write(bus, *train(4), AfterRun())

    assert tracker.steps == [1, 2, 3, 4]
    assert [r.getMessage() for r in caplog.records] == [
        "Tracker does not take the events, which wait until it does: ConnectionError: no route to ***@host"
    ]


def test_a_tracker_that_stays_away_costs_two_lines(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end the number of events that were not written is logged, without a traceback."""
    tracker = Tracker()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = "no route"

    with caplog.at_level(logging.WARNING, "eventloop"):
        write(bus, *train(2, 3))

    first, last = caplog.records
    assert "which wait until it does" in first.getMessage()
    assert (
        "2 events were not written to Tracker: ConnectionError: no route; `eventloop replay"
        in last.getMessage()
    )
    assert last.exc_info is None
    assert "2 events were not written" in account(bus).error


def test_a_tracker_that_does_not_take_the_end_either(attach: Attach, account: Account) -> None:
    """The events that were not written are told, with the command, although the end of the run fails, too."""

    class Endless(Tracker):
        def end(self, status: str) -> None:
            raise ConnectionError("refused")

    tracker = Endless()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = "no route"

    write(bus, *train(2, 3))

    assert (
        "2 events were not written to Tracker: ConnectionError: no route; `eventloop replay"
        in account(bus).error
    )


def test_the_end_names_another_error_than_the_first(attach: Attach, account: Account) -> None:
    """The last error is logged too, if it is not the one that the log has."""
    tracker = Tracker()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = "no route"
    emit(bus, *train(2))
    tracker.away = "disk full"

    bus.close()

    assert "1 event was not written to Tracker: ConnectionError: disk full" in account(bus).error


def test_a_tracker_that_hangs_says_what_waits_for_it(attach: Attach, tmp_path: Path) -> None:
    """The number of events and the command that writes them later are known while the writer cannot answer."""
    tracker = Tracker()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = "timed out"
    emit(bus, *train(2, 3))

    assert tracker.waits_for == (
        "Tracker (ConnectionError: timed out), for which 2 events wait; `eventloop replay "
        f"{tmp_path} --to tracker --out {tmp_path}` writes them later, if the run has an EventLogWriter"
    )


@pytest.mark.parametrize(("user", "seen"), [("", "s3cr3t\\n"), ("me", "Basic bWU6czNjcjN0")])
def test_a_key_is_masked_in_each_form(user: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library shows a key with its line end escaped, and a server repeats a login as it was sent."""
    monkeypatch.setenv("TRACKER_KEY", "s3cr3t\n")
    keys = [*Tracker().secrets(), basic_login(user, "s3cr3t")]

    assert "s3cr3t" not in masked(f"refused {seen}", keys)
    assert "czNjcjN0" not in masked(f"refused {seen}", keys)


def test_too_many_waiting_events_end_the_writer(
    attach: Attach, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that waiting events take is bounded."""
    substitute(monkeypatch, "tracker.BACKLOG", 10)
    tracker = Tracker()
    bus = attach(tracker)
    emit(bus, *train(1))
    tracker.away = "no route"

    emit(bus, *train(*range(2, 20)))

    assert "events were not written to Tracker" in account(bus).error


def test_a_tracker_that_is_away_at_the_begin_disables_the_writer(
    attach: Attach,
    account: Account,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One line says why, without a key, and how to write the events later; they count as failed or dropped."""
    monkeypatch.setenv("TRACKER_KEY", "k3y/of me")
    tracker = Tracker()
    tracker.away = f"401 for {SECRET} and k3y/of me"
    bus = attach(tracker)

    with caplog.at_level(logging.WARNING, "eventloop"):
        emit(bus, *train(1, 2))

    (record,) = caplog.records
    assert (
        f"Tracker cannot be used: ConnectionError: 401 for *** and ***; `eventloop replay {tmp_path} --to tracker "
        f"--out {tmp_path}` writes them later, if the run has an EventLogWriter; the run goes on"
        in record.getMessage()
    )
    assert record.exc_info is None
    assert account(bus).failed + account(bus).dropped == 2


def test_what_a_tracker_missed_is_replayed_into_its_run(attach: Attach, tmp_path: Path) -> None:
    """A replay into the run's own directory writes the steps that the tracker does not have, at their times."""
    with_log = Bus()
    EventLogWriter().attach(with_log, lambda: Run(work_dir=str(tmp_path)))
    write(with_log, BeforeTrain(), *train(1, 2, 3, 4), BeforeTrain(iter=2), *train(3, 4, 5), AfterRun())
    write(attach(Tracker()), BeforeTrain(), *train(1, 2))
    later = Tracker()

    replay(tmp_path, later, work_dir=tmp_path)

    assert later.opened == ["run-1"]
    assert later.steps == [3, 4, 5]
    assert later.statuses == ["FINISHED"]


def test_a_replay_counts_what_the_tracker_had(attach: Attach, tmp_path: Path) -> None:
    """Values are new, or were there before; those that a resumed training repeated are counted once."""
    bus = Bus()
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(tmp_path), start_iter=2))
    write(bus, BeforeTrain(), *train(1, 2, 3), BeforeTrain(iter=2), *train(3, 4), AfterRun())
    write(attach(Tracker()), BeforeTrain(), *train(1))

    first, second = (replay(tmp_path, Tracker(), work_dir=tmp_path) for _ in range(2))

    assert (first.written, second.written) == ([Written("Tracker", 3, 1)], [Written("Tracker", 0, 4)])
    assert str(first) == "8 events replayed; 3 new values for Tracker, which had 1 already"
    assert str(second) == ("8 events replayed; nothing new for Tracker, which had all 4 values already")


def test_a_replay_without_the_tracker_says_why(tmp_path: Path) -> None:
    """The error is that of the begin, with the command to repeat; no run is ended."""
    bus = Bus()
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
    write(bus, *train(1))
    tracker = Tracker()
    tracker.away = "no route"

    with pytest.raises(
        ConnectionError,
        match=f"^Tracker cannot be used: ConnectionError: no route; `eventloop replay {tmp_path} --to tracker` "
        "writes them later",
    ):
        replay(tmp_path, tracker)

    assert tracker.statuses == []


class Leaving(Tracker):
    """A tracker that is away from the first event on."""

    def connect(self, run: Run, known: Known) -> Known:
        connected = super().connect(run, known)
        self.away = "gone"
        return connected


def test_a_replay_into_a_bus_does_not_wait_for_a_tracker_that_is_away(tmp_path: Path) -> None:
    """It ends, and the events that the writer holds are queued in the account until the close."""
    bus = Bus()
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
    write(bus, *train(1, 2, 3))

    with Bus() as target:
        Leaving().attach(target, lambda: Run(work_dir=str(tmp_path)))
        replay(tmp_path, target)
        (held,) = target.stats()
    (stats,) = target.stats()

    assert (held.delivered, held.queued, held.untaken) == (0, 3, 3)
    assert (stats.delivered, stats.failed, stats.queued, stats.untaken) == (0, 3, 0, 0)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([AfterRun()], "FINISHED"),
        ([AfterRun(reason="early stopping")], "FINISHED"),
        ([AfterRun(reason="error", error="ValueError: nan")], "FAILED"),
        ([AfterRun(reason="error", error="KeyboardInterrupt")], "KILLED"),
        ([AfterRun(reason="preempted by SIGTERM", signal="SIGTERM")], "KILLED"),
        ([AfterRun(error="ValueError: nan", signal="SIGTERM")], "FAILED"),
        ([AfterRun(reason="the SIGNAL")], "FINISHED"),
        ([PreemptionRequested(reason="SIGTERM"), AfterRun()], "FINISHED"),
        ([], "KILLED"),
        ([AfterRun(reason="error", error="ValueError"), BeforeRun(), AfterRun()], "FINISHED"),
    ],
)
def test_the_status_says_how_the_run_ended(attach: Attach, events: list[Event], status: str) -> None:
    """An error is FAILED; Ctrl-C, a preemption and a run without an end are KILLED."""
    tracker = Tracker()

    write(attach(tracker), BeforeRun(), *train(1), *events)

    assert tracker.statuses == [status]


def test_what_is_no_number_is_told_once(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    """Such a value is left out, and the others of its event are written."""
    scalars: Any = {"loss": 0.5, "note": "good"}
    tracker = Tracker()

    with caplog.at_level(logging.WARNING, "eventloop"):
        write(attach(tracker), ScalarsLogged(step=1, scalars=scalars), ScalarsLogged(step=2, scalars=scalars))

    assert tracker.rows == [("train/loss", 1, 0.5), ("train/loss", 2, 0.5)]
    assert [r.getMessage() for r in caplog.records] == [
        "Tracker: train/note is left out: expected a number, got str"
    ]


@pytest.mark.parametrize(
    ("writer", "arguments", "module", "extra"),
    [
        (WandbWriter, {"project": "digits"}, "wandb", "wandb"),
        (MLflowWriter, {"tracking_uri": "sqlite:///x.db"}, "mlflow", "mlflow"),
        (TrackioWriter, {"project": "digits"}, "trackio", "trackio"),
        (OpenTelemetryWriter, {"endpoint": "http://localhost:4318"}, "opentelemetry", "otlp"),
    ],
)
def test_a_missing_library_names_its_extra(
    writer: Callable[..., Any],
    arguments: dict[str, str],
    module: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes where the writer is made, with the command that installs the library."""
    for name in [*sys.modules]:
        if name.startswith(f"{module}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(
        ImportError, match=rf"{writer.__name__} needs .*: pip install 'torch-eventloop\[{extra}\]'"
    ):
        writer(**arguments)


def test_the_package_imports_no_library_of_a_tracker() -> None:
    """Only a writer that is made imports its library."""
    program = "import sys, eventloop.writers; print({*sys.modules} & {'wandb', 'mlflow', 'trackio', 'opentelemetry'})"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


def test_a_damaged_file_of_the_run_is_named(attach: Attach, account: Account, tmp_path: Path) -> None:
    """The line says which file to remove."""
    (tmp_path / "tracker_run.json").write_text("{")
    bus = attach(Tracker())

    emit(bus, *train(1))

    assert "tracker_run.json is not the file of a run, remove it" in account(bus).error


def test_two_trackers_of_a_kind_have_two_runs(attach: Attach, tmp_path: Path) -> None:
    """A writer with a name has a file of its own."""
    write(attach(Tracker("other")), *train(1))

    assert (tmp_path / "tracker_run_other.json").is_file()


def test_a_name_that_is_no_text() -> None:
    """It is an error where the writer is made."""
    with pytest.raises(TypeError, match=r"^name must be a str or None, got int$"):
        Tracker(name=3)  # type: ignore[arg-type]
