"""Define the subscription that `bus.subscribe` returns, its options and its account."""

from __future__ import annotations

import signal
from asyncio import AbstractEventLoop
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, get_args

import msgspec

from eventloop.background.queues.awaited import stuck
from eventloop.background.queues.inbox import Route
from eventloop.background.queues.options import Offload, SubscriberOptions
from eventloop.background.queues.subscriber import Subscriber
from eventloop.bus.handler import Handler, check_callable
from eventloop.costs.records import RunsOn, SubscriberCost
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.filters import (
    Passes,
    Predicate,
    check_filter,
    describe_filter,
    first_only,
    make_filter,
    source_of,
)
from eventloop.events.priority import Priority, get_priority
from eventloop.migration.names import knowing_renamed
from eventloop.util.checks import check_choice, number
from eventloop.util.functions import handler_name, is_coroutine_function


class SubscriptionStats(msgspec.Struct, frozen=True):
    """The counts of one subscription's events and calls. For a sync handler `calls == delivered`.

    For a background subscriber `emitted == delivered + failed + dropped + queued` at any moment, counted in
    events. An event that `when=` rejects is not counted.
    """

    name: str
    event: str
    """The name of the event, several names joined by ", ", or "*" for all events."""
    runs_on: RunsOn
    calls: int
    """The number of calls. Inexact only for a sync handler while another thread emits its event."""
    seconds: float
    """The seconds of all calls; in a tight loop of events, those of a sync handler are estimated."""
    delivered: int
    dropped: int
    """Events that the subscriber never received, because its queue had no room or it was disabled."""
    failed: int
    """Events at which the subscriber raised an error or stalled."""
    queued: int
    """Events not delivered yet: in the queue or its temporary file, in the current delivery, or `untaken`."""
    peak_queued: int
    """The largest number of events that waited at a time, in the queue and its temporary file."""
    error: str = ""
    """The last error, and if it ended the subscriber; or the call that a flush or close awaited in vain."""
    spilled: int = 0
    """Events that exceeded the queue and waited in a temporary file, with `overflow="spill"`."""
    losses_logged: bool = False
    """Whether each loss since the last run or close was logged when it occurred, as for a missing server."""
    untaken: int = 0
    """Events in `queued` that the subscriber has received and its destination, such as a server, has not."""

    @property
    def shortfall(self) -> str:
        """A sentence on the events that a background subscriber lost; "" if it lost none."""
        if self.runs_on == "sync" or not (self.dropped or self.failed or self.queued or self.error):
            return ""
        error = f" - {self.error}" if self.error else ""
        return f"{self.name}: {self.dropped:,} dropped, {self.failed:,} failed, {self.queued:,} left{error}"


REPORT_LINES = 8
"""The largest number of subscribers that a printed `DrainReport` names."""


class DrainReport(msgspec.Struct, frozen=True):
    """The result of `flush` and `close`. Its truth value is `complete`: no event was left in the end.

    `ok` is stricter: it is true if every event was delivered. A printed report names the subscribers that
    lost events.
    """

    complete: bool
    """True if each event was delivered, failed or was dropped in time; `stats` has the numbers.

    False if events were left at the timeout, or if subscribers went on emitting during a close.
    """
    stats: list[SubscriptionStats]
    """One record per subscription, in order of registration."""

    def __bool__(self) -> bool:
        return self.complete

    @property
    def ok(self) -> bool:
        """True if all events were delivered: none dropped, failed or left, and no subscriber disabled."""
        return self.complete and not any(stats.shortfall for stats in self.stats)

    def __str__(self) -> str:
        """Return the number of delivered events, and a line for each subscriber that lost events."""
        with_losses = [(stats, text) for stats in self.stats if (text := stats.shortfall)]
        delivered = sum(stats.delivered for stats in self.stats if stats.runs_on != "sync")
        total = f"{'dealt with in time' if self.complete else 'time ran out'}: {delivered:,} delivered"
        if not with_losses:
            return f"{total}, none dropped, none failed, none left"
        lines = [f"{text} ({stats.delivered:,} delivered)" for stats, text in with_losses[:REPORT_LINES]]
        if (more := len(with_losses) - REPORT_LINES) > 0:
            lines.append(f"and {more} more")
        return "\n  ".join([f"{total}, not everything:", *lines])


class PlanRow(msgspec.Struct, frozen=True):
    """A handler of an event as a row of `print(bus)` or an item of `Bus.plan`.

    `order` counts sync handlers from 1. It is 0 for background subscribers, whose `priority` has no effect.
    `queue` is the largest number of events that wait for them, `overflow` the policy beyond it. `budget_us`
    is the limit for the p99 of calls in microseconds.
    """

    order: int
    priority: int
    name: str
    filter: str
    runs_on: RunsOn
    queue: int = 0
    overflow: str = ""
    budget_us: float | None = None


def handler_row(order: int, handler: Handler) -> PlanRow:
    """Return the row of the plan for a sync handler."""
    budget = None if handler.timing.budget is None else in_microseconds(handler.timing.budget.seconds)
    return PlanRow(order, handler.priority, handler.name, handler.filter, "sync", budget_us=budget)


class Options(msgspec.Struct, frozen=True):
    """The checked arguments of `bus.subscribe`, without the function and the events."""

    priority: int
    every: int
    start: int
    once: bool
    when: Predicate | None
    name: str | None
    """The name that the user gave."""
    offload: Offload | None
    budget: float | None
    """The limit for the p99 of calls, in seconds."""
    loop: AbstractEventLoop | None
    """The caller's event loop for a coroutine function; None for the bus's loop."""
    background: SubscriberOptions

    @classmethod
    def checked(
        cls,
        fn: Callable[..., Any],
        priority: Priority | int | str,
        every: int,
        start: int,
        once: bool,
        when: Predicate | None,
        name: str | None,
        offload: str | None,
        budget_us: float | None,
        loop: AbstractEventLoop | None,
        background: SubscriberOptions,
    ) -> Options:
        """Return the options of `fn`, after a check of each argument as `bus.subscribe` explains it.

        Raises:
            TypeError, ValueError: an argument is invalid, or has no effect for this kind of function.
        """
        check_callable(fn)
        priority_number = get_priority(priority)
        check_filter(every, start, once, when)
        background.check()
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise TypeError(f"name must be a str that is not empty, got {name!r}")
        label = name or handler_name(fn)
        checked_offload = _check_offload(label, offload)
        _check_kind(label, fn, checked_offload, loop, background)
        if priority_number != Priority.NORMAL and (checked_offload or is_coroutine_function(fn)):
            raise ValueError(f"{label} runs in the background: priority={priority!r} would have no effect")
        budget = None if budget_us is None else check_budget(label, budget_us)
        return cls(priority_number, every, start, once, when, name, checked_offload, budget, loop, background)

    @property
    def filter(self) -> str:
        """The filter as `print(bus)` shows it, such as "every=10 once"."""
        return describe_filter(self.every, self.start, self.once, self.when)


def check_budget(name: str, budget_us: float) -> float:
    """Check a budget and return it in seconds.

    Raises:
        TypeError, ValueError: the budget is not a number above 0.
    """
    return number(f"{name}: budget_us, in microseconds,", budget_us, above=0) / 1e6


def in_microseconds(budget: float | None) -> float | None:
    """Convert a budget from seconds to the microseconds that the user gave; None stays None."""
    return None if budget is None else float(f"{budget * 1e6:.12g}")


def _check_offload(name: str, offload: str | None) -> Offload | None:
    """Return `offload` after a check; a worker process needs a system with POSIX signals."""
    if offload == "process":
        if not hasattr(signal, "pthread_sigmask"):
            raise ValueError(f"{name}: offload='process' needs a POSIX system: use offload='thread'")
        return "process"
    check_choice(f"{name}: offload", offload, (None, *get_args(Offload)))
    return "thread" if offload else None


def _check_kind(
    name: str,
    fn: Callable[..., Any],
    offload: Offload | None,
    loop: object,
    background: SubscriberOptions,
) -> None:
    """Refuse options that have no effect for a sync handler, or for a coroutine function."""
    coroutine = is_coroutine_function(fn)
    if offload and coroutine:
        raise ValueError(f"{name} is a coroutine function and runs on the background loop: leave offload out")
    _check_loop(name, fn, loop, background)
    if not offload and not coroutine and (changed := background.changed()):
        raise ValueError(
            f"{name} is a sync handler, called at once and never queued; {', '.join(changed)} would have no "
            "effect: make it a coroutine function, or pass offload='thread' or 'process'"
        )


def _check_loop(name: str, fn: Callable[..., Any], loop: object, options: SubscriberOptions) -> None:
    """Refuse a `loop` that is no open event loop, or that has no effect or would hang with other options."""
    if loop is None:
        return
    if not isinstance(loop, AbstractEventLoop):
        raise TypeError(
            f"{name}: loop must be an asyncio event loop, such as asyncio.get_running_loop(), got {loop!r}"
        )
    if not is_coroutine_function(fn):
        raise ValueError(
            f"{name} is a plain function, and loop= is for coroutine functions: leave loop out, or write "
            "async def"
        )
    if loop.is_closed():
        raise ValueError(f"{name}: loop must be open, got a closed loop: {loop!r}")
    if options.overflow == "block":
        raise ValueError(
            f"{name}: overflow='block' cannot be used with loop=, because an emit on the thread of the loop "
            "would wait for itself: use 'spill'"
        )


class Registry(Protocol):
    """The methods of the bus's subscribers that a subscription calls."""

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription."""

    def refresh(self, subscription: Subscription) -> None:
        """Apply a change of `subscription.paused`."""

    def stats_of(self, subscription: Subscription) -> SubscriptionStats:
        """Return the account of a subscription."""


@knowing_renamed
class Subscription:
    """A handler on the bus. As a context manager it cancels itself at the end of the block.

    with bus.subscribe(watch, "after_train_iter", every=10):
        trainer.train()
    """

    def __init__(
        self,
        registry: Registry,
        fn: Callable[..., Any],
        events: tuple[type[Event], ...],
        *,
        wildcard: bool,
        name: str,
        options: Options,
        runs_on: RunsOn,
    ) -> None:
        self.fn = fn
        self.events = events
        self.over_budget = False
        """Whether the `budget_us` was exceeded, and reported."""
        self.wildcard = wildcard
        self.name = name
        self.options = options
        self.runs_on = runs_on
        self.handlers: dict[type[Event], Handler] = {}
        self.subscriber: Subscriber | None = None
        self.active = True
        self.paused = False
        self.routes: dict[type[Event], Route] = {}
        self._registry = registry
        self._firings = count()

    def cancel(self) -> None:
        """Unsubscribe the handler.

        Queued events of a background subscriber are dropped. The current delivery is finished.
        """
        self._registry.remove(self)

    def pause(self) -> None:
        """Ignore events until `resume`; they are not counted."""
        self.paused = True
        self._registry.refresh(self)

    def resume(self) -> None:
        """Receive events again."""
        self.paused = False
        self._registry.refresh(self)

    @property
    def stats(self) -> SubscriptionStats:
        """The counts of the subscription's events and calls, exact at the moment of the call."""
        return self._registry.stats_of(self)

    def route(self, event_type: type[Event]) -> Route:
        """Return the filters for an event type, created at the first call, because they may hold counts."""
        if event_type not in self.routes:
            options = self.options
            if options.background.overflow == "block":
                # all filters on the emitting thread, which must not wait for an event that does not pass
                self.routes[event_type] = Route(self.filter(event_type), None)
            elif options.once:  # tested after `when`, because only events that pass it count
                self.routes[event_type] = Route(None, self.filter(event_type))
            else:
                early = make_filter(event_type, options.every, options.start, None)
                self.routes[event_type] = Route(early, make_filter(event_type, 1, 0, options.when))
        return self.routes[event_type]

    def filter(self, event_type: type[Event]) -> Passes | None:
        """Create a filter for an event type. It may hold a count, so each handler and route has its own."""
        options = self.options
        passes = make_filter(event_type, options.every, options.start, options.when)
        return first_only(passes, self._firings) if options.once else passes

    def test(self, event_type: type[Event]) -> str | None:
        """Return the filter as source code, or None if it is not a simple expression."""
        options = self.options
        return None if options.once else source_of(event_type, options.every, options.start, options.when)

    def plan_row(self) -> PlanRow:
        """Return the row of the plan for a background subscriber."""
        options = self.options
        return PlanRow(
            0,
            options.priority,
            self.name,
            options.filter,
            self.runs_on,
            options.background.capacity,
            options.background.overflow,
            in_microseconds(options.budget),
        )

    def account(self) -> SubscriptionStats:
        """Return the subscription's counts, its last error, and the call in which the subscriber is stuck."""
        subscriber = self.subscriber
        if subscriber is None:
            calls = sum(handler.calls for handler in self.handlers.values())
            seconds = sum(handler.timing.estimate(handler.calls) for handler in self.handlers.values())
            return SubscriptionStats(self.name, self.event, "sync", calls, seconds, calls, 0, 0, 0, 0)
        counts, reason = subscriber.counts, subscriber.account.ended_by
        state = stuck(subscriber) or subscriber.left_in
        # a subscriber that closed with an empty queue and is not stuck ended normally: no [closed] is shown
        ended = f"[{reason}]" if reason and (reason != "closed" or counts.queued or state) else ""
        error = f"{ended} {'; '.join(filter(None, (subscriber.account.last_error, state)))}".strip()
        outcomes = counts.delivered - counts.unconfirmed, counts.dropped, counts.failed
        queue = counts.queued + counts.unconfirmed, counts.peak, error, counts.spilled
        fields = counts.calls, counts.seconds, *outcomes, *queue, subscriber.account.losses_named
        return SubscriptionStats(self.name, self.event, self.runs_on, *fields, counts.unconfirmed)

    def cost(self) -> SubscriberCost:
        """Return the costs of a background subscriber."""
        subscriber, account = self.subscriber, self.account()
        assert subscriber is not None
        return SubscriberCost(
            name=self.name,
            event=self.event,
            runs_on=self.runs_on,
            delivered=account.delivered,
            dropped=account.dropped,
            failed=account.failed,
            queued=account.queued,
            peak_queued=account.peak_queued,
            capacity=subscriber.options.capacity,
            spilled=account.spilled,
            calls=account.calls,
            seconds=account.seconds,
            wait=subscriber.inbox.waits.times(),
            busy=subscriber.busy.times(account.calls),
            error=account.error,
            budget=self.options.budget,
            over_budget=self.over_budget,
        )

    @property
    def event(self) -> str:
        """The names of the subscription's events, joined by ", ", or "*" for all events."""
        return "*" if self.wildcard else ", ".join(event_name(e) for e in self.events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "" if self.active else " (cancelled)"
        return f"<Subscription {self.name} to {self.event}{state}>"
