"""The bus is a genuine blinker bus: what blinker's users do keeps working, in order."""

from __future__ import annotations

import gc
from typing import Any

import blinker
import pytest

from eventloop.bus import Bus
from eventloop.bus.event_signal import EventSignal
from eventloop.events import AfterTrainIter, Event

EVENT = AfterTrainIter(iter=4)


class Receiver:
    """Notes the sender and the event of each call."""

    def __init__(self, calls: list[Any] | None = None, name: str = "receiver") -> None:
        self.calls = [] if calls is None else calls
        self.name = name

    def __call__(self, sender: Any, event: Event) -> str:
        self.calls.append((self.name, sender, event))
        return self.name


@pytest.fixture
def signal(bus: Bus) -> EventSignal:
    """The signal of after_train_iter."""
    return bus.signal("after_train_iter")


def test_signal_is_a_blinker_signal(bus: Bus, signal: EventSignal) -> None:
    """One blinker signal an event, the same however it is asked for."""
    assert isinstance(signal, blinker.Signal)
    assert bus.signal(AfterTrainIter) is signal
    assert bus.signal("after_step") is signal


def test_foreign_receiver_is_called_blinkers_way(bus: Bus, signal: EventSignal) -> None:
    """`receiver(sender, event=event)`: the sender is the trainer of the emit, else the bus."""
    receiver, trainer = Receiver(), object()
    signal.connect(receiver)

    bus.emit(EVENT)
    bus.emit(EVENT, trainer)

    assert receiver.calls == [("receiver", bus, EVENT), ("receiver", trainer, EVENT)]


def test_foreign_receiver_runs_at_normal_priority(bus: Bus, signal: EventSignal) -> None:
    """It stands among the handlers of priority 50 where it was connected."""
    order: list[str] = []
    bus.subscribe(lambda event: order.append("60"), "after_train_iter", priority=60)
    bus.subscribe(lambda event: order.append("50 before"), "after_train_iter")
    signal.connect(lambda sender, event: order.append("foreign"))
    bus.subscribe(lambda event: order.append("50 after"), "after_train_iter")
    bus.subscribe(lambda event: order.append("40"), "after_train_iter", priority=40)

    bus.emit(EVENT)

    assert order == ["40", "50 before", "foreign", "50 after", "60"]
    assert [row.priority for row in bus.plan("after_train_iter")] == [40, 50, 50, 50, 60]


def test_foreign_receiver_is_wanted(bus: Bus, signal: EventSignal) -> None:
    """The loop builds an event that only a foreign receiver hears."""
    receiver = Receiver()
    assert not bus.wants(AfterTrainIter)
    signal.connect(receiver)
    assert bus.wants(AfterTrainIter)
    signal.disconnect(receiver)
    assert not bus.wants(AfterTrainIter)


def test_send_keeps_the_order(bus: Bus, signal: EventSignal) -> None:
    """blinker's own `send` calls handlers and receivers in the order of the plan."""
    calls: list[Any] = []
    receivers = [Receiver(calls, str(i)) for i in range(20)]
    for receiver in receivers:
        signal.connect(receiver)
    bus.subscribe(lambda trainer, event: calls.append((trainer, event)), "after_train_iter", priority=10)

    results = signal.send("me", event=EVENT)

    assert calls == [("me", EVENT), *((str(i), "me", EVENT) for i in range(20))]
    assert [result for _, result in results[1:]] == [str(i) for i in range(20)]


def test_send_is_counted(bus: Bus, signal: EventSignal) -> None:
    """A handler that `send` called was called, filtered or not."""
    plain = bus.subscribe(lambda event: None, "after_train_iter")
    filtered = bus.subscribe(lambda event: None, "after_train_iter", every=5)

    signal.send(event=EVENT)
    bus.emit(EVENT)

    assert plain.stats.calls == 2
    assert filtered.stats.calls == 2


def test_send_honours_filters(bus: Bus, signal: EventSignal) -> None:
    """A handler's `every` holds for `send` as well."""
    seen: list[Event] = []
    bus.subscribe(seen.append, "after_train_iter", every=2)

    for i in range(4):
        signal.send(event=AfterTrainIter(iter=i))

    assert seen == [AfterTrainIter(iter=1), AfterTrainIter(iter=3)]


def test_connected_to_lasts_for_the_block(bus: Bus, signal: EventSignal) -> None:
    """blinker's test helper connects for a block."""
    receiver = Receiver()
    with signal.connected_to(receiver):
        bus.emit(EVENT)
    bus.emit(EVENT)

    assert len(receiver.calls) == 1


@pytest.mark.parametrize("sending", ["emit", "send"])
def test_muted_is_silent_however_deep(bus: Bus, signal: EventSignal, sending: str) -> None:
    """Inside nested `muted()` nobody hears anything; unlike blinker's flag, the inner exit unmutes nothing."""
    receiver = Receiver()
    signal.connect(receiver)

    def send() -> None:
        if sending == "emit":
            bus.emit(EVENT)
        else:
            signal.send(event=EVENT)

    with signal.muted():
        with signal.muted():
            send()
        send()
        assert signal.is_muted
    assert receiver.calls == []
    send()
    assert len(receiver.calls) == 1


def test_muted_signal_is_not_wanted(bus: Bus, signal: EventSignal) -> None:
    """Nobody builds an event for a muted signal, and a muted handler is not counted."""
    subscription = bus.subscribe(lambda event: None, "after_train_iter")

    with signal.muted():
        assert not bus.wants(AfterTrainIter)
        bus.emit(EVENT)

    assert subscription.stats.calls == 0


def test_muted_signal_hands_nothing_to_the_background(bus: Bus, signal: EventSignal) -> None:
    """Muting covers background subscribers."""
    seen: list[Event] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread")

    with signal.muted():
        bus.emit(EVENT)
    bus.emit(AfterTrainIter(iter=5))
    bus.flush()

    assert seen == [AfterTrainIter(iter=5)]


def test_weak_receiver_dies(bus: Bus, signal: EventSignal) -> None:
    """With `weak=True` a receiver nobody holds is gone from the plan, as in blinker."""
    calls: list[Any] = []
    receiver = Receiver(calls)
    signal.connect(receiver, weak=True)
    bus.emit(EVENT)
    del receiver
    gc.collect()

    bus.emit(EVENT)

    assert len(calls) == 1
    assert not bus.wants(AfterTrainIter)
    assert bus.plan("after_train_iter") == []


def test_weak_bound_method_dies_with_its_object(bus: Bus, signal: EventSignal) -> None:
    """A weakly connected method lives as long as its object."""
    calls: list[Any] = []
    receiver = Receiver(calls)
    signal.connect(receiver.__call__, weak=True)
    bus.emit(EVENT)
    del receiver
    gc.collect()

    bus.emit(EVENT)

    assert len(calls) == 1


def test_receiver_is_connected_strongly_by_default(bus: Bus, signal: EventSignal) -> None:
    """Unlike blinker's, a lambda connected without a word about it is called."""
    calls: list[Any] = []
    signal.connect(Receiver(calls))
    gc.collect()

    bus.emit(EVENT)

    assert len(calls) == 1


@pytest.mark.parametrize("sending", ["emit", "send"])
def test_receiver_of_one_sender_hears_only_that_one(bus: Bus, signal: EventSignal, sending: str) -> None:
    """`connect(receiver, sender=x)` is called for x alone."""
    receiver, mine, other = Receiver(), Receiver(), Receiver()
    signal.connect(receiver, sender=mine)

    for sender in (mine, other, None):
        if sending == "emit":
            bus.emit(EVENT, sender)
        else:
            signal.send(sender, event=EVENT)

    assert receiver.calls == [("receiver", mine, EVENT)]


def test_receiver_of_two_senders_is_called_once_each(bus: Bus, signal: EventSignal) -> None:
    """Connecting twice with different senders is one receiver; disconnecting one sender leaves the other."""
    receiver, first, second = Receiver(), Receiver(), Receiver()
    signal.connect(receiver, sender=first)
    signal.connect(receiver, sender=second)

    signal.disconnect(receiver, sender=first)
    bus.emit(EVENT, first)
    bus.emit(EVENT, second)

    assert receiver.calls == [("receiver", second, EVENT)]


def test_receiver_connected_twice_is_called_once(bus: Bus, signal: EventSignal) -> None:
    """As in blinker, the same function is one receiver, at its first place."""
    order: list[Any] = []
    first = Receiver(order, "first")
    signal.connect(first)
    signal.connect(Receiver(order, "second"))
    signal.connect(first)

    bus.emit(EVENT)

    assert [name for name, _, _ in order] == ["first", "second"]


def test_connect_via_decorates(bus: Bus, signal: EventSignal) -> None:
    """blinker's decorator connects for one sender."""
    calls: list[Any] = []

    @signal.connect_via(bus)
    def receiver(sender: Any, event: Event) -> None:
        calls.append(sender)

    bus.emit(EVENT)
    bus.emit(EVENT, object())

    assert calls == [bus]


def test_meta_signals_tell_of_connections(signal: EventSignal) -> None:
    """`receiver_connected` works as in blinker."""
    told: list[Any] = []
    receiver = Receiver()
    watch: Any = lambda signal, **details: told.append((signal, details["receiver"]))
    signal.receiver_connected.connect(watch, weak=False)

    signal.connect(receiver)

    assert told == [(signal, receiver)]
