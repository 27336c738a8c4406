"""A flush and a close without a timeout go on while background subscribers deliver, up to ten times `drain_timeout`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from eventloop.background.overtime import LONGEST_WAIT, Deadline
from eventloop.background.queues.options import SubscriberOptions
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.runners.thread_runner import Pace, ThreadRunner
from eventloop.bus import Bus
from tests.conftest import DEADLINE, Held
from tests.support.internals import substitute
from tests.support.paced import Paced
from tests.support.spilling import emit, total

in_both_ways = pytest.mark.parametrize("how", ["flush", "close"])


class Slow:
    """A subscriber that delivers one event each time it is decided whether a flush or close waits on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buses: list[Bus] = []
        self.paced = Paced(monkeypatch, self._left)

    def __call__(self, event: Any) -> None:
        self.paced.wait()

    def _left(self) -> int:
        return sum(
            each.queued for bus in self.buses for each in bus.subscriber_costs() if each.name == "slow"
        )

    def make_bus(self, drain_timeout: float) -> Bus:
        """Return a bus that is closed at the end of the test."""
        self.buses.append(Bus(drain_timeout=drain_timeout))
        return self.buses[-1]


@pytest.fixture
def slow(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """A slow subscriber, which is let go at the end of the test."""
    slow = Slow(monkeypatch)
    yield slow
    slow.paced.let_go()
    for bus in slow.buses:
        bus.close(DEADLINE)


@in_both_ways
def test_it_goes_on_while_less_is_left(
    slow: Slow, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which subscriber is waited for, how many events are left, and at what rate they go."""
    substitute(monkeypatch, "overtime.LONGEST_WAIT", 10_000)
    bus = slow.make_bus(0.02)
    subscription = bus.subscribe(slow, "after_train_iter", offload="thread", name="slow")
    emit(bus, 6)

    report = getattr(bus, how)()

    assert report.complete
    assert subscription.stats.delivered == 6
    told = [text for text in caplog.messages if text.startswith("waiting for background subscribers")]
    assert "more: slow has " in told[0]
    assert " left and delivers " in told[0]
    assert " a second: about " in told[0]


@in_both_ways
def test_it_ends_at_the_bound(slow: Slow, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is left then is counted, and the log says what would help."""
    bus = slow.make_bus(0.03)
    subscription = bus.subscribe(slow, "after_train_iter", offload="thread", name="slow")
    emit(bus, 1000)
    began = monotonic()

    report = getattr(bus, how)()

    assert not report.complete
    assert monotonic() - began >= LONGEST_WAIT * 0.03 / 2
    assert total(subscription.stats) == 1000
    assert subscription.stats.queued > 0
    assert "Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with " in caplog.text


@pytest.mark.representative(1)
@in_both_ways
@pytest.mark.parametrize("why", ["hangs", "timeout", "short"])
def test_it_ends_in_time(
    slow: Slow, held: Held, how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is added for a subscriber that delivers nothing, to a timeout that was passed, which is a hard bound, nor
    if `bus.overtime` is False."""
    bus = slow.make_bus(DEADLINE if why == "timeout" else 0.03)
    bus.subscribe(held if why == "hangs" else slow, "after_train_iter", offload="thread")
    bus.overtime = why != "short"
    emit(bus, 1000)
    if why == "hangs":
        assert held.entered.wait(DEADLINE)  # a thread that begins a delivery computes, and that is progress

    assert not getattr(bus, how)(*([0.03] if why == "timeout" else [])).complete

    assert "waiting for background subscribers" not in caplog.text
    assert why != "timeout" or "drain_timeout" not in caplog.text
    held.let_go()


@in_both_ways
def test_a_signal_shortens_a_wait_that_has_begun(
    slow: Slow, held: Held, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wait of a minute next to nothing is left, also of a close after an error."""
    substitute(monkeypatch, "overtime.AFTER_SIGNAL", 0.001)
    bus = slow.make_bus(DEADLINE)
    bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    signalled = threading.Timer(0.3, setattr, (bus, "overtime", False))
    began = monotonic()
    signalled.start()

    assert not getattr(bus, how)().complete

    assert monotonic() - began < DEADLINE / 2
    signalled.join()
    held.let_go()


def idle(name: str) -> Subscriber:
    """Return a subscriber whose thread is not started."""
    subscriber = Subscriber(name, print, SubscriberOptions(), lambda *_: None)
    subscriber.runner = ThreadRunner(subscriber, Pace())
    return subscriber


def test_a_subscriber_that_emits_as_much_as_it_delivers_is_not_waited_for() -> None:
    """It delivers, and as much is left as before."""
    again = idle("again")
    account = again.account
    account.received = 3
    waiting = Deadline(10.0, [again], lambda: True)

    account.received, account.delivered = 5, 2
    assert not waiting.make_progress()
    account.delivered = 3
    assert waiting.make_progress()
    assert not waiting.make_progress()


def test_a_subscriber_that_hangs_is_not_waited_for_because_others_deliver() -> None:
    """Only the progress of subscribers that have events left makes the wait longer."""
    hangs, fast = idle("hangs"), idle("fast")
    hangs.account.received, fast.account.received = 11, 100
    waiting = Deadline(10.0, [hangs, fast], lambda: True)

    fast.account.delivered = 90
    assert waiting.extend()
    fast.account.delivered = 100
    assert not waiting.extend()


@pytest.mark.parametrize(
    ("options", "less"),
    [
        ({"offload": "thread"}, 'offload="process", batch=True, every= or when='),
        ({"offload": "thread", "batch": True}, 'offload="process", every= or when='),
        ({}, "batch=True, every= or when="),
    ],
)
def test_the_advice_is_one_that_fits(
    bus: Bus, held: Held, options: dict[str, Any], less: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It names neither what is done already, nor what a coroutine cannot do."""
    fn = held if options else held.in_a_task
    bus.subscribe(fn, "after_train_iter", name="slow", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    bus.drain_timeout = 0.02

    bus.flush()

    assert caplog.messages[-1] == (
        "not everything was delivered in time: slow (1). Give them more time with "
        f"Trainer(bus=Bus(drain_timeout=...)), or less to do with {less}"
    )
    bus.drain_timeout = DEADLINE
