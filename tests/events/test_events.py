"""Events: names, immutability, encoding, and declaring new ones."""

from __future__ import annotations

import gc
from typing import Any, cast

import msgspec
import pytest
from msgspec import StructMeta

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, BeforeTrainIter, Event, ScalarsLogged
from eventloop.events.base import OWN_MODULES, event_name, known_events, snake_case
from eventloop.events.catalogue import declared_events, find_event
from eventloop.events.validation import refuse_live_fields
from tests.support.internals import substitute


class LunchServed(Event):
    """A user's event."""

    dish: str = "soup"


class Failed(Event):
    """An event whose name is a word of the plans' own code."""


class Import(Event):
    """An event whose name is a keyword."""


@pytest.mark.parametrize(
    ("name", "snake"),
    [("AfterTrainIter", "after_train_iter"), ("OOMCaught", "oom_caught"), ("Step2Done", "step2_done")],
)
def test_class_name_becomes_snake_case(name: str, snake: str) -> None:
    """A run of capitals is one word; a digit belongs to the word before it."""
    assert snake_case(name) == snake


@pytest.mark.parametrize(
    ("alias", "name"), [("before_step", "before_train_iter"), ("after_step", "after_train_iter")]
)
def test_alias_means_the_train_iteration(alias: str, name: str) -> None:
    """`before_step` and `after_step` are the train iter pair."""
    assert find_event(alias) is find_event(name)


def test_catalogue_holds_every_family() -> None:
    """Each event the design names is declared."""
    phases = [f"{when}_{mode}" for mode in ("train", "val", "test") for when in ("before", "after")]
    expected = {f"{phase}{unit}" for phase in phases for unit in ("", "_epoch", "_iter")}
    expected |= {
        "before_predict",
        "after_predict",
        "before_predict_iter",
        "after_predict_iter",
        "batch_predicted",
    }
    expected |= {"before_run", "after_run", "after_backward", "before_optimizer_step", "after_optimizer_step"}
    expected |= {"optimizer_step_skipped", "before_save_checkpoint", "checkpoint_saved", "checkpoint_failed"}
    expected |= {"after_load_checkpoint", "scalars_logged", "image_logged", "histogram_logged", "text_logged"}
    expected |= {"run_info", "stop_requested", "preemption_requested"}
    expected |= {"command_applied", "command_refused", "checkpoint_evaluated", "rolled_back"}
    expected |= {
        "handler_failed",
        "events_dropped",
        "slow_handler",
        "loader_stall",
        "slow_rank",
        "invalid_loss",
    }

    own = {event_name(e) for e in declared_events() if e.__module__ in OWN_MODULES}

    assert own == expected


def test_own_events_hold_no_live_objects() -> None:
    """No event of eventloop has a field for a tensor or a module; a process that starts does not check this."""
    for event_type in declared_events():
        if event_type.__module__ in OWN_MODULES:
            refuse_live_fields(event_type)


def test_event_is_immutable_and_built_by_keyword() -> None:
    """A fact does not change, and the order of its fields is no contract."""
    event: Any = AfterTrainIter(iter=3)
    build = cast(Any, AfterTrainIter)

    with pytest.raises(AttributeError, match="immutable"):
        event.iter = 4
    with pytest.raises(TypeError, match="positional"):
        build(3)


@pytest.mark.parametrize("event", [AfterTrainIter(iter=3), LunchServed()])
def test_event_is_untracked_by_the_garbage_collector(event: Event) -> None:
    """An event built in a step never wakes the collector, a user's event included."""
    assert not gc.is_tracked(event)


def test_every_event_survives_encoding() -> None:
    """Any event can cross a process or a file and is the same on the other side; its tag is its snake_case name."""
    events = [event_type() for event_type in declared_events() if event_type.__module__ in OWN_MODULES]
    decoder = msgspec.msgpack.Decoder(type=cast(Any, _union()))

    decoded = [decoder.decode(msgspec.msgpack.encode(event)) for event in events]

    assert decoded == events
    assert [msgspec.json.decode(msgspec.json.encode(event))["event"] for event in events] == [
        event_name(type(event)) for event in events
    ]


def _union() -> object:
    union: Any = AfterTrainIter
    for event_type in declared_events():
        if event_type.__module__ in OWN_MODULES:
            union |= event_type
    return union


def test_declared_subclass_is_usable_by_name(bus: Bus) -> None:
    """Subclassing Event declares an event that `on` finds by name."""
    seen: list[Event] = []
    bus.on("lunch_served")(seen.append)

    bus.emit(LunchServed(dish="pie"))

    assert seen == [LunchServed(dish="pie")]


@pytest.mark.parametrize("event", [Failed(), Import()])
def test_any_name_of_an_event_can_be_emitted(bus: Bus, event: Event) -> None:
    """Neither a keyword nor a word of the compiled plans gets in the way of an event's name."""
    seen: list[Event] = []
    bus.subscribe(seen.append, type(event))

    for _ in range(100):  # the measured runs and the compiled ones
        bus.emit(event)

    assert seen == [event] * 100


def test_names_of_eventloop_cannot_be_redeclared(bus: Bus) -> None:
    """A user's class may not take the name of an event of eventloop, nor another name of one."""
    with pytest.raises(ValueError, match="'after_train_iter', which is an event of eventloop"):
        StructMeta("AfterTrainIter", (Event,), {"__module__": "mine"})
    with pytest.raises(ValueError, match="'before_step', which is another name of 'before_train_iter'"):
        StructMeta("BeforeStep", (Event,), {"__module__": "mine"})

    assert bus.signal("before_step").event_type is BeforeTrainIter


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"frozen": False}, "class Oddity is not frozen, and its events are read in the background"),
        ({"tag": "strange"}, "class Oddity has the tag 'strange', and is known as 'oddity'"),
    ],
    ids=["frozen", "tag"],
)
def test_a_class_that_is_no_event_is_refused(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], message: str
) -> None:
    """Events are immutable, and have the name of their class, whoever reads them: where one is first asked for."""
    substitute(monkeypatch, "base._BY_NAME", {name: [*known] for name, known in known_events().items()})

    class Oddity(Event, **config):
        """Not as events are."""

    with pytest.raises(TypeError, match=message):
        bus.subscribe(lambda event: None, Oddity)
    with pytest.raises(TypeError, match=message):
        bus.emit(Oddity())
    with pytest.raises(TypeError, match=message):
        bus.subscribe(lambda event: None, "oddity", offload="thread")


def test_a_name_declared_twice() -> None:
    """A notebook cell run twice leaves one event of that name; one that two modules declare is ambiguous."""
    for module in ("kitchen", "kitchen"):
        last = StructMeta("TeaTime", (Event,), {"__module__": module})
    assert cast(Any, find_event("tea_time")) is last
    StructMeta("TeaTime", (Event,), {"__module__": "office"})

    with pytest.raises(ValueError, match="'tea_time' is declared by kitchen and office"):
        find_event("tea_time")


@pytest.mark.parametrize(
    ("event_type", "mode"),
    [("before_train_iter", "train"), ("after_val", "val"), ("after_test_epoch", "test")],
)
def test_phase_events_know_their_mode(event_type: str, mode: str) -> None:
    """`event.mode` says which of the three phases an event belongs to."""
    assert cast(Any, find_event(event_type)).mode == mode


def test_logging_events_are_born_in_the_background() -> None:
    """Exactly the logging family is made on the background side."""
    born = {event_name(e) for e in declared_events() if e.background_born}

    assert born == {"scalars_logged", "image_logged", "histogram_logged", "text_logged", "run_info"}
    assert ScalarsLogged(step=3, scalars={"loss": 1.0}).step == 3
