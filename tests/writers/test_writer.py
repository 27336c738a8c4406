"""The base class: what a subclass is called with, when, and on which thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import eventloop.writers
from eventloop.bus import Bus
from eventloop.events import Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import Writer


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


def test_methods_run_in_the_documented_order(attach: Callable[..., Bus]) -> None:
    """open, the writes, flush when the bus is flushed, close once."""
    writer = Recorder()
    bus = attach(writer)

    bus.emit(ScalarsLogged(step=1))
    bus.emit(ScalarsLogged(step=2))
    bus.flush()
    bus.close()
    bus.close()

    assert writer.calls == ["open", "write", "write", "flush", "close"]


def test_write_runs_off_the_emitting_thread(attach: Callable[..., Bus]) -> None:
    """A writer has a thread of its own, named after it."""
    writer = Recorder()
    bus = attach(writer)

    bus.emit(ScalarsLogged(step=1))
    bus.flush()

    assert writer.threads == {"eventloop Recorder"}


def test_a_run_without_events_opens_nothing(attach: Callable[..., Bus]) -> None:
    """No file appears, and nothing is closed, before there is something to write."""
    writer = Recorder()

    attach(writer).close()

    assert writer.calls == []


def test_batch_hands_over_everything_that_waits(attach: Callable[..., Bus]) -> None:
    """With batch = True write_batch gets lists, which hold each event once and in order."""
    seen: list[int] = []

    class InBatches(Writer):
        batch = True

        def write_batch(self, events: list[Event]) -> None:
            seen.extend(event.step for event in events if isinstance(event, ScalarsLogged))

    bus = attach(InBatches())

    for step in range(100):
        bus.emit(ScalarsLogged(step=step))
    bus.flush()

    assert seen == list(range(100))


def test_write_batch_falls_back_to_write(attach: Callable[..., Bus]) -> None:
    """A subclass that only has write may be fed in batches too."""

    class InBatches(Recorder):
        batch = True

    writer = InBatches()
    bus = attach(writer)

    bus.emit(ScalarsLogged(step=1))
    bus.emit(ScalarsLogged(step=2))
    bus.flush()

    assert writer.calls == ["open", "write", "write", "flush"]


def test_missing_write_is_named(attach: Callable[..., Bus]) -> None:
    """A writer without write is refused when it is attached, with the line that says what to do."""

    class Forgetful(Writer):
        pass

    with pytest.raises(TypeError, match=r"^Forgetful has no write\(event\): override it$"):
        attach(Forgetful())


def test_write_is_the_subclass_part() -> None:
    """Called directly, the base class says that write is missing."""
    with pytest.raises(NotImplementedError, match=r"Writer has no write\(event\): override it"):
        Writer().write(ScalarsLogged())


def test_a_failed_writer_is_still_closed(attach: Callable[..., Bus]) -> None:
    """close is called after an error in write, so that files do not stay open."""

    class Failing(Recorder):
        def write(self, event: Event) -> None:
            raise OSError("disk full")

    writer = Failing()
    bus = attach(writer)

    bus.emit(ScalarsLogged(step=1))
    bus.close()

    assert writer.calls == ["open", "close"]


def test_importing_the_writers_imports_no_destination() -> None:
    """rich, tensorboard, numpy and torch are imported by the constructor that needs them."""
    heavy = ("rich", "tensorboard", "numpy", "torch")
    probe = f"import sys, eventloop.writers; print(*(m for m in {heavy} if m in sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == []


def test_public_names_are_sorted_and_there() -> None:
    """`__all__` is the surface of eventloop.writers."""
    names = eventloop.writers.__all__

    assert names == [
        "CSVWriter",
        "ConsoleWriter",
        "EventLogWriter",
        "ImageFileWriter",
        "JSONLWriter",
        "TensorBoardWriter",
        "VisdomWriter",
        "Writer",
        "read_jsonl",
        "trace_graph",
    ]
    assert all(hasattr(eventloop.writers, name) for name in names)
