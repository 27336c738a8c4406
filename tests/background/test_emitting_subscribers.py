"""Background subscribers that emit themselves: it is delivered at once, and before a flush or a close is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from eventloop.background import closing
from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import Event, EventsDropped, HandlerFailed
from tests.conftest import DEADLINE
from tests.support.internals import close_in_time, drain_after, substitute
from tests.support.process_support import until
from tests.support.spilling import PROMPT, emit, in_both_kinds, subscribe, total

fed_both_ways = pytest.mark.parametrize("overflow", ["spill", "block"])
"""With overflow="block" the emitting thread waits for room in the queue."""


class Hop(Event):
    """One of a chain."""

    n: int


class Echo(Event):
    """What another subscriber answers."""

    n: int


class Chain:
    """A subscriber that emits the next hop when it is given one."""

    def __init__(self, bus: Bus, kind: str, last: float = 5, **options: Any) -> None:
        self.seen: list[int] = []
        self.emitted = 1
        self.last = last
        self._bus = bus
        self.subscription = subscribe(bus, kind, self._hop, Hop, name="chain", **options)

    def begin(self) -> None:
        self._bus.emit(Hop(n=1))

    def _hop(self, event: Hop) -> None:
        self.seen.append(event.n)
        if event.n < self.last:
            self.emitted += 1
            self._bus.emit(Hop(n=event.n + 1))


@in_both_kinds
@fed_both_ways
def test_flush_and_close_deliver_what_subscribers_emit(kind: str, overflow: Overflow) -> None:
    """They are over when nothing is left, also of what their own deliveries have emitted."""
    bus = Bus()
    chain = Chain(bus, kind, overflow=overflow)
    chain.begin()
    assert bus.flush(DEADLINE).complete
    assert chain.seen == [1, 2, 3, 4, 5]
    chain.begin()
    report = bus.close(DEADLINE)

    assert chain.seen == [1, 2, 3, 4, 5] * 2
    assert (report.complete, report.stats[0].delivered, report.stats[0].dropped) == (True, 10, 0)


def test_close_delivers_from_one_subscriber_to_another() -> None:
    """No subscriber is ended while another may still emit for it, be it one that had nothing to do."""
    bus = Bus()
    seen: list[Event] = []
    bus.subscribe(lambda event: seen.append(event), Echo, offload="thread", name="idle")
    bus.subscribe(lambda event: bus.emit(Echo(n=event.n)), Hop, offload="thread", name="answers")
    bus.subscribe(lambda event: seen.append(event), "*", offload="thread", name="all")
    bus.emit(Hop(n=1))
    report = bus.close(DEADLINE)

    assert report.complete
    assert seen.count(Echo(n=1)) == 2
    assert [stats.dropped for stats in report.stats] == [0, 0, 0]


# --- without end -------------------------------------------------------------------------------------------


@in_both_kinds
def test_a_chain_without_end_is_cut_at_the_close(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of its time a close drops what is still emitted; the account adds up, and the report says so."""
    close_in_time(monkeypatch)
    bus = Bus()
    chain = Chain(bus, kind, last=float("inf"))
    chain.begin()
    report = bus.close(0.4)
    stats = chain.subscription.stats

    assert not report.complete
    assert stats.dropped + stats.queued > 0
    until(lambda: total(chain.subscription.stats) == chain.emitted)  # a last hop may just be emitted
    assert "closed after 0.4 s; events" in caplog.text


@in_both_kinds
def test_a_chain_without_end_is_left_by_a_flush(bus: Bus, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of its time a flush goes; what had been emitted before it is delivered, and nothing is lost."""
    chain, delivered, until_quiet = (
        Chain(bus, kind, last=float("inf")),
        threading.Event(),
        closing._flush_until_quiet,
    )

    def flush_until_quiet(*args: Any) -> bool:
        until(lambda: len(chain.seen) > 1)
        delivered.set()
        return until_quiet(*args)

    substitute(monkeypatch, "closing._flush_until_quiet", flush_until_quiet)
    drain_after(monkeypatch, delivered.is_set)
    chain.begin()

    assert bus.flush(0.2).complete
    assert len(chain.seen) > 1
    chain.last = 0
    assert bus.flush(DEADLINE).complete
    assert (chain.subscription.stats.dropped, chain.subscription.stats.delivered) == (0, chain.emitted)


@pytest.fixture
def others(bus: Bus) -> Iterator[Subscription]:
    """Another thread that emits all the time, for a subscriber that is always busy with it."""
    stop = threading.Event()

    def emit_on() -> None:
        while not stop.wait(0.001):
            emit(bus, 1)

    slow = bus.subscribe(
        lambda event: stop.wait(0.02), "after_train_iter", offload="thread", queue=4, overflow="drop_oldest"
    )
    thread = threading.Thread(target=emit_on)
    thread.start()
    yield slow
    stop.set()
    thread.join()


def test_flush_does_not_wait_for_what_others_emit(bus: Bus, others: Subscription) -> None:
    """Another thread's events do not keep it, although those of subscribers do."""
    chain = Chain(bus, "thread")
    until(lambda: others.subscriber and others.subscriber.account.delivered)
    chain.begin()
    began = monotonic()

    assert bus.flush(DEADLINE).complete
    assert monotonic() - began < PROMPT
    assert chain.seen == [1, 2, 3, 4, 5]


# --- callbacks, failures and drops -------------------------------------------------------------------------


def test_flush_delivers_what_is_emitted_when_it_flushes(bus: Bus) -> None:
    """`on_flush` may emit, too; it is called once, as nothing more comes for it."""
    calls: list[int] = []
    seen: list[Event] = []

    def flushed() -> None:
        calls.append(1)
        bus.emit(Echo(n=len(calls)))

    bus.subscribe(lambda event: None, Hop, offload="thread", on_flush=flushed)
    bus.subscribe(seen.append, Echo, offload="thread")
    bus.emit(Hop(n=1))

    assert bus.flush(DEADLINE).complete
    assert (calls, seen) == ([1], [Echo(n=1)])


def test_two_whose_flushes_fail_do_not_keep_each_other_busy(bus: Bus) -> None:
    """The report of one's failure brings the other to flush once more, and that is all."""
    calls: list[str] = []

    def fails_as(name: str) -> Callable[[], None]:
        def flush() -> None:
            calls.append(name)
            raise OSError("disk full")

        return flush

    for name in ("a", "b"):
        bus.subscribe(lambda event: None, "*", offload="thread", name=name, on_flush=fails_as(name))
    bus.emit(Hop(n=1))

    assert bus.flush(DEADLINE).complete
    assert sorted(calls) == ["a", "a", "b", "b"]
    assert [stats.queued for stats in bus.stats()] == [0, 0]


def fails(event: Any) -> None:
    raise ValueError(f"no {event.iter}")


@in_both_kinds
def test_the_reports_of_what_went_wrong_are_delivered(kind: str) -> None:
    """Failures and drops are delivered before a flush returns; a subscriber to them is ended last at a close, after all
    that the others leave is reported."""
    bus = Bus()
    told: list[Any] = []

    def fails_at_the_end() -> None:
        raise OSError("disk full")

    watch = subscribe(
        bus, kind, told.append, "*", name="watch", when=lambda event: not hasattr(event, "iter")
    )
    subscribe(bus, "thread", fails, name="fails")
    subscribe(bus, "thread", lambda event: None, name="ends", on_close=fails_at_the_end)
    emit(bus, 5)
    assert bus.flush(DEADLINE).complete
    assert [type(event) for event in told] == [HandlerFailed, EventsDropped]
    assert watch.account().queued == 0
    report = bus.close(DEADLINE)

    assert report.complete
    assert [(type(event), event.handler) for event in told] == [
        (HandlerFailed, "fails"),
        (EventsDropped, "fails"),
        (HandlerFailed, "ends"),
    ]
    assert {stats.name: (stats.dropped, stats.queued) for stats in report.stats}["watch"] == (0, 0)


def test_a_report_that_is_dropped_is_not_reported(bus: Bus) -> None:
    """A subscriber to everything that was disabled drops the report of its drops: counted, but not told for ever."""
    told: list[EventsDropped] = []
    bus.subscribe(told.append, "events_dropped", offload="thread", name="watch")
    failed = bus.subscribe(fails, "*", offload="thread", name="fails")
    emit(bus, 5)
    for _ in range(3):
        assert bus.flush(DEADLINE).complete

    assert [(event.handler, event.count) for event in told] == [("fails", 4)]
    assert failed.stats.dropped == 5


@fed_both_ways
def test_flush_delivers_what_a_long_delivery_emits(bus: Bus, overflow: Overflow) -> None:
    """Also where the loop has taken that long before the delivery is over."""
    flushed, taken, seen = threading.Event(), threading.Event(), list[Event]()

    def answers(event: Event) -> None:
        bus.emit(Echo(n=1))
        assert taken.wait(DEADLINE)

    def takes_its_time(event: Event) -> None:
        taken.set()
        if not flushed.wait(0.2):  # unless nobody waits for it
            seen.append(event)

    bus.subscribe(answers, Hop, offload="thread")
    bus.subscribe(takes_its_time, Echo, offload="thread", overflow=overflow)
    bus.emit(Hop(n=1))
    report = bus.flush(DEADLINE)
    flushed.set()

    assert seen == [Echo(n=1)]
    assert [(stats.delivered, stats.queued) for stats in report.stats] == [(1, 0), (1, 0)]
