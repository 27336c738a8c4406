"""The bus: who hears what, in which order, and where.

    bus = Bus()

    @bus.on("after_train_iter", priority=70)
    def step_lr(trainer, event): ...

    @bus.on(AfterValEpoch)
    async def post_to_slack(event): ...

A plain function runs at once on the emitting thread, in priority order; a coroutine function, or a function with
`offload="thread"` or `"process"`, runs in the background and never holds up an emit. This module imports no torch.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet, ref

from eventloop.background.loop import Background
from eventloop.background.queues.options import LaneOptions, OnError, Overflow
from eventloop.bus import process_exit as lifetime
from eventloop.bus.capture import capture
from eventloop.bus.dry_run import Silent, under_way
from eventloop.bus.event_order import event_plans
from eventloop.bus.event_signal import EventSignal
from eventloop.bus.recording import Recording
from eventloop.bus.subscribers import Subscribers
from eventloop.bus.subscription import DrainReport, PlanRow, Subscription, SubscriptionStats, make_options
from eventloop.bus.table import plan_table
from eventloop.costs.records import HandlerCost, SubscriberCost
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.catalogue import find_event
from eventloop.events.deferred import Deferred
from eventloop.events.filters import Predicate
from eventloop.events.priority import Priority
from eventloop.util.functions import handler_name, is_coroutine_function

if TYPE_CHECKING:
    import torch

    from eventloop.bus.modules import Kind, ModuleSubscription

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)


class Bus:
    """A blinker bus with an order, filters, background subscribers and an account of all of them.

    Args:
        drain_timeout: seconds that `flush` and `close` wait for background subscribers where they are called without a
            timeout, as by `with` and at the end of a run; as often again while ever less is left, ten times in all. At
            interpreter exit, and in a run that a signal ends, once.

    Raises:
        TypeError, ValueError: that is no number, or below 0.
    """

    def __init__(self, *, drain_timeout: float = 10.0) -> None:
        if isinstance(drain_timeout, bool) or not isinstance(drain_timeout, int | float):
            raise TypeError(f"drain_timeout must be a number of seconds, got {drain_timeout!r}")
        if not drain_timeout >= 0:
            raise ValueError(f"drain_timeout must be at least 0 seconds, got {drain_timeout}")
        self.drain_timeout = drain_timeout
        self.closed = False
        self.for_runs = False
        """True for a trainer's bus: the next run or background subscription reopens it."""
        self.overtime = True
        """Whether a flush and a close without a timeout go on while subscribers deliver; False where time is short."""
        self.rehearsal = under_way()
        """What holds back the runs of this process, if anything does; see `eventloop.bus.dry_run`."""
        self._background = Background() if self.rehearsal is None else Silent()
        self._subscribers = Subscribers(self, self._background)
        self._dispatch = self._subscribers.dispatch
        self._wanted = self._subscribers.wanted
        self.health = self._background.health
        """What the background sent, for `poll`: a loop looks whether there is any before it calls."""
        self._recording: ref[Recording] | None = None  # held by the background until it is finished
        self._module_subscriptions: WeakSet[ModuleSubscription] = WeakSet()  # their handlers hold them
        lifetime.watch(self, self._background)
        if self.rehearsal is not None:
            self.rehearsal.admit(self)

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
        overflow: Overflow = "spill",
        on_error: OnError = "disable",
        stall_timeout: float = 60.0,
        batch: bool | int = False,
        budget_us: float | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> Callable[[F], F]:
        """Subscribe the decorated function and return it unchanged; see `subscribe` for the arguments.

        A coroutine function runs on the bus's own event loop, on a thread in the background, or on the caller's with
        `loop=asyncio.get_running_loop()`.
        """
        if len(events) == 1 and callable(events[0]) and not isinstance(events[0], type):
            raise TypeError('bus.on needs the event: write @bus.on("after_train_iter"), not @bus.on')

        def decorate(fn: F) -> F:
            self.subscribe(
                fn, *events, priority=priority, every=every, start=start, once=once, when=when, name=name,
                offload=offload, queue=queue, overflow=overflow, on_error=on_error,
                stall_timeout=stall_timeout, batch=batch, budget_us=budget_us, loop=loop,
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
        overflow: Overflow = "spill",
        on_error: OnError = "disable",
        stall_timeout: float = 60.0,
        batch: bool | int = False,
        budget_us: float | None = None,
        loop: AbstractEventLoop | None = None,
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
            offload: where a plain function runs off the emitting thread: "thread", or "process" for what is heavy in
                Python. A process imports `fn`, so it must be a function of a module (not of the script that is run),
                or a method of an object that pickles. It is killed when it stalls and started again when it dies;
                what it had not finished it is sent again: each event is delivered at least once.
            queue, overflow: how many events may wait for a background subscriber, and what happens beyond: "spill"
                (they wait in a temporary file of at most 1 GiB), "drop_oldest", "drop_newest", "latest" (keep one),
                "block" (the emitting thread waits). Before the queues is an inbox that the emitting thread appends to and
                never waits for. It is emptied five times a second, so a queue is given what was emitted in 0.2 s at once:
                with less room than that it drops or spills, however fast the subscriber. The inbox has room for 1,048,576
                events: a loop that does nothing but emit more than the background routes meanwhile, or goes on while a
                coroutine blocks it, loses the oldest, which are counted as dropped.
            on_error: what the error of a background subscriber does: "disable" it, "log" and go on, or "raise"
                on the training thread at the next iteration boundary.
            stall_timeout: seconds one delivery, `on_flush`, `on_close` or the `when` of one in the background may last
                before the subscriber is given up.
            batch: deliver `list[Event]`: all that is waiting, or at most so many.
            budget_us: microseconds that the p99 of its calls should stay under. The first time sampled calls say
                that it does not, a warning and the event `slow_handler` name it.
            loop: the asyncio event loop that runs a coroutine function, in place of the bus's own; for what belongs to a
                program's loop, such as its HTTP session. Events wait in the queue while that loop is busy, as it is
                while `trainer.train()` or `bus.close()` runs on its thread: these do not wait for the subscriber then.
                `await asyncio.to_thread(trainer.train)` leaves the loop free, but no signal reaches a training there:
                call `trainer.stop(reason)` where the task is cancelled. What is left when the loop ends is
                counted as failed or dropped.
            on_flush, on_close: called on the background subscriber's own thread when the bus is flushed, closed.

        Raises:
            TypeError, ValueError: an unknown event, a wrong signature, a bad option: see the message.
            RuntimeError: a background subscriber on a closed bus that no trainer has.
        """
        options = make_options(
            fn, priority=priority, every=every, start=start, once=once, when=when, name=name, offload=offload,
            lane=LaneOptions(queue, overflow, on_error, stall_timeout, batch, on_flush, on_close),
            budget_us=budget_us, loop=loop,
        )  # fmt: skip
        if self.closed and self.for_runs and (offload or is_coroutine_function(fn)):
            self._subscribers.check(fn, events, name, options)
            self.reopen()
        return self._subscribers.add(fn, events, name, options)

    def off(self, fn: Callable[..., Any]) -> None:
        """Cancel every subscription of `fn`.

        Raises:
            ValueError: it has none.
        """
        modules = [found for found in self._module_subscriptions if found.active and found.fn == fn]
        found: list[Subscription | ModuleSubscription] = [*self._subscribers.of(fn), *modules]
        if not found:
            raise ValueError(f"{handler_name(fn)} is not subscribed to this bus")
        for subscription in found:
            subscription.cancel()

    def on_module(
        self,
        model: torch.nn.Module,
        pattern: str | Sequence[str],
        kind: Kind = "forward",
        *,
        every: int = 1,
        start: int = 0,
    ) -> Callable[[F], F]:
        """Make the decorated function a PyTorch forward or backward hook of some modules, and return it unchanged.

            @bus.on_module(model, "layers.*", "forward", every=500)
            def look(module, inputs, outputs): ...

        See `subscribe_module`.
        """

        def decorate(fn: F) -> F:
            self.subscribe_module(fn, model, pattern, kind, every=every, start=start)
            return fn

        return decorate

    def subscribe_module(
        self,
        fn: Callable[..., Any],
        model: torch.nn.Module,
        pattern: str | Sequence[str],
        kind: Kind = "forward",
        *,
        every: int = 1,
        start: int = 0,
    ) -> ModuleSubscription:
        """Call `fn(module, inputs, outputs)`, or `fn(name, module, inputs, outputs)`, in the training iterations
        that `every` and `start` choose; in all others the modules are as they were. What it returns is ignored. What
        `torch.compile` made runs eagerly in those iterations: it calls no hooks.

        Args:
            pattern: of modules' names, or several: `*` within one part of a name, `**` for any number of parts.
            kind: "forward", or "backward" for `(module, grad_inputs, grad_outputs)`.

        Raises:
            TypeError, ValueError: no module, a wrong signature, a pattern that matches nothing: see the message.
        """
        from eventloop.bus.modules import ModuleSubscription  # the one thing of a bus that needs torch

        subscription = ModuleSubscription(self.subscribe, fn, model, pattern, kind, every, start)
        self._module_subscriptions.add(subscription)
        return subscription

    # --- emitting ------------------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Run the event's sync handlers in order, on this thread, which may be a background subscriber's, and hand it to
        its background subscribers. In a forked process, as a loader's worker is, nobody hears it.

        Raises:
            TypeError: `event` is no event.
            Exception: whatever a handler raised, with a note that names the handler.
        """
        try:  # a plain dict: the interpreter's fast path for a look-up, which a subclass would lose
            dispatch = self._dispatch[type(event)]
        except KeyError:
            if not isinstance(event, Event):
                raise TypeError(
                    f"bus.emit takes an event, built by keyword as AfterValEpoch(metrics=...), got {event!r}"
                ) from None
            dispatch = self.signal(type(event)).dispatch
        dispatch(event, trainer)

    def wants(self, event_type: type[Event]) -> bool:
        """True when somebody subscribed: ask before building an event that may interest nobody."""
        try:
            return self._wanted[event_type]
        except KeyError:
            pass
        return self.signal(event_type).wanted

    def wanted(self, *event_types: type[Event]) -> Mapping[type[Event], bool]:
        """What `wants` says of these events, kept up to date: for a loop, which asks in each iteration."""
        for event_type in event_types:
            self.signal(event_type)
        return self._wanted

    def latest(self, event: str | type[E]) -> E | None:
        """The last event of a type that was emitted, or None. What nobody wants the loop does not emit."""
        event_type: Any = find_event(event)
        if event_type in self._background.latest:
            return self._background.latest[event_type]  # type: ignore[return-value]
        signal = self._subscribers.signals.get(event_type)
        return signal.latest if signal is not None else None  # type: ignore[return-value]

    def holding(self, event: str | type[Event]) -> AbstractContextManager[None]:
        """Within the block, events of a type reach their sync handlers alone; background subscribers are given them when
        it has ended, and not at all when it raises. For an event of which it is not yet sure that it will have been so.

        Raises:
            TypeError, ValueError: no such event.
        """
        return self._subscribers.holding(event)

    def post(self, deferred: Deferred, *types: type[Event]) -> None:
        """Hand over events of `types` that the background side will make when their values are there."""
        if self._background.finished:
            self._subscribers.after_close.refuse_posted(types)
        else:
            self._background.post(deferred, types)

    def warm_up(self) -> None:
        """Start the background loop now. Else the first background subscriber or posted event does, and pays for it:
        some 50 ms in a process where anyio was not imported yet."""
        if not self.closed:
            self._background.start()

    def poll(self, trainer: Any = None) -> None:
        """Run what the background sent to the training thread: health events (`handler_failed`, `events_dropped`,
        `slow_handler`) for synchronous handlers. A training loop calls it once an iteration; who has none calls it now
        and then.

        Raises:
            Exception: the error of a subscriber with `on_error="raise"`.
        """
        self.deliver_mail(trainer)
        if self.health.errors:
            raise self.health.errors.popleft()

    def deliver_mail(self, trainer: Any = None) -> None:
        """The health events of `poll`, and no errors: what a run's end does, whose close raises these itself."""
        mail = self.health.mail
        while mail:
            event = mail.popleft()
            self.signal(type(event)).run_sync(event, trainer)

    # --- looking -------------------------------------------------------------------------------------------

    def signal(self, event: str | type[Event]) -> EventSignal:
        """The blinker signal of an event.

        Raises:
            TypeError, ValueError: no such event.
        """
        return self._subscribers.signal(event)

    def plan(self, event: str | type[Event]) -> list[PlanRow]:
        """Who hears an event: the sync handlers in the order they run, then the background subscribers."""
        return self._subscribers.plan(event)

    @property
    def failing(self) -> BaseException | None:
        """The error under which a closing event is still reaching its remaining handlers, or None.
        A handler that would make things durable should look first."""
        errors = (signal.failing for signal in self._subscribers.signals.values())
        return next((error for error in errors if error is not None), None)

    def stats(self) -> list[SubscriptionStats]:
        """One record a subscription, in order of registration, exact up to this call."""
        routed = self._subscribers.settle()
        return self._subscribers.stats(routed=routed)

    def handler_costs(self, wall: float = 0.0) -> list[HandlerCost]:
        """One record a synchronous handler and event: counts, and times estimated from samples.

        Args:
            wall: the seconds that `share` is of.
        """
        return self._subscribers.handler_costs(wall)

    def subscriber_costs(self) -> list[SubscriberCost]:
        """One record a background subscriber, as of now: what is on its way to the queues is in none of them."""
        return self._subscribers.subscriber_costs()

    def __str__(self) -> str:
        return plan_table(event_plans(self.plan))

    def capture(self, *events: str | type[Event]) -> AbstractContextManager[list[Event]]:
        """Collect events while the block runs; background-born ones are there when it ends."""
        return capture(self.subscribe, self.flush, events)

    def record(self, recorder: SpanRecorder) -> Recording:
        """Leave spans of events, handlers and deliveries, and depths of queues, with `recorder`, until the recording
        is stopped.

            recorder = SpanRecorder()
            with bus.record(recorder) as recording:
                trainer.train()
            recording.wait(1.0)  # for the background subscribers

        Meanwhile each event costs about 2 us more, and 1 us for each handler; before and afterwards nothing.

        Raises:
            RuntimeError: another recorder is on the bus.
        """
        former = None if self._recording is None else self._recording()
        if former is not None and not former.stopped:
            raise RuntimeError("another recorder is on this bus: stop its recording first")
        if former is not None:
            former.finish()
        recording = Recording(recorder, self._subscribers, self._background)
        self._recording = ref(recording)
        recording.begin()
        return recording

    # --- ending --------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> DrainReport:
        """Wait until everything emitted so far is delivered, and what background subscribers emit meanwhile, at most
        `timeout` seconds; without one `drain_timeout`, and on while ever less is left.

        Raises:
            RuntimeError: called from a background subscriber, which would wait for itself.
        """
        self._refuse_in_background("flush")
        noting = self._subscribers.noting
        if timeout is None:
            complete = self._background.flush_while_delivering(
                self.drain_timeout, noting, lambda: self.overtime
            )
        else:
            complete = self._background.flush(timeout, noting())
        return DrainReport(complete, self._subscribers.stats())

    def never_wait(self) -> None:
        """From now on no emit waits for a blocking subscriber: one that is full takes more than its queue holds.
        For a run that is ended at once."""
        self._background.never_waits = True

    def close(self, timeout: float | None = None) -> DrainReport:
        """Deliver what was emitted, and what background subscribers emit meanwhile, close the subscribers, stop the thread,
        within `timeout` seconds; without one within `drain_timeout`, and on while ever less is left. Who emits on and on
        looks at `bus.closed`. What was dropped or has failed is logged.
        A delivery for which a flush has waited in vain is waited for no second time, but for a moment.
        Sync handlers go on working; closing again does nothing; what is emitted afterwards is counted as dropped, up to a
        `reopen`. What a Ctrl-C has interrupted the next `close` goes on with, or the exit of the interpreter; a second
        thread waits, within its own `timeout`, for the one that is closing.

        Raises:
            RuntimeError: called from a background subscriber.
            Exception: the error of a subscriber with `on_error="raise"` that nobody has seen yet.
        """
        self._refuse_in_background("close")
        complete = self.end(timeout) if timeout is not None else self.end(self.drain_timeout, overtime=True)
        report = DrainReport(complete, self._subscribers.stats())
        if self.health.errors:
            raise self.health.errors.popleft()
        return report

    def end(self, timeout: float, *, overtime: bool = False) -> bool:
        """What `close` does before it reports, and all that is done at interpreter exit; whether it was complete."""
        self.closed, background = True, self._background  # another thread may reopen the bus meanwhile
        as_ever = timeout >= self.drain_timeout
        complete = background.close(timeout, lambda: overtime and self.overtime, advises=as_ever)
        if background.finished:  # else another thread is about to finish it, or the exit will
            lifetime.forget(background)
            self._subscribers.refresh_routes()
            self._subscribers.after_close.sweep()
        return complete

    def reopen(self) -> None:
        """Deliver again after a close: to the same subscribers, in the same order. Does nothing where the bus is open.
        A trainer that trains again calls this.

        Filters, pauses and what fired `once` are as they were, and accounts go on; what the close has left counts as
        dropped. Every background subscriber restarts, including disabled ones: a writer opens its files again. One that
        is still in a delivery is waited for, all together for `drain_timeout` seconds; then it is given nothing more, and
        the log names it.

        Raises:
            RuntimeError: called from a background subscriber, or in a forked process; another thread is still closing the
                bus after `drain_timeout` seconds; or no thread can be started.
        """
        if not self.closed:
            return
        self._refuse_in_background("reopen")
        if self._background.inert:
            raise RuntimeError(
                "bus.reopen was called in a forked process, and the bus's subscribers are those of its parent: make a new "
                "Bus, or Trainer, here"
            )
        self.end(self.drain_timeout)  # goes on with a close that a Ctrl-C has interrupted
        if not self._background.finished:
            raise RuntimeError(
                f"bus.reopen has waited drain_timeout={self.drain_timeout:g} s for another thread, which is still closing the "
                "bus: call it, or train, again when bus.close has returned there"
            )
        background = Background() if self.rehearsal is None else Silent()
        if self.rehearsal is None:
            background.start()
        background.latest.update(self._background.latest)
        self._background, self.health = background, background.health
        lifetime.watch(self, background)
        recording = None if self._recording is None else self._recording()
        if recording is not None and not recording.stopped:
            recording.go_on_with(background)
        self._subscribers.go_on_with(background, self.drain_timeout)
        self.closed = False

    @contextmanager
    def telling_losses(self) -> Iterator[None]:
        """Within the block the caller tells of what was dropped or has failed, so that a close does not."""
        background = self._background
        background.tells_losses = False
        try:
            yield
        finally:
            background.forget_losses()
            background.tells_losses = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"closing the bus then raised {late!r}")

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a Bus cannot be pickled: it belongs to the process that made it. Something sent to another process "
            "(a Dataset, a collate function) holds it, or the trainer; let it hold plain values instead"
        )

    def become_inert(self) -> None:
        """In a forked child: forget every subscriber, so that nothing is written twice."""
        self.closed = True
        self._background.become_inert()
        self._subscribers.forget()

    # --- inside --------------------------------------------------------------------------------------------

    def _refuse_in_background(self, what: str) -> None:
        if self._background.on_background_thread():
            raise RuntimeError(
                f"bus.{what} was called by a background subscriber, which would wait for itself"
            )
