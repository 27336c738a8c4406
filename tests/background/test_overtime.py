"""A flush and a close without a timeout go on while background subscribers deliver, up to ten times `drain_timeout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Semaphore
from typing import Any

import pytest

from eventloop.background import overtime
from eventloop.background.gil_scheduler import Pace
from eventloop.background.overtime import Overtime
from eventloop.background.queues.options import LaneOptions
from eventloop.background.runners import ThreadLane
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import Event
from tests.conftest import DEADLINE, Held
from tests.support.process_support import until
from tests.support.spilling import emit

SECONDS = 0.02
"""A `drain_timeout` that is over at once."""


class Slow:
    """A subscriber that delivers one event each time it is decided whether to wait on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bus: Bus) -> None:
        self.bus = bus
        self.decided: list[float] = []
        self.stops = False
        self.subscription: Subscription = bus.subscribe(
            self._deliver, "after_train_iter", offload="thread", name="slow"
        )
        self._let = Semaphore(0)
        extension = Overtime.extension

        def decide(overtime: Overtime) -> float:
            if not self.stops and self.subscription.account().queued:
                before = self.subscription.account().delivered
                self._let.release()
                until(lambda: self.subscription.account().delivered > before)
            self.decided.append(extension(overtime))
            return self.decided[-1]

        monkeypatch.setattr(Overtime, "extension", decide)

    def _deliver(self, event: Event) -> None:
        assert self._let.acquire(timeout=DEADLINE)

    def let_go(self) -> None:
        """Let every delivery return."""
        self._let.release(10_000)


@pytest.fixture
def slow(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Slow]]:
    """Makes one, let go at the end of the test; no thread of it is left to a later test."""
    made: list[Slow] = []

    def make(bus: Bus) -> Slow:
        made.append(Slow(monkeypatch, bus))
        return made[-1]

    yield make
    for each in made:
        each.let_go()
        each.bus.close(DEADLINE)


def end(bus: Bus, how: str, *timeout: float) -> Any:
    """Flush it, or close it."""
    return getattr(bus, how)(*timeout)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flush", "close"])
def test_it_goes_on_while_less_is_left(
    slow: Callable[..., Slow], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says who is waited for, how many events are left, and at what rate they go."""
    bus = Bus(drain_timeout=5 * SECONDS)  # ten times this is enough for five events on a busy machine
    delivering = slow(bus)
    emit(bus, 5)

    report = end(bus, how)

    assert report.complete
    assert delivering.subscription.stats.delivered == 5
    assert len(delivering.decided) >= 4
    told = [text for text in caplog.messages if text.startswith("waiting for background subscribers")]
    assert "more: slow has 4 left and delivers " in told[0]
    assert " a second: about " in told[0]


@pytest.mark.parametrize("how", ["flush", "close"])
def test_it_ends_at_the_bound(slow: Callable[..., Slow], how: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is left then is counted, and the log says what would help."""
    bus = Bus(drain_timeout=SECONDS)
    delivering = slow(bus)
    emit(bus, 1000)

    report = end(bus, how)

    assert not report.complete
    assert (
        1 <= len(delivering.decided) <= 2 * overtime.LONGEST_WAIT
    )  # a close decides a little before its time is over
    stats = delivering.subscription.stats
    assert stats.delivered + stats.queued == 1000
    assert (
        'Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with offload="process", '
        "batch=True, every= or when="
    ) in caplog.text


@pytest.mark.parametrize("how", ["flush", "close"])
@pytest.mark.parametrize("why", ["hangs", "timeout", "short"])
def test_it_ends_in_time(
    slow: Callable[..., Slow], how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is added for a subscriber that delivers nothing, to a timeout that was passed, which is a hard bound, nor
    where `bus.overtime` is False."""
    bus = Bus(drain_timeout=DEADLINE if why == "timeout" else SECONDS)
    delivering = slow(bus)
    delivering.stops = why == "hangs"
    bus.overtime = why != "short"
    emit(bus, 5)

    assert not end(bus, how, *([SECONDS] if why == "timeout" else [])).complete

    assert not any(delivering.decided)
    assert "waiting for background subscribers" not in caplog.text
    assert why != "timeout" or "drain_timeout" not in caplog.text


def test_a_subscriber_that_emits_as_much_as_it_delivers_is_not_waited_for() -> None:
    """It delivers, and as much is left as before."""
    lane = ThreadLane("again", print, LaneOptions(), lambda *_: None, Pace())  # not started
    lane.received = 3
    waiting = Overtime([lane], 10.0, lambda: True)

    lane.received, lane.delivered = 5, 2
    assert waiting.extension() == 0.0
    lane.delivered = 3
    assert waiting.extension() > 0.0
    assert waiting.extension() == 0.0


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
    """Nobody is told to do what is done already, nor what a coroutine cannot."""
    fn = held if options else held.in_a_task
    bus.subscribe(fn, "after_train_iter", name="slow", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    bus.drain_timeout = SECONDS

    bus.flush()

    assert caplog.messages[-1] == (
        "not everything was delivered in time: slow (1). Give them more time with "
        f"Trainer(bus=Bus(drain_timeout=...)), or less to do with {less}"
    )
    bus.drain_timeout = DEADLINE
