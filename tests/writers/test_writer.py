"""The base class: what a subclass is called with, when, on which thread, and in which process."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import time
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event, ScalarsLogged, Timed
from eventloop.events.run import Run
from eventloop.writers import (
    ConsoleWriter,
    CSVWriter,
    JSONLWriter,
    TensorBoardWriter,
    TimedWriter,
    Writer,
    read_jsonl,
)
from tests.conftest import DEADLINE
from tests.writers.conftest import Account, Attach, emit, in_process, train, worker_of, write
from tests.writers.step_file import Longer, StepFile


class Recorder(Writer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def open(self, run: Run) -> None:
        self.calls.append("open")

    def write(self, event: Event) -> None:
        self.calls.append("write")
        self.threads.add(threading.current_thread().name)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_methods_run_in_the_documented_order(attach: Attach) -> None:
    """open, the writes, flush when the bus is flushed, close once."""
    writer = Recorder()
    bus = attach(writer)

    emit(bus, *train(1, 2))
    bus.close()
    bus.close()

    assert writer.calls == ["open", "write", "write", "flush", "close"]


def test_write_runs_off_the_emitting_thread(attach: Attach) -> None:
    """A writer has a thread of its own, named after it."""
    writer = Recorder()
    emit(attach(writer), *train(1))

    assert writer.threads == {"eventloop Recorder"}


def test_a_run_without_events_opens_nothing(attach: Attach) -> None:
    """No file appears, and nothing is closed, before there is something to write."""
    writer = Recorder()

    attach(writer).close()

    assert writer.calls == []


@pytest.mark.parametrize("make", [JSONLWriter, CSVWriter, TensorBoardWriter, ConsoleWriter])
def test_closing_twice_is_safe(make: type[Writer]) -> None:
    """A writer that never opened closes too, and flushes."""
    writer = make()

    if make is not ConsoleWriter:
        writer.flush()
    writer.close()
    writer.close()


def test_batch_hands_over_everything_that_waits(attach: Attach) -> None:
    """With batch = True write_batch gets lists, which hold each event once and in order."""
    seen: list[int] = []

    class InBatches(Writer):
        batch = True

        def write_batch(self, events: list[Event]) -> None:
            seen.extend(event.step for event in events if isinstance(event, ScalarsLogged))

    emit(attach(InBatches()), *train(*range(100)))

    assert seen == list(range(100))


def test_a_writer_may_linger(attach: Attach) -> None:
    """Events gather after a delivery; a flush or close waits for none (`tests/background/test_linger.py`)."""
    seen: list[int] = []
    first = threading.Event()

    class Lingers(Recorder):
        linger = 1000.0
        batch = True

        def write_batch(self, events: list[Event]) -> None:
            seen.append(len(events))
            first.set()

    bus = attach(Lingers())
    bus.emit(*train(1))
    assert first.wait(DEADLINE)
    emit(bus, *train(2, 3, 4))

    assert seen == [1, 3]


def test_write_batch_falls_back_to_write(attach: Attach) -> None:
    """A subclass that only has write may be fed in batches too."""

    class InBatches(Recorder):
        batch = True

    writer = InBatches()
    emit(attach(writer), *train(1, 2))

    assert writer.calls == ["open", "write", "write", "flush"]


def test_a_failed_writer_is_still_closed(attach: Attach) -> None:
    """close is called after an error in write, so that files do not stay open."""

    class Failing(Recorder):
        def write(self, event: Event) -> None:
            raise OSError("disk full")

    writer = Failing()
    write(attach(writer), *train(1))

    assert writer.calls == ["open", "close"]


def test_importing_the_writers_imports_no_destination() -> None:
    """rich, tensorboard, numpy and torch are imported by the constructor that needs them."""
    heavy = ("rich", "tensorboard", "numpy", "torch")
    probe = f"import sys, eventloop.writers; print(*(m for m in {heavy} if m in sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == []


# --- `offload="process"` ---------------------------------------------------------------------------------------


def iterations(*numbers: int) -> list[AfterTrainIter]:
    return [AfterTrainIter(iter=number) for number in numbers]


def text(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_jsonl_in_a_process_is_complete(attach: Attach, account: Account, tmp_path: Path) -> None:
    """Every event, once and in order."""
    bus = attach(in_process(JSONLWriter()))
    write(bus, *train(*range(500)))

    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [*range(500)]
    assert rows[3]["loss"] == 0.75
    assert (account(bus).delivered, account(bus).runs_on) == (500, "process")


def test_writer_is_made_from_its_arguments(tmp_path: Path) -> None:
    """Its attributes need not pickle; its methods are called in the worker, in the order of `Writer`. The facts of the
    run are those at the first event, as the run may be resumed after the writer was attached."""
    bus = Bus()
    facts = {"run": Run(work_dir=str(tmp_path))}
    in_process(StepFile("steps.txt", prefix="n")).attach(bus, lambda: facts["run"])
    facts["run"] = Run(work_dir=str(tmp_path), start_iter=7)
    emit(bus, *iterations(0, 1))
    flushed = text(tmp_path / "steps.txt")
    bus.close(DEADLINE)

    assert flushed == ["open 7", "n0", "n1"]
    assert text(tmp_path / "steps.txt") == [*flushed, "close in another process: True"]


@pytest.mark.slow
def test_constructor_that_calls_its_base_is_made_by_its_own(attach: Attach, tmp_path: Path) -> None:
    """The outermost constructor's arguments count."""
    write(attach(in_process(Longer())), *iterations(0))

    assert text(tmp_path / "longer.txt")[:2] == ["open 0", "step 0"]


@pytest.mark.slow
def test_writer_whose_worker_dies_goes_on(attach: Attach, tmp_path: Path) -> None:
    """Another worker opens it again, at the first event that was not acknowledged."""
    bus = attach(in_process(StepFile("steps.txt")))
    emit(bus, *iterations(*range(5)))
    os.kill(worker_of(bus), signal.SIGKILL)
    write(bus, *iterations(5))

    lines = text(tmp_path / "steps.txt")
    assert lines[:-1] == ["open 0", "0", "1", "2", "3", "4", "open 5", "5"]


@pytest.mark.slow
def test_writer_that_fails_to_open_brings_its_error(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a thread does."""
    bus = attach(in_process(StepFile("no/such/folder")))
    emit(bus, *iterations(0, 1, 2))

    assert "FileNotFoundError" in account(bus).error
    assert (account(bus).failed, account(bus).dropped) == (1, 2)
    assert "in open" in caplog.text


def test_writer_that_no_worker_can_make_is_refused(attach: Attach) -> None:
    """The class must be importable, and the constructor's arguments must pickle."""

    class Inside(StepFile):
        pass

    with pytest.raises(TypeError, match=r"Inside is defined inside a function.*offload='thread'"):
        attach(in_process(Inside("x")))
    with pytest.raises(TypeError, match=r"cannot be sent to a worker process: .*lambda"):
        attach(in_process(StepFile("x", prefix=lambda: 1)))  # type: ignore[arg-type]


def test_constructors_keep_their_signatures() -> None:
    """The registry checks the keys of a config by them."""
    assert list(inspect.signature(StepFile).parameters) == ["filename", "prefix"]
    with pytest.raises(TypeError, match=r"^StepFile has no argument 'nme': known are filename, prefix"):
        StepFile("x", nme="y")  # type: ignore[call-arg]


class Times(TimedWriter):
    """A writer that keeps events with their times, and counts its calls."""

    events = (ScalarsLogged,)

    def __init__(self) -> None:
        self.seen: list[Timed] = []
        self.calls = 0

    def write_timed(self, events: list[Timed]) -> None:
        self.seen += events
        self.calls += 1


def test_a_batch_for_a_timed_writer_is_one_call() -> None:
    """A subclass that passes a batch on to the base class writes it at once, with the present time."""
    writer = Times()
    before = time()

    writer.write_batch(list(train(1, 2, 3)))

    assert writer.calls == 1
    assert before <= writer.seen[0].time == writer.seen[2].time


def test_a_timed_writer_without_batches_gets_single_events(attach: Attach) -> None:
    """`batch = False` calls `write` for each event, as for any writer."""
    seen: list[Event] = []

    class Single(Times):
        batch = False

        def write(self, event: Event) -> None:
            seen.append(event)

    write(attach(Single()), *train(1, 2))

    assert seen == train(1, 2)


@pytest.mark.parametrize("awaited", [object(), property(lambda self: 1 / 0)], ids=["no text", "an error"])
def test_a_broken_text_of_what_is_awaited_breaks_no_writer(
    attach: Attach, account: Account, awaited: Any
) -> None:
    """Only a text in `waits_for` is used, in the message about a hang."""
    writer = type("Odd", (Times,), {"waits_for": awaited})()
    bus = attach(writer)

    write(bus, *train(1))

    assert [each.event for each in writer.seen] == train(1)
    assert account(bus).delivered == 1
