"""Mistakes surface at registration: at the line that made them, with what to do."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event


def sync(event: Event) -> None: ...


async def later(event: Event) -> None: ...


def three(trainer: Any, event: Event, more: int) -> None: ...


def with_trainer(trainer: Any, event: Event) -> None: ...


def swapped(event: Event, trainer: Any) -> None: ...


def mmengine(runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None: ...


def mmengine_saving(runner: Any, checkpoint: dict[str, Any]) -> None: ...


def trainer_alone(trainer: Any) -> None: ...


def needs_keyword(event: Event, *, level: int) -> None: ...


def nothing() -> None: ...


def with_defaults(trainer: Any = None, event: Any = None) -> None: ...


def generator(event: Event) -> Iterator[int]:
    yield 1


async def async_generator(event: Event) -> AsyncIterator[int]:
    yield 1


class Yields:
    def __call__(self, event: Event) -> Iterator[int]:
        yield 1


class YieldsLater:
    async def __call__(self, event: Event) -> AsyncIterator[int]:
        yield 1


def decorated(method: Callable[..., None]) -> Callable[..., None]:
    """A decorator whose wrapper shows the parameters of the method."""

    @functools.wraps(method)
    def wrapper(self: Any, trainer: Any, event: Any) -> None:
        method(self, event)

    return wrapper


class Methods:
    """Methods whose parameters have the usual names, and which are not called in the usual way."""

    def keyword(self, trainer: Any, *, event: Any) -> None: ...

    def default(self, trainer: Any, event: Any = None) -> None: ...

    def generator(self, trainer: Any, event: Any) -> Iterator[int]:
        yield 1

    async def async_generator(self, trainer: Any, event: Any) -> AsyncIterator[int]:
        yield 1

    @decorated
    def wrapped(self, trainer: Any) -> None: ...


async def wants_trainer(trainer: Any, event: Event) -> None: ...


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("after_trian_iter", "unknown event 'after_trian_iter': did you mean 'after_train_iter'?"),
        ("qqqq", "unknown event 'qqqq': known are after_backward, "),
        (Event, "Event is a base class and never emitted: pass an event"),
        (int, "expected an event name or an Event subclass, got <class 'int'>"),
        (AfterTrainIter(), "expected an event name or an Event subclass, got AfterTrainIter"),
        (None, "expected an event name or an Event subclass, got None"),
        ("scalars_logged", "sync is a sync handler, but scalars_logged is created in the background"),
    ],
)
def test_what_is_no_event_is_refused(bus: Bus, event: Any, message: str) -> None:
    """A misspelled name gets a suggestion; what cannot be subscribed to gets the reason."""
    with pytest.raises((TypeError, ValueError), match=message):
        bus.subscribe(sync, event)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (three, r"three\(.*\).* has a wrong signature: expected \(trainer, event\) or \(event\)"),
        (swapped, "the trainer comes first"),
        (
            mmengine,
            "the signature is that of MMEngine; here batch_idx and metrics are the event's, batch and",
        ),
        (mmengine_saving, "the signature is that of MMEngine; here the checkpoint is trainer.checkpoint"),
        (trainer_alone, "a handler with one required parameter gets the event"),
        (with_defaults, "gets the event; parameters with a default are not counted"),
        (needs_keyword, "the call does not pass level"),
        (
            nothing,
            r"nothing\(\).* has a wrong signature.*: the trainer is an argument, not an attribute of a hook",
        ),
        (generator, "generator is a generator function: its body would never run"),
        (async_generator, "async_generator is a generator function: its body would never run"),
        (Yields(), "Yields.* is a generator function: its body would never run"),
        (YieldsLater(), "YieldsLater.* is a generator function: its body would never run"),
        (Methods().keyword, "the call does not pass event"),
        (Methods().default, "a handler with one required parameter gets the event"),
        (Methods().generator, "Methods.generator is a generator function: its body would never run"),
        (Methods().async_generator, "Methods.async_generator is a generator function"),
        (Methods().wrapped, "a handler with one required parameter gets the event"),
        (wants_trainer, r"must take only \(event\): the trainer is passed only to sync handlers"),
    ],
)
def test_wrong_handler_is_refused(bus: Bus, fn: Any, message: str) -> None:
    """The signature is checked once, here, and never when the event comes."""
    with pytest.raises(TypeError, match=message):
        bus.subscribe(fn, "after_train_iter")


@pytest.mark.parametrize(
    "options", [{}, {"queue": 8}, {"offload": "thread"}, {"loop": 1}, {"budget_us": 0}, {"every": 0}], ids=str
)
def test_a_handler_that_is_not_callable(bus: Bus, options: dict[str, Any]) -> None:
    """Arguments in the wrong order are refused as that, whichever options there are."""
    fn: Any = "after_train_iter"
    event: Any = wants_trainer

    with pytest.raises(TypeError, match="a handler must be callable, got 'after_train_iter'"):
        bus.subscribe(fn, event, **options)
    with pytest.raises(TypeError, match="a handler must be callable, got 'after_train_iter'"):
        bus.on("after_val", **options)(fn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 101}, "priority must be between 0"),
        ({"priority": "hgih"}, "unknown priority name 'hgih': did you mean HIGH?"),
        ({"priority": "70"}, "priority must be an int or a name, got '70': write priority=70"),
        ({"priority": None}, "priority must be a Priority, its name or an int"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": 2.0}, "every must be an int, got 2.0"),
        ({"every": True}, "every must be an int, got True"),
        ({"start": -1}, "start must be at least 0, got -1"),
        ({"start": "3"}, "start must be an int, got '3'"),
        ({"once": 1}, "once must be True or False, got 1"),
        ({"when": "iter > 3"}, "when must be a function \\(event\\), got 'iter > 3'"),
        (
            {"when": nothing},
            r"when is called with \(event\), but the signature is nothing\(\) .*: too many positional",
        ),
        (
            {"when": with_trainer},
            r"when is called with \(event\), but the signature is .* missing a required argument: 'event'",
        ),
        (
            {"when": later},
            "when must be a plain function of the event, got the coroutine function <function later",
        ),
        ({"name": ""}, "name must be a str that is not empty, got ''"),
        ({"name": 7}, "name must be a str that is not empty, got 7"),
        (
            {"offload": "thraed"},
            "offload must be None or 'thread' or 'process', got 'thraed': did you mean 'thread'?",
        ),
        ({"offload": 3}, "offload must be None or 'thread' or 'process', got 3"),
    ],
)
def test_bad_option_is_refused(bus: Bus, options: dict[str, Any], message: str) -> None:
    """The error says what was expected and what came."""
    with pytest.raises((TypeError, ValueError), match=message):
        bus.subscribe(sync, "after_train_iter", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": 0}, "queue must be at least 1, got 0"),
        ({"queue": 1.5}, "queue must be an int, got 1.5"),
        ({"queue": True}, "queue must be an int, got True"),
        ({"overflow": "drop"}, "overflow must be 'spill' or .*, got 'drop'"),
        (
            {"overflow": "drop_oldset"},
            "overflow must be 'spill' or .*, got 'drop_oldset': did you mean 'drop_oldest'?",
        ),
        ({"on_error": "rasie"}, "on_error must be .*, got 'rasie': did you mean 'raise'?"),
        ({"stall_timeout": 0}, "stall_timeout must be above 0 seconds, got 0"),
        ({"stall_timeout": float("nan")}, "stall_timeout must be above 0 seconds, got nan"),
        ({"stall_timeout": "1s"}, "stall_timeout must be a number of seconds, got '1s'"),
        ({"batch": 0}, "batch must be at least 1 event, got 0"),
        ({"batch": "all"}, "batch must be True, False or a number of events, got 'all'"),
        ({"offload": "thread"}, "later is a coroutine function and runs on the background loop"),
    ],
)
def test_bad_background_option_is_refused(bus: Bus, options: dict[str, Any], message: str) -> None:
    """So are the options of a background subscriber."""
    with pytest.raises((TypeError, ValueError), match=message):
        bus.subscribe(later, "after_train_iter", **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("queue", 8),
        ("overflow", "block"),
        ("on_error", "log"),
        ("stall_timeout", 1.0),
        ("batch", True),
        ("on_close", print),
        ("on_flush", print),
    ],
)
def test_background_option_of_a_sync_handler_is_refused(bus: Bus, option: str, value: Any) -> None:
    """An option that would do nothing is an error that says how to make it do something."""
    options = {option: value}

    with pytest.raises(ValueError, match=f"sync is a sync handler, .* {option} would have no effect"):
        bus.subscribe(sync, "after_train_iter", **options)


@pytest.mark.parametrize(("fn", "offload"), [(later, None), (sync, "thread"), (sync, "process")])
def test_priority_has_no_effect_in_the_background(bus: Bus, fn: Any, offload: Any) -> None:
    """No order is kept among background subscribers, so that a priority is refused there."""
    with pytest.raises(ValueError, match=r"runs in the background: priority=70 would have no effect"):
        bus.subscribe(fn, "after_train_iter", priority=70, offload=offload)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 3}, r"has no argument 'interval': use every="),
        ({"prioritty": 3}, r"has no argument 'prioritty': did you mean 'priority'"),
        ({"nonsense": 3}, r"has no argument 'nonsense': known are batch, budget_us, every, "),
    ],
)
def test_unknown_arguments_are_refused(options: dict[str, Any], message: str, bus: Bus) -> None:
    """Arguments of `on`, `subscribe` and `Bus` that do not exist: the error names the right ones."""
    with pytest.raises(TypeError, match=f"^Bus.on {message}"):
        bus.on("after_train_iter", **options)
    with pytest.raises(TypeError, match=f"^Bus.subscribe {message}"):
        bus.subscribe(sync, "after_train_iter", **options)
    with pytest.raises(TypeError, match=r"^Bus has no argument 'drain': known are drain_timeout$"):
        Bus(drain=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Bus.subscribe needs fn \(Callable.*\), got no argument$"):
        bus.subscribe()  # type: ignore[call-arg]


def test_other_mistakes_of_a_registration_are_refused(bus: Bus) -> None:
    """Each error says what to write instead, and a refused subscription leaves nothing behind."""
    bare: Any = bus.on

    with pytest.raises(TypeError, match="sync subscribes to no event: name at least one, or '\\*' for all"):
        bus.on()(sync)
    with pytest.raises(TypeError, match=r'write @bus.on\("after_train_iter"\), not @bus.on'):
        bare(sync)
    with pytest.raises(TypeError, match=r'bus.on takes events, got .*sync: .* bus.subscribe\(function, "aft'):
        bare("after_train_iter", sync)
    with pytest.raises(ValueError, match="unknown event 'nope'"):
        bus.subscribe(sync, "after_train_iter", "*", "nope")
    with pytest.raises(ValueError, match="sync is not subscribed to this bus"):
        bus.off(sync)
    with pytest.raises(TypeError, match=r"later is a coroutine function: use bus\.subscribe"):
        bus.signal("after_train_iter").connect(later)
    assert bus.stats() == []
    assert not bus.wants(AfterTrainIter)
    bus.close()
    with pytest.raises(RuntimeError, match="cannot subscribe later: the bus is closed"):
        bus.subscribe(later, "after_train_iter")


def test_name_that_is_taken_is_refused(bus: Bus) -> None:
    """A name is a key of the account: two subscriptions do not share one."""
    bus.subscribe(sync, "after_train_iter", name="logger")

    with pytest.raises(ValueError, match="already has a subscription named 'logger'"):
        bus.subscribe(later, "after_val", name="logger")


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        ("after_train_iter", r"emit takes an event, built by keyword as .*\(.*\), got 'after_train_iter'"),
        (AfterTrainIter, r"bus\.emit takes an event, built by keyword as .*, got <class '.*AfterTrainIter'>"),
        (None, r"bus\.emit takes an event, .*, got None"),
        (Event(), "Event is a base class and never emitted"),
    ],
)
def test_emitting_what_is_no_event_is_refused(bus: Bus, emitted: Any, message: str) -> None:
    """A name, a class, the base class, None: none of them is a fact."""
    with pytest.raises(TypeError, match=message):
        bus.emit(emitted)


class Service:
    def method(self, event: Event) -> None:
        pass

    async def __call__(self, event: Event) -> None:
        pass


@pytest.mark.parametrize(
    ("fn", "options", "name", "runs_on"),
    [
        (sync, {}, "sync", "sync"),
        (sync, {"offload": "thread"}, "sync", "thread"),
        (later, {}, "later", "loop"),
        (functools.partial(sync), {}, "sync", "sync"),
        (functools.partial(later), {}, "later", "loop"),
        (Service().method, {}, "Service.method", "sync"),
        (Service(), {}, "Service", "loop"),
        ([].append, {}, "list.append", "sync"),
    ],
)
def test_a_function_decides_the_name_and_where_it_runs(
    bus: Bus, fn: Callable[..., Any], options: dict[str, Any], name: str, runs_on: str
) -> None:
    """Plain functions are sync, coroutine functions belong to the loop, `offload` sends off."""
    subscription = bus.subscribe(fn, "after_train_iter", **options)

    assert (subscription.name, subscription.stats.runs_on) == (name, runs_on)


def test_names_tell_subscriptions_apart(bus: Bus) -> None:
    """A lambda has a file and a line; the second subscription of a function, which `on` returns unchanged, a number."""
    names = [bus.subscribe(sync, "after_train_iter").name for _ in range(3)]

    assert bus.on("after_val", name="other")(sync) is sync
    assert names == ["sync", "sync #2", "sync #3"]
    assert "(test_registration.py:" in bus.subscribe(lambda event: None, "after_train_iter").name
