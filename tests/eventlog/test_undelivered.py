"""Events that the end of a run leaves undelivered stay on disk, and `eventloop replay RUN` delivers them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eventloop import WRITERS, Trainer, read_events
from eventloop.bus import Bus
from eventloop.cli import main
from eventloop.eventlog.redelivery import Delivery, find_undelivered
from eventloop.eventlog.undelivered import store_undelivered
from eventloop.events import AfterTrainIter, Event, ScalarsLogged
from eventloop.events.run import CurrentRun, Run
from eventloop.util.text import UnavailableError
from eventloop.writers import CSVWriter, Writer
from tests.support.internals import drain_after, substitute
from tests.support.trainers import DEADLINE, MakeTrainer

WRITER = """
import json, os, time
from eventloop.registry import WRITERS
from eventloop.writers import Writer

@WRITERS.register
class SlowLines(Writer):
    events = ("after_train_iter",)
    queue = 16

    def __init__(self, filename, *, fails=False):
        self.filename, self.fails = filename, fails

    def open(self, run):
        self.path = os.path.join(run.work_dir, self.filename)

    def write(self, event):
        if self.fails and "FAIL" in os.environ:
            raise OSError("disk full")
        if "SLOW" in os.environ:
            time.sleep(0.4)
        with open(self.path, "a") as file:
            file.write(json.dumps(event.iter) + "\\n")
"""
PROGRAM = """
import sys, torch
import slow_lines
from eventloop import Bus, Trainer

def main():
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=lambda trainer, batch: {"loss": model(batch).square().mean()},
        train_loader=[torch.ones(1, 2)] * 60, max_epochs=1, work_dir=sys.argv[1], bus=Bus(drain_timeout=0.3),
        writers=[slow_lines.SlowLines("lines.txt", fails=True)], default_hooks=dict(checkpoint=None),
    )
    trainer.train()

main()
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a directory with the module of a slow writer; variables are set for it."""
    (tmp_path / "slow_lines.py").write_text(WRITER)
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path, **variables},
            check=False,
        )

    return run


@dataclass(frozen=True)
class How:
    """At which iterations a writer is held, fails or gets a signal, and whether its close fails."""

    hold_at: int = -1
    fails: int = -1
    stops_at: int = -1
    error: Exception | None = None
    signal: signal.Signals = signal.SIGINT
    close_fails: bool = False


class HeldLines(Writer):
    """Write iterations as lines in the way that the test has set."""

    events = ("after_train_iter",)
    queue = 4
    how = How()
    entered, go_on = threading.Event(), threading.Event()

    def __init__(self, filename: str | Path) -> None:
        self.filename = filename

    def open(self, run: Run) -> None:
        self.path = Path(run.work_dir, self.filename)

    def write(self, event: Event) -> None:
        at = getattr(event, "iter", -1)
        if at == self.how.hold_at:
            self.entered.set()
            self.go_on.wait(DEADLINE)
        if at == self.how.fails:
            raise self.how.error or OSError("disk full")
        if at == self.how.stops_at:
            signal.raise_signal(self.how.signal)
        with self.path.open("a") as file:
            file.write(f"{at}\n")

    def close(self) -> None:
        if self.how.close_fails:
            raise OSError("nothing was sent")


@pytest.fixture
def held_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HeldLines]]:
    """A registered writer that is held at the third event, for which a run waits, and goes on after the test."""
    WRITERS.register(HeldLines)
    HeldLines.how = How(hold_at=2)
    for event in (HeldLines.entered, HeldLines.go_on):
        event.clear()
    drain_after(monkeypatch, HeldLines.entered.is_set)
    yield HeldLines
    HeldLines.go_on.set()
    WRITERS.forget(HeldLines.__name__)


def test_a_writer_gets_the_rest_later(
    make_trainer: MakeTrainer,
    held_lines: type[HeldLines],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its arguments and in its former file; after a failure the events stay and are delivered again."""
    trainer = make_trainer(
        writers=[held_lines(Path("lines.txt"))],
        bus=Bus(drain_timeout=0.1),
        default_hooks={"checkpoint": None},
    )
    trainer.train()
    trainer.close()
    run, lines = str(trainer.work_dir), trainer.work_dir / "lines.txt"
    assert lines.read_text().split() == ["0", "1"]

    held_lines.how = How(fails=2)
    assert main(["replay", run]) == 1
    assert "HeldLines: disk full" in capsys.readouterr().err
    held_lines.how = How()
    assert main(["replay", run]) == 0
    assert f"{trainer.iter - 2} events replayed into HeldLines" in capsys.readouterr().err

    assert lines.read_text().split() == [str(i) for i in range(trainer.iter)]
    assert not (trainer.work_dir / "undelivered").exists()
    assert main(["replay", run]) == 2
    assert "holds nothing: no events wait there for their writers" in capsys.readouterr().err


@pytest.fixture
def left_from_2(
    make_trainer: MakeTrainer, held_lines: type[HeldLines], monkeypatch: pytest.MonkeyPatch
) -> Trainer:
    """A run whose writer has the events 0 and 1; a Ctrl-C of the command that delivers the others ends no test."""
    trainer = make_trainer(
        writers=[held_lines("lines.txt")], bus=Bus(drain_timeout=0.1), default_hooks={"checkpoint": None}
    )
    trainer.train()
    trainer.close()
    assert trainer.iter == 6
    held_lines.how = How()
    substitute(monkeypatch, "cli._end_at_once", lambda code: None)
    return trainer


def code_of_replay(trainer: Trainer) -> int | str | None:
    """The exit code of a delivery, which a signal may end."""
    try:
        return main(["replay", str(trainer.work_dir)])
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("how", "code"),
    [(How(stops_at=4), 130), (How(stops_at=4, signal=signal.SIGTERM), 143), (How(fails=4), 1)],
    ids=["Ctrl-C", "SIGTERM", "error"],
)
def test_a_delivery_that_is_stopped_continues_there(
    how: How,
    code: int,
    left_from_2: Trainer,
    held_lines: type[HeldLines],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No event arrives twice but the one under way, and the command tells how many are left."""
    handler = signal.getsignal(signal.SIGTERM)
    held_lines.how = how
    assert code_of_replay(left_from_2) == code
    assert "2 of 4 events delivered, 2 left for the next replay" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler

    held_lines.how = How(fails=5)
    assert code_of_replay(left_from_2) == 1
    held_lines.how = How()
    assert code_of_replay(left_from_2) == 0

    assert "1 event replayed into HeldLines" in capsys.readouterr().err
    lines = (left_from_2.work_dir / "lines.txt").read_text().split()
    assert lines == [str(i) for i in range(6)]
    assert not (left_from_2.work_dir / "undelivered").exists()


@pytest.mark.parametrize(
    ("how", "logged"),
    [
        (How(stops_at=4, close_fails=True), "OSError: nothing was sent"),
        (How(fails=4, error=UnavailableError("3 events were not written")), ""),
    ],
    ids=["when it is closed", "in its error"],
)
def test_a_writer_that_lost_what_it_held_gets_all_again(
    how: How,
    logged: str,
    left_from_2: Trainer,
    held_lines: type[HeldLines],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An event that was passed to it may not be where it belongs yet."""
    held_lines.how = how
    assert code_of_replay(left_from_2) != 0
    assert " 0 of 4 events delivered, 4 left" in capsys.readouterr().err
    assert (logged in caplog.text) if logged else (caplog.messages == [])

    held_lines.how = How()
    assert code_of_replay(left_from_2) == 0
    assert "4 events replayed into HeldLines" in capsys.readouterr().err


def test_a_continued_delivery_keeps_the_rows_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer removes the rows of repeated steps, but none that was delivered, in whatever order they came."""
    steps, go_on = [3, 9, 4, 5, 10, 11], threading.Event()
    monkeypatch.setattr(CSVWriter, "batch", 1)
    bus = Bus(drain_timeout=0.1)
    store_undelivered(bus, CurrentRun(Run(work_dir=str(tmp_path), start_iter=2)), [CSVWriter()])
    bus.subscribe(lambda event: go_on.wait(DEADLINE), ScalarsLogged, offload="thread", name="CSVWriter")
    for step in steps:
        bus.emit(ScalarsLogged(step=step, scalars={"loss": 1.0}))
    bus.close()
    go_on.set()

    def stop(delivery: Delivery) -> None:
        if delivery.written == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Delivery(find_undelivered(tmp_path)[0], tmp_path, stop).run()
    assert Delivery(find_undelivered(tmp_path)[0], tmp_path, stop).run().emitted == 2

    rows = [row["step"] for row in csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())]
    assert sorted(map(int, rows)) == sorted(steps)


def test_a_long_delivery_tells_how_far_it_is(
    left_from_2: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line from time to time."""
    substitute(monkeypatch, "replay.PROGRESS_SECONDS", 0.0)
    assert code_of_replay(left_from_2) == 0

    told = [line for line in capsys.readouterr().err.splitlines() if "delivered" in line]
    assert told == [f"eventloop: HeldLines: {i} of 4 events delivered" for i in range(1, 5)]


@pytest.mark.slow
def test_a_slow_writer_of_a_program_gets_the_rest_later(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Each event is in its file once or, if it was under way at the end, twice, and nothing is left to deliver."""
    ran = python("program.py", "run", SLOW="1")
    assert ran.returncode == 0, ran.stderr
    assert "`eventloop replay " in ran.stderr
    before = (tmp_path / "run" / "lines.txt").read_text().split()
    assert 0 < len(before) < 60

    failed = python("-m", "eventloop", "replay", "run", "--import", "slow_lines", FAIL="1")
    assert (failed.returncode, "disk full" in failed.stderr) == (1, True)
    delivered = python("-m", "eventloop", "replay", "run", "--import", "slow_lines")
    assert delivered.returncode == 0, delivered.stderr

    after = [int(line) for line in (tmp_path / "run" / "lines.txt").read_text().split()]
    assert sorted({*after}) == list(range(60))
    assert len(after) <= 61
    assert not (tmp_path / "run" / "undelivered").exists()


@pytest.mark.slow
def test_a_writer_that_is_not_imported_is_named(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """With the module to import, unless it is the training script, and the events stay."""
    python("program.py", "run", SLOW="1")
    without = python("-m", "eventloop", "replay", "run")

    assert without.returncode == 2
    assert "SlowLines" in without.stderr
    assert "--import slow_lines" in without.stderr
    assert (tmp_path / "run" / "undelivered" / "SlowLines.evl").is_file()

    facts = tmp_path / "run" / "undelivered" / "SlowLines.json"
    facts.write_text(facts.read_text().replace('"slow_lines"', '"__main__"'))
    of_the_script = python("-m", "eventloop", "replay", "run")

    assert of_the_script.returncode == 2
    assert "its class is in the training script: move it to a module" in of_the_script.stderr
    assert "--import __main__" not in of_the_script.stderr


@pytest.mark.representative(3)
@pytest.mark.parametrize("overflow", ["spill", "drop_oldest", "block"])
@pytest.mark.parametrize("queue", [4, 100])
def test_the_events_that_are_left_are_those_of_the_account(overflow: Any, queue: int) -> None:
    """In the queue, in the spill file and under way, in order: what was not delivered, and `queued` of them."""
    begun, go_on, seen = threading.Event(), threading.Event(), []
    left: dict[str, list[int]] = {}

    def hold(event: AfterTrainIter) -> None:
        seen.append(event.iter)
        if event.iter == 5:
            begun.set()
            go_on.wait(DEADLINE)

    bus = Bus(drain_timeout=0.2)
    bus.on_undelivered(lambda name, events: left.update({name: [event.iter for event in events]}))  # type: ignore[attr-defined]
    bus.subscribe(hold, "after_train_iter", offload="thread", name="hold", overflow=overflow, queue=queue)
    for i in range(6):
        bus.emit(AfterTrainIter(iter=i))
    assert begun.wait(DEADLINE)
    emitted = 5 + min(queue, 40) if overflow == "block" else 50
    for i in range(6, emitted):
        bus.emit(AfterTrainIter(iter=i))
    try:
        report = bus.close()
    finally:
        go_on.set()

    (account,) = report.stats
    assert len(left["hold"]) == account.queued
    assert left["hold"][0] == 5
    assert left["hold"] == sorted(left["hold"])
    assert account.delivered + account.dropped + account.queued == emitted
    if not account.dropped:
        assert [*seen[:5], *left["hold"]] == list(range(5 + account.queued))


@pytest.mark.parametrize(("module", "promise"), [("lines", "delivers"), ("__main__", "says how to deliver")])
def test_the_end_of_a_run_promises_what_the_command_can_do(
    module: str,
    promise: str,
    make_trainer: MakeTrainer,
    held_lines: type[HeldLines],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The command cannot import a writer of the training script."""
    monkeypatch.setattr(held_lines, "__module__", module)
    trainer = make_trainer(writers=[held_lines("lines.txt")], bus=Bus(drain_timeout=0.1))

    @trainer.bus.on("after_train")
    def fail(event: Event) -> None:
        raise ValueError("stop here")

    with pytest.raises(ValueError, match="stop here"):
        trainer.train()
    trainer.close()

    assert f"`eventloop replay {trainer.work_dir}` {promise} them" in caplog.text


def test_what_is_not_a_writer_is_kept_too(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names the log, which `replay` delivers to a bus."""
    go_on = threading.Event()
    trainer = make_trainer(bus=Bus(drain_timeout=0.1), default_hooks={"checkpoint": None})

    @trainer.bus.on("after_train_iter", offload="thread", name="my handler")
    def hold(event: Event) -> None:
        go_on.wait(DEADLINE)

    trainer.train()
    trainer.close()
    go_on.set()

    log = trainer.work_dir / "undelivered" / "my_handler.evl"
    assert [record.event.iter for record in read_events(log)] == list(range(trainer.iter))  # type: ignore[attr-defined]
    assert main(["replay", str(trainer.work_dir)]) == 1
    assert "my handler, which cannot be made again" in capsys.readouterr().err
    assert log.is_file()


class TextStep(Event, frozen=True):
    """An event of a user, whose `step` is no number."""

    step: str


def test_each_subscriber_has_a_log_of_its_own(make_trainer: MakeTrainer) -> None:
    """Also if two names differ only in characters that no file name has, and whatever fields an event has."""
    go_on = threading.Event()
    trainer = make_trainer(bus=Bus(drain_timeout=0.1), default_hooks={"checkpoint": None})
    names = ["a b", "a:b", "a_b"]
    for name in names:
        trainer.bus.subscribe(lambda event: go_on.wait(DEADLINE), TextStep, offload="thread", name=name)

    @trainer.bus.on("after_train_iter")
    def emit(event: Event) -> None:
        trainer.bus.emit(TextStep(step=f"epoch \udcff {len(names)}"))

    trainer.train()
    trainer.close()
    go_on.set()

    logs = sorted((trainer.work_dir / "undelivered").glob("*.evl"))
    told = [json.loads(log.with_suffix(".json").read_text())["name"] for log in logs]
    assert sorted(told) == names
    for log in logs:
        steps = {record.event.step for record in read_events(log)}  # type: ignore[attr-defined]
        assert steps == {"epoch \\udcff 3"}


class Unencodable(Event, frozen=True):
    """An event of a user, with a value that no file can have."""

    value: object


def test_a_log_is_intact_if_its_first_events_cannot_be_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named in the Python log, and the log of the other events begins only once."""
    go_on = threading.Event()
    bus = Bus(drain_timeout=0.1)
    store_undelivered(bus, CurrentRun(Run(work_dir=str(tmp_path))), [])
    bus.subscribe(lambda event: go_on.wait(DEADLINE), "*", offload="thread", name="waits")
    for event in (Unencodable(object()), Unencodable(object()), AfterTrainIter(iter=2)):
        bus.emit(event)
    try:
        bus.close()
    finally:
        go_on.set()

    reader = read_events(tmp_path / "undelivered" / "waits.evl")
    assert [record.event for record in reader] == [AfterTrainIter(iter=2)]
    assert reader.damaged == 0
    assert "events unencodable" in caplog.text


def test_an_error_in_keeping_them_ends_no_close(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with the subscriber's name, and the next subscriber's events are kept."""
    go_on = threading.Event()
    kept = []

    def store(name: str, events: Iterable[Event]) -> None:
        if name == "first":
            raise OSError("disk full")
        kept.append((name, len([*events])))

    bus = Bus(drain_timeout=0.1)
    bus.on_undelivered(store)
    for name in ("first", "second"):
        bus.subscribe(lambda event: go_on.wait(DEADLINE), "after_train_iter", offload="thread", name=name)
    bus.emit(AfterTrainIter())
    try:
        assert not bus.close().ok
    finally:
        go_on.set()

    assert kept == [("second", 1)]
    assert "first: its undelivered events cannot be kept: OSError: disk full" in caplog.text


def test_replay_names_what_was_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is not the one that the command reads, so its error gives the path to replay."""
    log = tmp_path / "undelivered_1" / "X.evl"
    log.parent.mkdir()
    log.touch()

    assert main(["replay", str(tmp_path)]) == 2

    assert f"The run before a resume left {log}: give this file, with --to" in capsys.readouterr().err


def test_a_later_run_sets_the_rest_aside(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """Its writers continue the same files, so the former events get a folder of their own, and a warning says so."""
    trainer = make_trainer(default_hooks={"checkpoint": None})
    (trainer.work_dir / "undelivered").mkdir()
    (trainer.work_dir / "undelivered" / "X.json").write_text(json.dumps({"name": "X"}))
    trainer.train()

    assert (trainer.work_dir / "undelivered_1" / "X.json").is_file()
    assert not (trainer.work_dir / "undelivered").exists()
    assert "holds events that the run before did not deliver" in caplog.text
