"""What is wrong with a writer is an error where its class is defined, or where it is attached."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterRun, AfterTrainIter, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import JSONLWriter, TensorBoardWriter, Writer
from tests.conftest import DEADLINE
from tests.support.trainers import build_trainer
from tests.writers.conftest import Account, Attach


def define(**body: Any) -> Any:
    """A class of writers with this body, and a `write` unless it says otherwise."""
    return type("Mine", (Writer,), {"write": lambda self, event: None, **body})


# --- methods ----------------------------------------------------------------------------------------------


def test_a_misspelt_write_is_found_by_the_trainer(tmp_path: Path) -> None:
    """It names the method that is probably meant to be `write`."""

    class Typo(Writer):
        def wriet(self, event: Event) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Typo has no write\(event\): override it; is Typo.wriet meant"):
        build_trainer(work_dir=tmp_path, writers=[Typo()])


def test_write_batch_alone_needs_a_batch(attach: Attach) -> None:
    """Without one nobody would call it."""

    class OneByOne(Writer):
        def write_batch(self, events: list[Event]) -> None:
            raise AssertionError

    with pytest.raises(
        TypeError,
        match=r"OneByOne has write_batch\(events\) and no write\(event\), but its batch is False: set",
    ):
        attach(OneByOne())


def test_a_base_of_ones_own_needs_no_write(attach: Attach) -> None:
    """Only what is attached does; also one that a writer has for itself counts."""

    class Base(Writer):
        def line(self, event: Event) -> str:
            return str(event)

    seen: list[Event] = []
    writer = Base()
    vars(writer)["write"] = seen.append
    bus = attach(writer)
    bus.emit(ScalarsLogged(step=1))
    bus.flush()

    assert seen == [ScalarsLogged(step=1)]


async def _later(self: object, event: Event) -> None:
    """Nobody would await it."""


def _generator(self: object, event: Event) -> Any:
    yield event


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"write": lambda self, trainer, event: None},
            r"Mine.write\(self, trainer, event\) has .*: expected \(self, event\): .*trainer",
        ),
        (
            {"write": lambda self: None},
            r"Mine.write\(self\) has a wrong signature: expected \(self, event\)$",
        ),
        (
            {"write": lambda self, event, *, to: None},
            r"Mine.write\(self, event, \*, to\) has a wrong signature",
        ),
        ({"write": staticmethod(lambda: None)}, r"Mine.write\(\) has a wrong signature: expected \(event\)"),
        ({"write": _later}, "Mine.write is a coroutine function, which is never awaited"),
        ({"write": _generator}, "Mine.write is a generator function: its body would never run"),
        ({"write": 3}, r"Mine.write must be a method, expected \(self, event\), got 3"),
        ({"open": lambda self: None}, r"Mine.open\(self\) has a wrong signature: expected \(self, run\)"),
        ({"write_batch": lambda self: None}, r"Mine.write_batch\(self\) .*: expected \(self, events\)"),
        (
            {"flush": lambda self, run: None},
            r"Mine.flush\(self, run\) has a wrong signature: expected \(self\)",
        ),
        ({"close": lambda: None}, r"Mine.close\(\) has a wrong signature: expected \(self\)"),
    ],
)
def test_methods_that_cannot_be_called_are_refused(body: dict[str, Any], message: str) -> None:
    """Where the class is defined, with its name, the method's, and what it is called with."""
    with pytest.raises(TypeError, match=message):
        define(**body)


def _with_stamp(method: Callable[..., None]) -> Callable[..., None]:
    """Passes on one argument more."""

    @functools.wraps(method)
    def call(*arguments: Any) -> None:
        method(*arguments, 7)

    return call


@pytest.mark.parametrize(
    "write",
    [
        lambda self, event: None,
        lambda self, event, more=3: None,
        lambda *arguments, **options: None,
        staticmethod(lambda event: None),
        classmethod(lambda cls, event: None),
        _with_stamp(lambda self, event, stamp: None),
        functools.partialmethod(lambda self, to, event: None, 3),
        property(lambda self: lambda event: None),
    ],
)
def test_whatever_takes_an_event_is_a_write(write: Any, attach: Attach, account: Account) -> None:
    """Also what a decorator made of it, however that is written."""
    bus = attach(define(write=write)())
    bus.emit(ScalarsLogged(step=1))
    bus.flush()

    assert (account(bus).delivered, account(bus).error) == (1, "")


# --- attributes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "heard"),
    [
        ("scalars_logged", [ScalarsLogged]),
        (ScalarsLogged, [ScalarsLogged]),
        (["scalars_logged"], [ScalarsLogged]),
        ("*", [AfterTrainIter, ScalarsLogged]),
        (("*",), [AfterTrainIter, ScalarsLogged]),
    ],
)
@pytest.mark.parametrize("of_class", [True, False])
def test_events_may_be_one(events: Any, heard: list[type[Event]], of_class: bool, attach: Attach) -> None:
    """A name, a class, "*", or several: a comma that was forgotten changes nothing."""
    seen: list[type[Event]] = []
    write = {"write": lambda self, event: seen.append(type(event))}
    writer = define(events=events, **write)() if of_class else define(**write)()
    writer.events = events
    bus = attach(writer)
    bus.emit(AfterTrainIter())
    bus.emit(ScalarsLogged())
    bus.flush()

    assert seen == heard


def test_events_may_be_declared_later(attach: Attach) -> None:
    """Their names are looked up when the writer is attached, and errors begin with its own."""
    writer = define(events=("mistaken_event",))()

    with pytest.raises(ValueError, match=r"^Mine: unknown event 'mistaken_event'"):
        attach(writer)

    type("MistakenEvent", (Event,), {"__module__": __name__})
    attach(writer)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"events": 3}, "expected an event, by name or class, or a list of events, got 3"),
        ({"offload": "proces"}, "offload must be one of 'auto', 'thread', 'process', got 'proces'"),
        ({"queue": 0}, "queue must be at least 1, got 0"),
        ({"overflow": "spil"}, "unknown overflow 'spil': did you mean 'spill'?"),
        ({"batch": 0}, "batch must be at least 1 event, got 0"),
        ({"budget_us": "2"}, "budget_us must be a number of microseconds, got '2'"),
        ({"stall_timeout": 0}, "stall_timeout must be above 0 seconds, got 0"),
        ({"stall_timeout": "1s"}, "stall_timeout must be a number of seconds, got '1s'"),
        ({"on_error": "rais"}, "unknown on_error 'rais': did you mean 'raise'?"),
    ],
)
def test_bad_attributes_are_refused(attributes: dict[str, Any], message: str, attach: Attach) -> None:
    """Of a class where it is defined, of one writer where it is attached; each begins with the name."""
    with pytest.raises((TypeError, ValueError)) as caught:
        define(**attributes)
    assert str(caught.value) == f"Mine: {message}"

    writer = define()()
    vars(writer).update(attributes)
    with pytest.raises((TypeError, ValueError)) as caught:
        attach(writer)
    assert str(caught.value) == f"Mine: {message}"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), r"Mine: events is empty: name at least one, or '\*' for all"),
        ((3,), "Mine: expected an event name or"),
    ],
)
def test_events_that_are_none_are_refused(events: Any, message: str, attach: Attach) -> None:
    """The names are of the writer, and not of its inside."""
    with pytest.raises(TypeError, match=message):
        attach(define(events=events)())


def test_a_class_may_compute_its_attributes(attach: Attach) -> None:
    """What it gives is looked at when a writer is attached."""
    good = define(events=property(lambda self: ("after_train_iter",)), queue=property(lambda self: 8))()
    bad = define(queue=property(lambda self: 0))()

    assert [row.queue for row in attach(good).plan("after_train_iter")] == [8]
    with pytest.raises(ValueError, match="Mine: queue must be at least 1, got 0"):
        attach(bad)


def test_a_writer_that_cannot_be_sent_is_named() -> None:
    """The message has its class, and no method that its author never wrote."""
    with Bus() as bus, pytest.raises(TypeError, match=r"^Mine cannot be sent to a worker process: "):
        define(offload="process")().attach(bus, lambda: Run(work_dir="run"))


def test_a_stall_timeout_of_a_writer_is_honoured(attach: Attach, account: Account) -> None:
    """One that hangs is no longer waited for after its own."""
    gate = threading.Event()
    bus = attach(define(stall_timeout=0.05, write=lambda self, event: gate.wait(DEADLINE) and None)())

    bus.emit(ScalarsLogged(step=1))
    bus.flush()
    gate.set()

    assert account(bus).error.startswith("[stalled] subscriber Mine spent more than stall_timeout=0.05 s")


def test_on_error_of_a_writer_is_honoured(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """ "log" goes on, "raise" is raised on the training thread, of a class as of one writer."""
    caplog.set_level(logging.CRITICAL)

    def fail(self: Writer, event: Event) -> None:
        raise OSError("no luck")

    bus = attach(define(on_error="log", write=fail)())
    for step in range(3):
        bus.emit(ScalarsLogged(step=step))
    bus.flush()
    assert (account(bus).failed, account(bus).error) == (3, "OSError: no luck")

    raising = define(write=fail)()
    raising.on_error = "raise"
    bus = attach(raising)
    bus.emit(ScalarsLogged())
    with pytest.raises(OSError, match="no luck"):
        bus.close()


@pytest.mark.parametrize(
    ("made", "files"), [(JSONLWriter, "metrics.jsonl"), (TensorBoardWriter, "tensorboard/*")]
)
def test_a_writer_of_another_trainer_is_refused(made: type[Writer], files: str, tmp_path: Path) -> None:
    """It would write the second run into the first one's files; when that is closed it may begin anew."""
    writer = made()
    with Bus() as first, Bus() as second:
        writer.attach(first, lambda: Run(work_dir=str(tmp_path / "first")))
        with pytest.raises(
            ValueError, match=r"Writer is attached to another open bus, .*: make a writer for each, or close"
        ):
            writer.attach(second, lambda: Run(work_dir=str(tmp_path / "second")))

        first.emit(AfterRun())
        first.close()
        writer.attach(second, lambda: Run(work_dir=str(tmp_path / "second")))
        second.emit(AfterRun())

    assert [len([*(tmp_path / name).glob(files)]) for name in ("first", "second")] == [1, 1]
