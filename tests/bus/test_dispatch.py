"""Emitting: order, signatures, and what a handler that changes the bus meanwhile changes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from msgspec import StructMeta

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, BeforeTrainIter, Event

EVENT = AfterTrainIter(iter=4, epoch=1)


def record(bus: Bus, calls: list[str], name: str, **options: Any) -> None:
    bus.subscribe(lambda event: calls.append(name), "after_train_iter", name=name, **options)


def test_ties_run_in_registration_order(bus: Bus) -> None:
    """Fifty handlers of one priority run as they were registered, in measured runs and compiled ones."""
    calls: list[str] = []
    names = [str(i) for i in range(50)]
    for name in names:
        record(bus, calls, name)

    for _ in range(100):
        bus.emit(EVENT)

    assert calls == names * 100


def test_plan_is_the_order_that_runs(bus: Bus) -> None:
    """`bus.plan` lists the sync handlers as they run, then the background subscribers."""
    calls: list[str] = []

    async def later(event: Event) -> None:
        pass

    bus.subscribe(later, "after_train_iter", every=5)
    for name, priority in [("x", 60), ("y", 40), ("z", 40)]:
        record(bus, calls, name, priority=priority)
    bus.emit(EVENT)

    rows = [(row.order, row.priority, row.name, row.filter, row.runs_on) for row in bus.plan(AfterTrainIter)]

    assert [row[2] for row in rows[:3]] == calls
    assert rows == [
        (1, 40, "y", "", "sync"),
        (2, 40, "z", "", "sync"),
        (3, 60, "x", "", "sync"),
        (0, 50, "later", "every=5", "loop"),
    ]


def test_printed_bus_shows_every_row(bus: Bus) -> None:
    """`print(bus)` is the table of the handlers in the order they run: events as a run emits them, then those that come
    at any time; background subscribers with queue and overflow."""

    async def later(event: Event) -> None:
        pass

    assert str(Bus()) == "a bus nobody listens to"
    record(bus, [], "second", priority=70, every=10)
    record(bus, [], "first", priority=30)
    assert [line.split() for line in str(bus).splitlines() if line[0] != "-"] == [
        ["event", "order", "priority", "handler", "runs", "on", "filter"],
        ["after_train_iter", "1", "30", "first", "sync"],
        ["2", "70", "second", "sync", "every=10"],
    ]
    bus.subscribe(later, "checkpoint_saved", "after_run", queue=2000)
    for event in ("after_train", "after_val", "after_backward", "before_run"):
        bus.subscribe(lambda event: None, event, name=event[::-1])
    bus.subscribe(later, "before_run", overflow="latest", name="newest")

    lines = [line.split() for line in str(bus).splitlines()]

    assert lines[0][-2:] == ["queue", "overflow"]
    assert [line[0] for line in lines[2:] if line[0] not in "-2"] == [
        "before_run",
        "after_train_iter",
        "after_backward",
        "after_val",
        "after_train",
        "after_run",
        "checkpoint_saved",
    ]
    assert lines[3] == ["-", "-", "newest", "loop", "1", "latest"]
    assert lines[-1] == ["checkpoint_saved", "-", "-", "later", "loop", "2,000", "spill"]


def test_signatures_may_be_mixed(bus: Bus) -> None:
    """A handler takes `(event)` or `(trainer, event)`, and is given just that."""
    trainer, calls = object(), []
    bus.subscribe(lambda event: calls.append(event), "after_train_iter")
    bus.subscribe(lambda trainer, event: calls.append((trainer, event)), "after_train_iter")
    bus.subscribe(lambda *both: calls.append(both), "after_train_iter")
    bus.subscribe(lambda event, more=1: calls.append((event, more)), "after_train_iter")

    bus.emit(EVENT, trainer)

    assert calls == [EVENT, (trainer, EVENT), (trainer, EVENT), (EVENT, 1)]


def test_one_subscription_may_name_several_events(bus: Bus) -> None:
    """Names and classes mix; naming one twice subscribes once."""
    seen: list[Event] = []
    bus.on("after_train_iter", BeforeTrainIter, "after_step")(seen.append)

    bus.emit(BeforeTrainIter())
    bus.emit(EVENT)

    assert seen == [BeforeTrainIter(), EVENT]


def test_wildcard_hears_every_event(bus: Bus) -> None:
    """'*' subscribes to all events, one that is declared afterwards included."""
    seen: list[Event] = []
    bus.subscribe(seen.append, "*")
    declared: Any = StructMeta("DeclaredLater", (Event,), {"__module__": "mine"})

    bus.emit(EVENT)
    bus.emit(declared())

    assert seen == [EVENT, declared()]
    assert bus.wants(declared)


def test_handler_added_during_an_emit_waits_for_the_next(bus: Bus) -> None:
    """An emit under way keeps the plan it began with."""
    calls: list[str] = []

    def add(event: Event) -> None:
        if not calls:
            record(bus, calls, "added")
        calls.append("add")

    bus.subscribe(add, "after_train_iter", priority=10)
    bus.emit(EVENT)
    assert calls == ["add"]
    bus.emit(EVENT)
    assert calls == ["add", "add", "added"]


@pytest.mark.parametrize("warm", [0, 100])
def test_handler_removed_during_an_emit_runs_a_last_time(bus: Bus, warm: int) -> None:
    """Removal takes effect at the next emit, too, also that of a receiver connected blinker's way."""
    calls: list[str] = []
    signal = bus.signal("after_train_iter")

    def receiver(sender: Any, event: Event) -> None:
        calls.append("receiver")

    last = bus.subscribe(lambda event: calls.append("last"), "after_train_iter")
    signal.connect(receiver)
    for _ in range(warm):
        bus.emit(EVENT)
    calls.clear()
    bus.subscribe(lambda event: last.cancel(), "after_train_iter", priority=10)
    bus.subscribe(lambda event: signal.disconnect(receiver), "after_train_iter", priority=10)

    bus.emit(EVENT)
    bus.emit(EVENT)

    assert calls == ["last", "receiver"]
    assert last.stats.calls == warm + 1


def test_nested_emit_runs_at_once(bus: Bus) -> None:
    """A handler that emits is resumed when the inner event has reached everybody."""
    calls: list[str] = []

    def outer(event: Event) -> None:
        calls.append("outer begins")
        bus.emit(AfterVal())
        calls.append("outer ends")

    bus.subscribe(outer, "after_train_iter")
    bus.subscribe(lambda event: calls.append("inner"), "after_val")
    bus.emit(EVENT)

    assert calls == ["outer begins", "inner", "outer ends"]


def test_off_removes_every_subscription_of_a_function(bus: Bus) -> None:
    """`off` finds bound methods and functions by equality."""
    seen: list[Event] = []
    bus.on("after_train_iter")(seen.append)
    bus.on("after_val", priority=3)(seen.append)

    bus.off(seen.append)
    bus.emit(EVENT)
    bus.emit(AfterVal())

    assert seen == []


def test_cancelled_is_final(bus: Bus) -> None:
    """Leaving the block of a subscription cancels it; neither cancelling again nor `resume` changes that."""
    seen: list[Event] = []
    with bus.subscribe(seen.append, "after_train_iter") as subscription:
        assert bus.wants(AfterTrainIter)
        bus.emit(EVENT)
    assert not bus.wants(AfterTrainIter)
    subscription.cancel()
    subscription.resume()
    bus.emit(EVENT)

    assert seen == [EVENT]
    assert repr(subscription) == "<Subscription list.append to after_train_iter (cancelled)>"


def test_paused_handler_comes_back_to_its_place(bus: Bus) -> None:
    """`pause` lets events pass by, also of a type that is emitted for the first time; `resume` restores the place."""
    calls: list[str] = []
    subscription = bus.subscribe(lambda event: calls.append("first"), "*")
    record(bus, calls, "second")
    declared: Any = StructMeta("DeclaredWhilePaused", (Event,), {"__module__": "mine"})

    subscription.pause()
    bus.emit(EVENT)
    bus.emit(declared())
    assert calls == ["second"]
    subscription.resume()
    bus.emit(EVENT)
    bus.emit(declared())

    assert calls == ["second", "first", "second", "first"]


def test_lambdas_and_bound_methods_are_held_strongly(bus: Bus) -> None:
    """A handler nobody else holds goes on being called."""

    class Counter:
        calls = 0

        def count(self, event: Event) -> None:
            type(self).calls += 1

    bus.subscribe(Counter().count, "after_train_iter")
    bus.signal("after_train_iter").connect(lambda sender, event: Counter().count(event))
    gc.collect()
    bus.emit(EVENT)

    assert Counter.calls == 2
