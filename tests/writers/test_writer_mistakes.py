"""A mistake in a writer is an error where its class is defined, or where it is attached."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event, ScalarsLogged, Timed
from eventloop.events.run import Run
from eventloop.registry import build
from eventloop.writers import (
    JSONLWriter,
    MLflowWriter,
    TensorBoardWriter,
    TimedWriter,
    WandbWriter,
    Writer,
)
from tests.conftest import DEADLINE
from tests.support.trainers import build_trainer
from tests.writers.conftest import Account, Attach, emit, train, write


class Named(Writer):
    """A writer of a user, with an argument of its own."""

    def __init__(self, label: str) -> None:
        self.label = label

    def write(self, event: Event) -> None:
        raise AssertionError


def define(**body: Any) -> Any:
    """A class of writers with this body, and a `write` unless it says otherwise."""
    return type("Mine", (Writer,), {"write": lambda self, event: None, **body})


# --- methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSONLWriter(filenme="a"), "^JSONLWriter has no argument 'filenme': did you mean 'filename'"),  # type: ignore[call-arg]
        (
            lambda: WandbWriter("a", api_key="k"),  # type: ignore[call-arg]
            "^WandbWriter has no argument 'api_key': use .* WANDB_API_KEY",
        ),
        (
            lambda: MLflowWriter(experiment_name="a"),  # type: ignore[call-arg]
            r"^MLflowWriter has no argument 'experiment_name': use experiment=",
        ),
        (lambda: Named(size=3), r"^Named has no argument 'size': known are label$"),  # type: ignore[call-arg]
        (lambda: Named(), r"^Named needs label \(str\), got no argument$"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_argument_is_explained(make: Callable[[], object], message: str) -> None:
    """Of the writers here and of a user's: the error names the argument that exists."""
    with pytest.raises(TypeError, match=message):
        make()


def test_a_constructor_may_take_any_argument() -> None:
    """One with **options, or in a wrapper that takes more than the constructor that it wraps."""

    def doubling(init: Any) -> Any:
        @functools.wraps(init)
        def double(self: Any, half: int) -> None:
            init(self, label=str(2 * half))

        return double

    class Wrapped(Writer):
        @doubling
        def __init__(self, label: str) -> None:
            self.label = label

    class Options(Named):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    wrapped: Any = Wrapped
    assert wrapped(half=2).label == "4"
    assert Options(label="a").label == "a"
    with pytest.raises(TypeError, match=r"^Named has no argument 'lable': did you mean 'label'"):
        Options(lable="a")


def test_a_misspelt_write_is_found_by_the_trainer(tmp_path: Path) -> None:
    """The error names the method that is probably meant to be `write`."""

    class Typo(Writer):
        def wriet(self, event: Event) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Typo has no write\(event\): override it; is Typo.wriet meant"):
        build_trainer(work_dir=tmp_path, writers=[Typo()])


def test_a_timed_writer_needs_its_method() -> None:
    """A misspelt `write_timed` is an error where the writer is made, and a wrong one where its class is defined."""

    class Typo(TimedWriter):
        def write_time(self, events: list[Timed]) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"abstract.* Typo .*write_timed"):
        Typo()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"Late\.write_timed is a coroutine function"):
        type("Late", (TimedWriter,), {"write_timed": _later})


def test_a_missing_write_is_named(attach: Attach) -> None:
    """A write_batch alone needs a batch; without one it would never be called."""

    class Forgetful(Writer):
        pass

    class OneByOne(Writer):
        def write_batch(self, events: list[Event]) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"^Forgetful has no write\(event\): override it$"):
        attach(Forgetful())
    with pytest.raises(TypeError, match=r"OneByOne has write_batch\(events\) .* but its batch is False: set"):
        attach(OneByOne())
    with pytest.raises(NotImplementedError, match=r"Writer has no write\(event\): override it"):
        Writer().write(ScalarsLogged())


async def _later(self: object, event: Event) -> None:
    """A coroutine function, which is never awaited."""


def _generator(self: object, event: Event) -> Any:
    yield event


WRONG = "has a wrong signature: expected"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"write": lambda self, trainer, event: None},
            r"Mine.write\(self, trainer, event\) has .*: expected \(self, event\): .*trainer",
        ),
        ({"write": lambda self: None}, rf"Mine.write\(self\) {WRONG} \(self, event\)$"),
        ({"write": lambda self, event, *, to: None}, rf"Mine.write\(self, event, \*, to\) {WRONG}"),
        ({"write": staticmethod(lambda: None)}, rf"Mine.write\(\) {WRONG} \(event\)"),
        ({"write": _later}, "Mine.write is a coroutine function, which is never awaited"),
        ({"write": _generator}, "Mine.write is a generator function: its body would never run"),
        ({"write": 3}, r"Mine.write must be a method, expected \(self, event\), got 3"),
        ({"open": lambda self: None}, rf"Mine.open\(self\) {WRONG} \(self, run\)"),
        ({"write_batch": lambda self: None}, r"Mine.write_batch\(self\) .*: expected \(self, events\)"),
        ({"flush": lambda self, run: None}, rf"Mine.flush\(self, run\) {WRONG} \(self\)"),
        ({"close": lambda: None}, rf"Mine.close\(\) {WRONG} \(self\)"),
    ],
)
def test_methods_that_cannot_be_called_are_refused(body: dict[str, Any], message: str) -> None:
    """Where the class is defined, with its name, the method's, and the expected parameters."""
    with pytest.raises(TypeError, match=message):
        define(**body)


@pytest.mark.parametrize(
    "write",
    [
        lambda self, event: None,
        lambda self, event, more=3: None,
        lambda *arguments, **options: None,
        staticmethod(lambda event: None),
        classmethod(lambda cls, event: None),
        functools.partialmethod(lambda self, to, event: None, 3),
        property(lambda self: lambda event: None),
    ],
)
def test_whatever_takes_an_event_is_a_write(write: Any, attach: Attach, account: Account) -> None:
    """Also the result of a decorator, however that is written."""
    bus = attach(define(write=write)())
    emit(bus, *train(1))

    assert (account(bus).delivered, account(bus).error) == (1, "")


# --- attributes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "received"),
    [
        ("scalars_logged", [ScalarsLogged]),
        (ScalarsLogged, [ScalarsLogged]),
        (["scalars_logged"], [ScalarsLogged]),
        ("*", [AfterTrainIter, ScalarsLogged]),
        (("*",), [AfterTrainIter, ScalarsLogged]),
    ],
)
@pytest.mark.parametrize("of_class", [True, False])
def test_events_may_be_one(events: Any, received: list[type[Event]], of_class: bool, attach: Attach) -> None:
    """A name, a class, "*", or several: a comma that was forgotten changes nothing."""
    seen: list[type[Event]] = []
    body = {"write": lambda self, event: seen.append(type(event))}
    writer = define(events=events, **body)() if of_class else define(**body)()
    writer.events = events
    emit(attach(writer), AfterTrainIter(), ScalarsLogged())

    assert seen == received


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
        (
            {"offload": "proces"},
            "offload must be 'auto' or 'thread' or 'process', got 'proces': did you mean 'process'?",
        ),
        ({"queue": 0}, "queue must be at least 1, got 0"),
        (
            {"overflow": "spil"},
            "overflow must be 'spill' or 'drop_oldest' or 'drop_newest' or 'latest' or 'block', got 'spil': did you mean 'spill'?",
        ),
        ({"batch": 0}, "batch must be at least 1 event, got 0"),
        ({"budget_us": "2"}, "budget_us, in microseconds, must be a number, got '2'"),
        ({"budget_us": True}, "budget_us, in microseconds, must be a number, got True"),
        ({"budget_us": 0}, "budget_us, in microseconds, must be above 0, got 0"),
        ({"budget_us": float("inf")}, "budget_us, in microseconds, must be a finite number, got inf"),
        ({"linger": -1}, "linger must be at least 0 seconds, got -1"),
        ({"linger": "1s"}, "linger must be a number of seconds, got '1s'"),
        ({"stall_timeout": 0}, "stall_timeout must be above 0 seconds, got 0"),
        ({"stall_timeout": "1s"}, "stall_timeout must be a number of seconds, got '1s'"),
        (
            {"on_error": "rais"},
            "on_error must be 'disable' or 'log' or 'raise', got 'rais': did you mean 'raise'?",
        ),
    ],
)
def test_bad_attributes_are_refused(attributes: dict[str, Any], message: str, attach: Attach) -> None:
    """Of a class where it is defined, of one writer where it is attached; each begins with the name."""
    with pytest.raises((TypeError, ValueError)) as caught:
        define(**attributes)
    assert str(caught.value) == f"Mine: {message}"

    writer = define()()
    vars(writer).update(attributes, name="metrics")
    with pytest.raises((TypeError, ValueError)) as caught:
        attach(writer)
    assert str(caught.value) == f"metrics: {message}"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), r"Mine: events is empty: name at least one, or '\*' for all"),
        ((3,), "Mine: expected an event name or"),
    ],
)
def test_events_that_are_none_are_refused(events: Any, message: str, attach: Attach) -> None:
    """When the writer is attached, as an event may be declared later."""
    with pytest.raises(TypeError, match=message):
        attach(define(events=events)())


def test_a_class_may_compute_its_attributes(attach: Attach) -> None:
    """A property is checked when a writer is attached."""
    good = define(events=property(lambda self: ("after_train_iter",)), queue=property(lambda self: 8))()
    bad = define(queue=property(lambda self: 0))()

    assert [row.queue for row in attach(good).plan("after_train_iter")] == [8]
    with pytest.raises(ValueError, match="Mine: queue must be at least 1, got 0"):
        attach(bad)


def test_a_writer_that_cannot_be_sent_is_named() -> None:
    """The message has its class, and no method that its author never wrote."""
    with Bus() as bus, pytest.raises(TypeError, match=r"^Mine cannot be sent to a worker process: "):
        define(offload="process")().attach(bus, lambda: Run(work_dir="run"))


class Budgeted(JSONLWriter):
    """With a budget of its class."""

    budget_us = 250


def with_budget(writer: Any, budget_us: float | None) -> Any:
    writer.budget_us = budget_us
    return writer


@pytest.mark.parametrize(
    ("writer", "budget"),
    [
        (JSONLWriter(), None),
        (Budgeted(), 250),
        (with_budget(Budgeted(), 40), 40),
        (with_budget(Budgeted(), None), None),
        (build({"type": "JSONLWriter", "budget_us": 7.5}), 7.5),
    ],
)
def test_the_subscription_has_the_budget(writer: Writer, budget: float | None, attach: Attach) -> None:
    """The class's, unless the writer, or its config, has another."""
    assert [row.budget_us for row in attach(writer).plan("scalars_logged")] == [budget]


def test_a_writer_over_its_budget_is_named(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the budget, as a hook is."""
    bus = attach(with_budget(JSONLWriter(), 1e-3))
    for step in range(0, 300, 10):
        emit(bus, *train(*range(step, step + 10)))
    bus.close(DEADLINE)

    (message,) = [r.getMessage() for r in caplog.records if "budget_us=0.001" in r.getMessage()]
    assert "JSONLWriter" in message


def test_a_stall_timeout_of_a_writer_is_honoured(attach: Attach, account: Account) -> None:
    """A writer that hangs is no longer waited for after its own."""
    gate = threading.Event()
    bus = attach(define(stall_timeout=0.05, write=lambda self, event: gate.wait(DEADLINE) and None)())

    emit(bus, *train(1))
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
    emit(bus, *train(1, 2, 3))
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
    """It would write the second run into the first one's files; after the close of the first it may begin again."""
    writer = made()
    with Bus() as first, Bus() as second:
        writer.attach(first, lambda: Run(work_dir=str(tmp_path / "first")))
        with pytest.raises(
            ValueError, match=r"Writer is attached to another open bus, .*: make a writer for each, or close"
        ):
            writer.attach(second, lambda: Run(work_dir=str(tmp_path / "second")))

        write(first, *train(1))
        writer.attach(second, lambda: Run(work_dir=str(tmp_path / "second")))
        emit(second, *train(1))

    assert [len([*(tmp_path / name).glob(files)]) for name in ("first", "second")] == [1, 1]
