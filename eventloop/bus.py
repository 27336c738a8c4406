"""The bus: who hears what, in which order, and where.

    bus = Bus()

    @bus.on("after_train_iter", priority=70)
    def step_lr(trainer, event): ...

    @bus.on(AfterValEpoch)
    async def post_to_slack(event): ...

A plain function runs at once on the emitting thread, in priority order; a coroutine function, or a function with
`offload="thread"`, runs in the background and never holds up an emit. This module imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from eventloop import lifetime
from eventloop.background import Background, Deferred
from eventloop.catalogue import declared_events, event_name, find_event
from eventloop.events import Event, EventsDropped, HandlerFailed, SlowHandler
from eventloop.filters import Predicate, make_filter
from eventloop.handler import Handler, Takes, calling_convention, handler_name, is_coroutine_function
from eventloop.lane import LaneOptions, OnError, Overflow
from eventloop.plan import Dispatch
from eventloop.priority import Priority
from eventloop.render import bus_table
from eventloop.routing import RouteTable
from eventloop.signal import EventSignal
from eventloop.subscription import DrainReport, PlanRow, Subscription, SubscriptionStats, make_options

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)

_HEALTH = (HandlerFailed, EventsDropped, SlowHandler)
_RARE = 8
"""From `every=8` on a handler is timed on each call: samples would seldom meet it, and it can afford it."""


class _Table(dict[type[Event], Any]):
    """Looks a signal's dispatch up by event type; a type met for the first time gets its signal."""

    def __init__(self, bus: Bus, read: Callable[[EventSignal], Any]) -> None:
        super().__init__()
        self._bus = bus
        self._read = read

    def __missing__(self, event_type: type[Event]) -> Any:
        return self._read(self._bus.signal(event_type))


class Bus:
    """A blinker bus with an order, filters, background subscribers and an account of all of them.

    Args:
        drain_timeout: seconds `close` may take when it is called without one: by `with`, at interpreter exit.
    """

    def __init__(self, *, drain_timeout: float = 10.0) -> None:
        self.drain_timeout = drain_timeout
        self.closed = False
        self._lock = threading.RLock()
        self._signals: dict[type[Event], EventSignal] = {}
        self._dispatch: dict[type[Event], Dispatch] = _Table(self, lambda signal: signal.dispatch)
        self._wanted: dict[type[Event], bool] = _Table(self, lambda signal: signal.wanted)
        self._subscriptions: list[Subscription] = []
        self._background = Background()
        lifetime.watch(self, self._background)

    # --- subscribing ---------------------------------------------------------------------------------------

    def on(
        self,
        *events: str | type[Event],
        priority: Priority | int | str = Priority.NORMAL,
        every: int = 1,
        start: int = 0,
        once: bool = False,
        when: Predicate | None = None,
        name: str | None = None,
        offload: str | None = None,
        queue: int = 1024,
        overflow: Overflow = "drop_oldest",
        on_error: OnError = "disable",
        stall_timeout: float = 60.0,
        batch: bool = False,
    ) -> Callable[[F], F]:
        """Subscribe the decorated function and return it unchanged; see `subscribe` for the arguments."""
        if len(events) == 1 and callable(events[0]) and not isinstance(events[0], type):
            raise TypeError('bus.on needs the event: write @bus.on("after_train_iter"), not @bus.on')

        def decorate(fn: F) -> F:
            self.subscribe(
                fn, *events, priority=priority, every=every, start=start, once=once, when=when, name=name,
                offload=offload, queue=queue, overflow=overflow, on_error=on_error,
                stall_timeout=stall_timeout, batch=batch,
            )  # fmt: skip
            return fn

        return decorate

    def subscribe(
        self,
        fn: Callable[..., Any],
        *events: str | type[Event],
        priority: Priority | int | str = Priority.NORMAL,
        every: int = 1,
        start: int = 0,
        once: bool = False,
        when: Predicate | None = None,
        name: str | None = None,
        offload: str | None = None,
        queue: int = 1024,
        overflow: Overflow = "drop_oldest",
        on_error: OnError = "disable",
        stall_timeout: float = 60.0,
        batch: bool = False,
        on_flush: Callable[[], object] | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> Subscription:
        """Call `fn` whenever one of `events` is emitted.

        Args:
            fn: `(trainer, event)` or `(event)`; in the background `(event)` alone.
            events: names, classes, or "*" for all of them (a sync handler's "*" leaves out background-born ones).
            priority: a `Priority`, its name, or 0..100; lower runs first, ties in registration order.
            every, start: fire when the event's counter `c` has `c > start and (c - start) % every == 0`.
            once: fire a single time, then unsubscribe.
            when: a predicate of the event.
            name: what reports call it; the function's own name by default.
            offload: "thread" sends a plain function off the emitting thread.
            queue, overflow: how many events may wait for a background subscriber, and what happens beyond:
                "drop_oldest", "drop_newest", "latest" (keep one), "block" (the emitting thread waits).
            on_error: what the error of a background subscriber does: "disable" it, "log" and go on, or "raise"
                on the training thread at the next iteration boundary.
            stall_timeout: seconds one delivery may last before the subscriber is given up.
            batch: deliver `list[Event]`, all that is waiting.
            on_flush, on_close: called on the background subscriber's own thread when the bus is flushed, closed.

        Raises:
            TypeError, ValueError: an unknown event, a wrong signature, a bad option: see the message.
            RuntimeError: a background subscriber on a closed bus.
        """
        if not events:
            raise TypeError(f"{handler_name(fn)} subscribes to no event: name at least one, or '*' for all")
        background = offload is not None or is_coroutine_function(fn)
        options = make_options(
            fn, priority=priority, every=every, start=start, once=once, when=when, offload=offload,
            lane=LaneOptions(queue, overflow, on_error, stall_timeout, batch, on_flush, on_close),
        )  # fmt: skip
        takes = calling_convention(fn, background=background)
        wildcard = "*" in events
        types = () if wildcard else tuple(dict.fromkeys(find_event(e) for e in events))
        for event_type in types:
            if event_type.background_born and not background:
                raise TypeError(
                    f"{handler_name(fn)} is a sync handler, but {event_name(event_type)} is made in the background, "
                    "when the training thread has moved on: read trainer.metrics instead, or subscribe a coroutine "
                    "function"
                )
        with self._lock:
            subscription = Subscription(
                self, fn, types, wildcard=wildcard, name=self._unique(name, handler_name(fn)), options=options,
                runs_on="sync" if not background else (options.offload or "loop"),
            )  # fmt: skip
            if background:
                subscription.lane = self._background.add_lane(
                    subscription.name, fn, options.lane, thread=options.offload == "thread"
                )
            self._subscriptions.append(subscription)
            for event_type in self._types_of(subscription):
                self._attach(subscription, event_type, takes)
            self._refresh_routes()
        return subscription

    def off(self, fn: Callable[..., Any]) -> None:
        """Cancel every subscription of `fn`.

        Raises:
            ValueError: it has none.
        """
        found = [s for s in self._subscriptions if s.fn == fn]
        if not found:
            raise ValueError(f"{handler_name(fn)} is not subscribed to this bus")
        for subscription in found:
            subscription.cancel()

    def remove(self, subscription: Subscription) -> None:
        """Take a subscription off the bus; `Subscription.cancel` calls this."""
        with self._lock:
            if not subscription.active:
                return
            subscription.active = False
            self._subscriptions.remove(subscription)
            for event_type, handler in subscription.handlers.items():
                self._signals[event_type].disconnect(handler)
            if subscription.lane is not None:
                self._refresh_routes()
                self._background.remove_lane(subscription.lane)

    def refresh(self, subscription: Subscription) -> None:
        """Apply a change of `subscription.paused`."""
        if subscription.lane is not None:
            subscription.lane.paused = subscription.paused
        for event_type, handler in subscription.handlers.items():
            signal = self._signals[event_type]
            if subscription.paused:
                signal.disconnect(handler)
            elif subscription.active:
                signal.reconnect(handler)

    # --- emitting ------------------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Run the event's sync handlers in order, and hand it to its background subscribers.

        Raises:
            TypeError: `event` is no event.
            Exception: whatever a handler raised, with a note that names the handler.
        """
        self._dispatch[type(event)](event, trainer)

    def wants(self, event_type: type[Event]) -> bool:
        """True when somebody subscribed: ask before building an event that may interest nobody."""
        return self._wanted[event_type]

    def latest(self, event: str | type[E]) -> E | None:
        """The last event of a type that was emitted, or None. What nobody wants the loop does not emit."""
        event_type: Any = find_event(event)
        if event_type in self._background.latest:
            return self._background.latest[event_type]  # type: ignore[return-value]
        signal = self._signals.get(event_type)
        return signal.latest if signal is not None else None  # type: ignore[return-value]

    def post(self, deferred: Deferred, *types: type[Event]) -> None:
        """Hand over events of `types` that the background side will make when their values are there."""
        if not self.closed:
            self._background.post(deferred, types)

    def poll(self, trainer: Any = None) -> None:
        """Run what the background sent to the training thread; a training loop calls it once an iteration.

        Raises:
            Exception: the error of a subscriber with `on_error="raise"`.
        """
        background = self._background
        while background.mail:
            event = background.mail.popleft()
            self.signal(type(event)).run_sync(event, trainer)
        if background.errors:
            raise background.errors.popleft()

    # --- looking -------------------------------------------------------------------------------------------

    def signal(self, event: str | type[Event]) -> EventSignal:
        """The blinker signal of an event.

        Raises:
            TypeError, ValueError: no such event.
        """
        event_type = find_event(event)
        signal = self._signals.get(event_type)
        if signal is None:
            with self._lock:
                signal = self._signals.get(event_type) or self._make_signal(event_type)
        return signal

    def plan(self, event: str | type[Event]) -> list[PlanRow]:
        """Who hears an event: the sync handlers in the order they run, then the background subscribers."""
        event_type = find_event(event)
        rows = [
            PlanRow(order, handler.priority, handler.name, handler.filter, "sync")
            for order, handler in enumerate(self.signal(event_type).handlers, start=1)
        ]
        rows += [
            PlanRow(0, s.options.priority, s.name, s.options.filter, s.runs_on)
            for s in self._subscriptions
            if s.lane is not None and (s.wildcard or event_type in s.events)
        ]
        return rows

    @property
    def failing(self) -> BaseException | None:
        """The error under which a closing event is still reaching its remaining handlers, or None.
        A handler that would make things durable should look first."""
        return next((s.failing for s in self._signals.values() if s.failing is not None), None)

    def stats(self) -> list[SubscriptionStats]:
        """One record a subscription, in order of registration, exact up to this call."""
        self._settle()
        return [subscription.account() for subscription in self._subscriptions]

    def stats_of(self, subscription: Subscription) -> SubscriptionStats:
        """The record of one subscription."""
        self._settle()
        return subscription.account()

    def __str__(self) -> str:
        return bus_table(self)

    @contextmanager
    def capture(self, *events: str | type[Event]) -> Iterator[list[Event]]:
        """Collect events while the block runs; background-born ones are there when it ends."""
        seen: list[Event] = []
        types = [e if e == "*" else find_event(e) for e in events]
        sync = [t for t in types if isinstance(t, str) or not t.background_born]
        born = [t for t in types if not isinstance(t, str) and t.background_born]
        subscriptions = [self.subscribe(seen.append, *sync, priority=Priority.LOWEST)] if sync else []
        if born:
            subscriptions.append(self.subscribe(seen.append, *born, offload="thread", overflow="block"))
        try:
            yield seen
        finally:
            if born:
                self.flush()
            for subscription in subscriptions:
                subscription.cancel()

    # --- ending --------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> DrainReport:
        """Wait until everything emitted so far is delivered, at most `timeout` seconds.

        Raises:
            RuntimeError: called from a background subscriber, which would wait for itself.
        """
        self._refuse_in_background("flush")
        complete = self._background.flush(self.drain_timeout if timeout is None else timeout)
        return DrainReport(complete, self.stats())

    def close(self, timeout: float | None = None) -> DrainReport:
        """Deliver what was emitted, close the subscribers, stop the thread, within `timeout` seconds.
        Sync handlers go on working; closing again does nothing.

        Raises:
            RuntimeError: called from a background subscriber.
            Exception: the error of a subscriber with `on_error="raise"` that nobody has seen yet.
        """
        self._refuse_in_background("close")
        self.closed = True
        complete = self._background.close(self.drain_timeout if timeout is None else timeout)
        for signal in self._signals.values():
            signal.hand_over_to(())
        report = DrainReport(complete, self.stats())
        if self._background.errors:
            raise self._background.errors.popleft()
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a Bus cannot be pickled: it belongs to the process that made it. Something sent to another process "
            "(a Dataset, a collate function) holds it, or the trainer; let it hold plain values instead"
        )

    def become_inert(self) -> None:
        """In a forked child: forget every subscriber, so that nothing is written twice."""
        self._lock = threading.RLock()  # another thread may have held it when the process was copied
        self.closed = True
        self._subscriptions.clear()
        self._background = Background()
        self._background.closed = True
        for signal in self._signals.values():
            signal.silence()

    # --- inside --------------------------------------------------------------------------------------------

    def _refuse_in_background(self, what: str) -> None:
        if self._background.on_background_thread():
            raise RuntimeError(
                f"bus.{what} was called by a background subscriber, which would wait for itself"
            )

    def _unique(self, name: str | None, default: str) -> str:
        taken = {s.name for s in self._subscriptions}
        if name is not None:
            if name in taken:
                raise ValueError(f"a subscription named {name!r} is on this bus already: choose another name")
            return name
        candidates: Iterable[str] = (
            default if i == 1 else f"{default} #{i}" for i in range(1, len(taken) + 2)
        )
        return next(c for c in candidates if c not in taken)

    def _types_of(self, subscription: Subscription) -> tuple[type[Event], ...]:
        if not subscription.wildcard:
            return subscription.events
        sync = subscription.lane is None
        return tuple(
            t for t in dict.fromkeys([*declared_events(), *self._signals]) if not (sync and t.background_born)
        )

    def _make_signal(self, event_type: type[Event]) -> EventSignal:
        signal = EventSignal(event_type, self, self._publish, self._background.relieve)
        self._signals[event_type] = signal
        for subscription in self._subscriptions:
            if subscription.wildcard and subscription.lane is None and not event_type.background_born:
                self._attach(subscription, event_type, calling_convention(subscription.fn, background=False))
        self._refresh_routes()
        return signal

    def _publish(self, signal: EventSignal) -> None:
        self._dispatch[signal.event_type] = signal.dispatch
        self._wanted[signal.event_type] = signal.wanted

    def _attach(self, subscription: Subscription, event_type: type[Event], takes: Takes) -> None:
        signal = self.signal(event_type)
        if subscription.lane is not None or event_type in subscription.handlers:
            return  # a new signal has attached the wildcards already
        options = subscription.options
        handler = Handler(
            subscription.fn, takes, name=subscription.name, priority=options.priority,
            passes=make_filter(event_type, options.every, options.start, options.when), filter=options.filter,
            rare=options.every >= _RARE, on_fired=subscription.cancel if options.once else None,
        )  # fmt: skip
        subscription.handlers[event_type] = handler
        signal.connect(handler)

    def _refresh_routes(self) -> None:
        table = RouteTable(self._subscriptions, self._types_of)
        background = self._background
        for event_type, signal in self._signals.items():
            gates = [background.gate(r.lane, r.passes) for r in table.gated(event_type)]
            inbox = [background.inbox.append] if table.routed(event_type) else []
            signal.hand_over_to((*gates, *inbox))
        mail_types = frozenset(t for t in _HEALTH if t in self._signals and self._signals[t].handlers)
        background.set_routes(table.by_type(), mail_types)

    def _settle(self) -> None:
        self._background.route_now(timeout=1.0)
        for signal in self._signals.values():
            signal.settle()
