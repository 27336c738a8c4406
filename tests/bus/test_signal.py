"""The bus is a genuine blinker bus: what blinker's users do keeps working, in order."""

from __future__ import annotations

import gc
from typing import Any

import blinker
import pytest

from eventloop.bus import Bus
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
def signal(bus: Bus) -> blinker.Signal:
    """The signal of after_train_iter."""
    return bus.signal("after_train_iter")


def test_signal_is_a_blinker_signal(bus: Bus, signal: blinker.Signal) -> None:
    """One blinker signal an event, the same however it is asked for."""
    assert isinstance(signal, blinker.Signal)
    assert bus.signal(AfterTrainIter) is signal
    assert bus.signal("after_step") is signal


def test_foreign_receiver_is_called_blinkers_way(bus: Bus, signal: blinker.Signal) -> None:
    """`receiver(sender, event=event)`: the sender is the trainer of the emit, else the bus."""
    receiver, trainer = Receiver(), object()
    signal.connect(receiver)

    bus.emit(EVENT)
    bus.emit(EVENT, trainer)

    assert receiver.calls == [("receiver", bus, EVENT), ("receiver", trainer, EVENT)]


def test_foreign_receiver_runs_at_normal_priority(bus: Bus, signal: blinker.Signal) -> None:
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


def test_send_keeps_the_order(bus: Bus, signal: blinker.Signal) -> None:
    """blinker's own `send` calls handlers and receivers in the order of the plan."""
    calls: list[Any] = []
    receivers = [Receiver(calls, str(i)) for i in range(20)]
    for receiver in receivers:
        signal.connect(receiver)
    bus.subscribe(lambda trainer, event: calls.append((trainer, event)), "after_train_iter", priority=10)

    results = signal.send("me", event=EVENT)

    assert calls == [("me", EVENT), *((str(i), "me", EVENT) for i in range(20))]
    assert [result for _, result in results[1:]] == [str(i) for i in range(20)]


def test_send_counts_and_honours_filters(bus: Bus, signal: blinker.Signal) -> None:
    """A handler that `send` called was called; its `every` holds for `send` as well."""
    seen: list[Event] = []
    plain = bus.subscribe(lambda event: None, "after_train_iter")
    filtered = bus.subscribe(seen.append, "after_train_iter", every=2)

    for i in range(4):
        signal.send(event=AfterTrainIter(iter=i))
    bus.emit(EVENT)

    assert seen == [AfterTrainIter(iter=1), AfterTrainIter(iter=3)]
    assert (plain.stats.calls, filtered.stats.calls) == (5, 2)


def test_connecting_and_disconnecting(bus: Bus, signal: blinker.Signal) -> None:
    """A receiver makes the event wanted as long as it is connected, by hand or for a block, and is called once however
    often it is connected; `connect_via` connects for one sender."""
    receiver = Receiver()
    assert not bus.wants(AfterTrainIter)
    with signal.connected_to(receiver):
        assert bus.wants(AfterTrainIter)
        signal.connect(receiver)
        bus.emit(EVENT)
    bus.emit(EVENT)
    assert not bus.wants(AfterTrainIter)
    assert len(receiver.calls) == 1

    calls: list[Any] = []

    @signal.connect_via(bus)
    def decorated(sender: Any, event: Event) -> None:
        calls.append(sender)

    bus.emit(EVENT)
    bus.emit(EVENT, object())
    assert calls == [bus]


def test_muted_signal_reaches_no_subscriber(bus: Bus, signal: blinker.Signal) -> None:
    """No event is built for a muted signal; neither handlers nor background subscribers get, or count, one."""
    seen: list[Event] = []
    subscription = bus.subscribe(lambda event: None, "after_train_iter")
    bus.subscribe(seen.append, "after_train_iter", offload="thread")

    with signal.muted():
        assert not bus.wants(AfterTrainIter)
        bus.emit(EVENT)
    assert subscription.stats.calls == 0
    bus.emit(AfterTrainIter(iter=5))
    bus.flush()

    assert seen == [AfterTrainIter(iter=5)]


@pytest.mark.parametrize("bound", [False, True])
def test_weak_receiver_dies(bus: Bus, signal: blinker.Signal, bound: bool) -> None:
    """With `weak=True` a receiver that is garbage, or a method of an object that is, is gone from the plan; a receiver
    connected by default is held."""
    weak: list[Any] = []
    held: list[Any] = []
    receiver: Any = Receiver(weak)
    signal.connect(receiver.__call__ if bound else receiver, weak=True)
    bus.emit(EVENT)
    del receiver
    gc.collect()
    assert not bus.wants(AfterTrainIter)
    assert bus.plan("after_train_iter") == []
    signal.connect(Receiver(held))
    gc.collect()

    bus.emit(EVENT)

    assert (len(weak), len(held)) == (1, 1)


@pytest.mark.parametrize("sending", ["emit", "send"])
def test_muted_is_silent_however_deep(bus: Bus, signal: blinker.Signal, sending: str) -> None:
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


@pytest.mark.parametrize("sending", ["emit", "send"])
def test_receiver_of_one_sender_hears_only_that_one(bus: Bus, signal: blinker.Signal, sending: str) -> None:
    """`connect(receiver, sender=x)` is called for x alone; disconnecting another sender leaves x."""
    receiver, mine, other = Receiver(), Receiver(), Receiver()
    signal.connect(receiver, sender=mine)
    signal.connect(receiver, sender=other)
    signal.disconnect(receiver, sender=other)

    for sender in (mine, other, None):
        if sending == "emit":
            bus.emit(EVENT, sender)
        else:
            signal.send(sender, event=EVENT)

    assert receiver.calls == [("receiver", mine, EVENT)]
