"""Hold the subscriptions of a bus, with their handlers, signals and background queues.

Only `Bus` uses this module. Subscriptions change under a lock; emits read the dictionaries without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

from eventloop.background.appending import appenders, counted
from eventloop.background.background import Background
from eventloop.background.queues.inbox import Route
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.workers.importable import pack
from eventloop.bus.after_close import AfterClose
from eventloop.bus.dispatch import Dispatch, HandOver
from eventloop.bus.event_signal import EventSignal
from eventloop.bus.handler import Handler, Takes, calling_convention
from eventloop.bus.subscription import Options, PlanRow, Subscription, SubscriptionStats, handler_row
from eventloop.costs.handler_trend import HandlerTrend
from eventloop.costs.records import HandlerCost, SubscriberCost
from eventloop.costs.spans import SpanRecorder
from eventloop.costs.timing import Budget, Timing
from eventloop.events import Event, EventsDropped, HandlerFailed, SlowHandler
from eventloop.events.base import event_name
from eventloop.events.catalogue import declared_events, find_event
from eventloop.events.subscribed import check_possible, subscribed_types
from eventloop.util.functions import handler_name, is_coroutine_function

logger = logging.getLogger("eventloop")

_HEALTH = (HandlerFailed, EventsDropped, SlowHandler)
_ENDED = 256
"""The largest number of cancelled handlers whose costs are still reported."""


class Subscribers:
    """The subscriptions of one bus, in order of registration, and the signals of its events.

    Args:
        owner: the bus, which blinker's receivers get as the sender if an emit has no trainer.
    """

    def __init__(self, owner: object, background: Background) -> None:
        self.dispatch: dict[type[Event], Dispatch] = {}
        self.wanted: dict[type[Event], bool] = {}
        self.signals: dict[type[Event], EventSignal] = {}
        self.excluded: dict[type[Event], str] = {}
        """The events that are never emitted on this bus, with the reasons."""
        self._owner = owner
        self._background = background
        self._subscriptions: list[Subscription] = []
        self._lock = threading.RLock()
        self._recorder: SpanRecorder | None = None
        self._waiting_flushes = 0  # number of flushes that wait for events of subscribers
        self.after_close = AfterClose()
        self._ended: dict[tuple[str, str], Handler] = {}  # cancelled handlers, by event and name

    # --- adding and removing -------------------------------------------------------------------------------

    def add(
        self, fn: Callable[..., Any], events: tuple[str | type[Event], ...], options: Options
    ) -> Subscription:
        """Subscribe `fn` as in `Bus.subscribe`.

        Raises:
            TypeError, ValueError: an unknown event, a wrong signature, a name that is taken.
            RuntimeError: a background subscriber on a closed bus.
        """
        takes, wildcard, types = self.check(fn, events, options)
        background = options.offload is not None or is_coroutine_function(fn)
        with self._lock:
            subscription = Subscription(
                self,
                fn,
                types,
                wildcard=wildcard,
                name=self._unique(options.name, handler_name(fn)),
                options=options,
                runs_on="sync" if not background else (options.offload or "loop"),
            )
            try:
                self._add(subscription, takes, options)
                return subscription
            except BaseException:  # also a KeyboardInterrupt
                self.remove(subscription)
                raise

    def _add(self, subscription: Subscription, takes: Takes, options: Options) -> None:
        """Add a subscription to the signals of its events; add a subscriber to the background if needed."""
        if subscription.runs_on != "sync":
            subscriber = subscription.subscriber = self._background.add(
                subscription.name, subscription.fn, options.background, options.offload, options.loop
            )
            subscriber.busy.budget = self._budget(subscription, subscriber.busy, subscription.event)
        self._subscriptions.append(subscription)
        for event_type in self._types_of(subscription):
            self._attach(subscription, event_type, takes)
        self.refresh_routes() if subscription.subscriber is not None else self._refresh_mail()

    def check(
        self, fn: Callable[..., Any], events: tuple[str | type[Event], ...], options: Options
    ) -> tuple[Takes, bool, tuple[type[Event], ...]]:
        """Return how `fn` is called, whether it receives all events, and its events if it does not.

        Raises:
            TypeError, ValueError: an unknown event, a wrong signature, a name that is taken.
        """
        background = options.offload is not None or is_coroutine_function(fn)
        takes = calling_convention(fn, background=background)
        name = options.name or handler_name(fn)
        wildcard, types = subscribed_types(name, events, background=background)
        check_possible(name, types, self.excluded)
        if options.offload == "process":
            pack(fn, options.background.on_flush, options.background.on_close)
        self._unique(options.name, handler_name(fn))
        return takes, wildcard, types

    def exclude(self, excluded: Mapping[type[Event], str]) -> None:
        """Refuse later subscriptions to some events, for which the caller gives reasons.

        Raises:
            ValueError: one of the events has a subscription already.
        """
        self.excluded.update(excluded)
        for each in self._subscriptions:
            check_possible(each.name, each.events, self.excluded)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription; an interrupted call may be repeated. `Subscription.cancel` calls this."""
        with self._lock:
            if not subscription.active:
                return
            self._subscriptions[:] = [each for each in self._subscriptions if each is not subscription]
            for event_type, handler in subscription.handlers.items():
                signal = self.signals[event_type]
                signal.disconnect(handler)
                self._ended[signal.name, handler.name] = handler.account_copy()
            while len(self._ended) > _ENDED:
                del self._ended[next(iter(self._ended))]
            if subscription.subscriber is not None:
                self.refresh_routes()
                self._background.remove(subscription.subscriber)
            subscription.active = False  # last, so that a call after an interrupted one removes the rest

    def refresh(self, subscription: Subscription) -> None:
        """Apply a change of `subscription.paused`."""
        if subscription.subscriber is not None:
            self.refresh_routes()
        for event_type, handler in subscription.handlers.items():
            signal = self.signals[event_type]
            if subscription.paused:
                signal.disconnect(handler)
            elif subscription.active:
                signal.reconnect(handler)

    def move_to(self, background: Background, timeout: float) -> None:
        """Restart every background subscriber on a new background, after the former one has ended.

        Subscribers that are still in a delivery are waited for, `timeout` seconds in total. After that they
        get no more events.
        """
        deadline = monotonic() + timeout
        with self._lock:
            self._background, self.after_close = background, AfterClose()
            for subscription in self._subscriptions:
                if subscription.subscriber is not None:
                    self._renew(subscription, subscription.subscriber, deadline)
            self.refresh_routes()

    def _renew(self, subscription: Subscription, former: Subscriber, deadline: float) -> None:
        """Restart one subscriber; give it no more events if its last delivery lasts beyond the deadline."""
        options = subscription.options
        if not (former.runner.blocked_by_caller or former.closed.wait(max(0.0, deadline - monotonic()))):
            why = "its last delivery had not ended when the bus was reopened"
            former.account.ended_by, former.account.last_error = "stalled", why
            logger.warning("background subscriber %s gets no more events: %s", former.name, why)
            self._background.subscribers.append(former)
            return
        subscriber = self._background.add(
            subscription.name, subscription.fn, options.background, options.offload, options.loop
        )
        subscriber.continue_from(former)
        subscription.subscriber = subscriber

    def of(self, fn: Callable[..., Any]) -> list[Subscription]:
        """Return the subscriptions of a function."""
        return [subscription for subscription in self._subscriptions if subscription.fn == fn]

    def drop_inherited(self, *, kept: bool) -> None:
        """Drop all subscriptions in a forked process, unless they are `kept` for a run there."""
        self._lock = threading.RLock()  # another thread may have held the old lock at the fork
        if not kept:
            self._subscriptions.clear()
        for signal in self.signals.values():
            signal.silence(kept=kept)

    def refuse_posted(self, event_types: Iterable[type[Event]]) -> None:
        """Count posted events as dropped for each of their subscribers, because the bus is closed.

        The number of events that the posted `Deferred` object would have created is unknown, so one event of
        each type is counted.
        """
        subscribers = [each.subscriber for each in self._subscriptions if each.subscriber is not None]
        self.after_close.refuse_posted(subscribers, event_types)

    # --- inspecting ----------------------------------------------------------------------------------------

    def signal(self, event: str | type[Event]) -> EventSignal:
        """Return the signal of an event, created at the first request.

        Raises:
            TypeError, ValueError: no such event.
        """
        event_type = find_event(event)
        signal = self.signals.get(event_type)
        if signal is None:
            with self._lock:
                signal = self.signals.get(event_type) or self._make_signal(event_type)
        return signal

    def plan(self, event: str | type[Event]) -> list[PlanRow]:
        """Return the handlers of an event: sync handlers in their order, then background subscribers."""
        event_type = find_event(event)
        signal = self.signals.get(event_type)
        if signal is None and any(each.wildcard for each in self._subscriptions):
            # not without a subscription to "*": the signal has no handlers then, and takes 0.1 ms
            signal = self.signal(event_type)
        handlers = signal.handlers if signal is not None else ()
        rows = [handler_row(order, handler) for order, handler in enumerate(handlers, start=1)]
        rows += [
            s.plan_row()
            for s in self._subscriptions
            if s.subscriber is not None and (s.wildcard or event_type in s.events)
        ]
        return rows

    def stats(self) -> list[SubscriptionStats]:
        """Return one record per subscription."""
        for signal in self.signals.values():
            signal.update_calls()
        return [each.account() for each in self._subscriptions]

    def handler_costs(self, wall: float, trend: HandlerTrend | None) -> list[HandlerCost]:
        """Return one record per synchronous handler, in their order, followed by cancelled handlers."""
        for signal in self.signals.values():
            signal.update_calls()
        with self._lock:
            ended = [(event, handler) for (event, _), handler in self._ended.items() if handler.calls]
        active = [(signal.name, handler) for signal in self.signals.values() for handler in signal.handlers]
        return [handler.cost(event, wall, trend) for event, handler in (*active, *ended)]

    def subscriber_costs(self) -> list[SubscriberCost]:
        """Return one record per background subscriber."""
        return [
            subscription.cost() for subscription in self._subscriptions if subscription.subscriber is not None
        ]

    def stats_of(self, subscription: Subscription) -> SubscriptionStats:
        """Return the record of one subscription."""
        for signal in self.signals.values():
            signal.update_calls()
        return subscription.account()

    def record(self, recorder: SpanRecorder | None) -> None:
        """Record spans of every synchronous handler with `recorder`, or stop with None."""
        with self._lock:
            self._recorder = recorder
            for signal in self.signals.values():
                signal.record(recorder)

    @contextmanager
    def counting_emissions(self) -> Iterator[None]:
        """Count the events that background subscribers emit within the block, for `flush`."""
        self._count_waiting(1)
        try:
            yield
        finally:
            self._count_waiting(-1)

    def _count_waiting(self, more: int) -> None:
        with self._lock:
            self._waiting_flushes += more
            self.refresh_routes()

    # --- private -------------------------------------------------------------------------------------------

    def refresh_routes(self) -> None:
        """Pass the current background subscribers of each event to its signal and to the background."""
        background = self._background
        interests = self._interests()
        if not background.finished:
            background.set_routes(interests)
        for event_type, signal in self.signals.items():
            subscribers = [subscriber for subscriber, routes in interests.items() if event_type in routes]
            if background.finished:
                refuse = [partial(self.after_close.refuse, subscriber) for subscriber in subscribers]
                signal.hand_over_to(tuple(refuse), tuple(refuse), has_background=False)
            else:
                feeds = [self._appenders(subscriber, event_type) for subscriber in subscribers]
                plain, timed = tuple(f[0] for f in feeds), tuple(f[1] for f in feeds)
                signal.hand_over_to(plain, timed, has_background=bool(subscribers))
        self._refresh_mail()

    def _interests(self) -> dict[Subscriber, dict[type[Event], Route]]:
        """Return the routes of each background subscriber that is not paused, by event type."""
        return {
            each.subscriber: {event_type: each.route(event_type) for event_type in self._types_of(each)}
            for each in self._subscriptions
            if each.subscriber is not None and not each.paused
        }

    def _appenders(self, subscriber: Subscriber, event_type: type[Event]) -> tuple[HandOver, HandOver]:
        """Return `appenders`' functions; while a flush waits, both also count events for it."""
        plain, timed = appenders(self._background, subscriber, event_type)
        if not self._waiting_flushes:
            return plain, timed
        noted = counted(self._background, plain)
        return noted, noted

    def _refresh_mail(self) -> None:
        """Set the types of health events that are kept for synchronous handlers until `Bus.poll`."""
        self._background.health.mail_types = frozenset(
            t for t in _HEALTH if t in self.signals and self.signals[t].handlers
        )

    def _make_signal(self, event_type: type[Event]) -> EventSignal:
        """Create the signal of an event at its first use, and attach the subscriptions to "*"."""
        signal = EventSignal(event_type, self._owner, self._publish, lambda: self._background.limit_queues())
        signal.record(self._recorder)
        self.signals[event_type] = signal
        for subscription in self._subscriptions:
            if subscription.wildcard and subscription.subscriber is None and not event_type.background_born:
                self._attach(subscription, event_type, calling_convention(subscription.fn, background=False))
        background = any(subscription.subscriber is not None for subscription in self._subscriptions)
        self.refresh_routes() if background else self._refresh_mail()
        return signal

    def _publish(self, signal: EventSignal) -> None:
        self.dispatch[signal.event_type] = signal.dispatch
        self.wanted[signal.event_type] = signal.wanted

    def _attach(self, subscription: Subscription, event_type: type[Event], takes: Takes) -> None:
        """Connect a sync handler to the signal of an event type; only create the signal for others."""
        signal = self.signal(event_type)
        if subscription.subscriber is not None or event_type in subscription.handlers:
            return  # `self.signal` has created the signal just now, and attached the subscriptions to "*"
        options = subscription.options
        handler = Handler(
            subscription.fn,
            takes,
            name=subscription.name,
            priority=options.priority,
            passes=subscription.filter(event_type),
            test=subscription.test(event_type),
            filter=options.filter,
            on_fired=subscription.cancel if options.once else None,
        )
        handler.timing.budget = self._budget(subscription, handler.timing, event_name(event_type))
        subscription.handlers[event_type] = handler
        if not subscription.paused:
            signal.connect(handler)

    def _budget(self, subscription: Subscription, timing: Timing, event: str) -> Budget | None:
        """Return the budget of a subscription, which reports an excess once; None without a limit."""
        seconds, name = subscription.options.budget, subscription.name
        if seconds is None:
            return None

        def exceeded(p99: float) -> None:  # reported once per subscription
            if not subscription.over_budget:
                subscription.over_budget = True
                self._background.health.report_slow(name, event, seconds, p99, timing.clocked)

        return Budget(seconds, exceeded)

    def _types_of(self, subscription: Subscription) -> tuple[type[Event], ...]:
        """Return the subscribed types; for "*" all known ones that the subscription can receive."""
        if not subscription.wildcard:
            return subscription.events
        sync = subscription.subscriber is None
        return tuple(
            t for t in dict.fromkeys([*declared_events(), *self.signals]) if not (sync and t.background_born)
        )

    def _unique(self, name: str | None, default: str) -> str:
        """Return the name of a new subscription: `name`, or else `default` with a number if it is taken."""
        taken = {subscription.name for subscription in self._subscriptions}
        if name is not None:
            if name in taken:
                raise ValueError(f"this bus already has a subscription named {name!r}: choose another name")
            return name
        candidates = (default if i == 1 else f"{default} #{i}" for i in range(1, len(taken) + 2))
        return next(candidate for candidate in candidates if candidate not in taken)
