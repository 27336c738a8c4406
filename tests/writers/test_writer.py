"""The base class: what a subclass is called with, when, and on which thread."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from eventloop.events import Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import ConsoleWriter, CSVWriter, JSONLWriter, TensorBoardWriter, Writer
from tests.writers.conftest import Attach, emit, train, write


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
