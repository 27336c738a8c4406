"""Define the bus, which calls the handlers of each event in order.

    bus = Bus()

    @bus.on("after_train_iter", priority=70)
    def step_lr(trainer, event): ...

    @bus.on(AfterValEpoch)
    async def post_to_slack(event): ...

A plain function runs at once on the emitting thread, in priority order. A coroutine function, or a function
with `offload="thread"` or `"process"`, runs in the background, and an emit does not wait for it.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet, ref

from eventloop.background import closing
from eventloop.background.background import Background
from eventloop.background.overtime import after_signal
from eventloop.background.queues.leftover import StoreUndelivered
from eventloop.background.queues.options import OnError, Overflow, SubscriberOptions
from eventloop.background.threads import on_background_thread
from eventloop.bus.capture import capture
from eventloop.bus.dry_run import FirstEvent
from eventloop.bus.event_order import event_plans, plan_table
from eventloop.bus.event_signal import EventSignal
from eventloop.bus.handler import refuse_functions
from eventloop.bus.process_exit import unwatch, watch
from eventloop.bus.recording import Recording, begin_recording
from eventloop.bus.subscribers import Subscribers
from eventloop.bus.subscription import DrainReport, Options, PlanRow, Subscription, SubscriptionStats
from eventloop.costs.handler_trend import HandlerTrend
from eventloop.costs.records import HandlerCost, SubscriberCost
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.catalogue import find_event
from eventloop.events.deferred import Deferred
from eventloop.events.filters import Predicate
from eventloop.events.priority import Priority
from eventloop.migration.names import knowing_others, knowing_renamed
from eventloop.processes.dry_run import plan_file
from eventloop.util.checks import check_seconds
from eventloop.util.functions import handler_name, is_coroutine_function

if TYPE_CHECKING:
    import torch

    from eventloop.bus.modules import Kind, ModuleSubscription

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)


@knowing_renamed
class Bus:
    """Emit events to sync handlers in priority order and to background subscribers, and count each event.

    Args:
        drain_timeout: seconds that `flush` and `close` wait for background subscribers if they are called
            without a timeout, as at the end of a `with` block or a run. While subscribers deliver or compute,
            the wait is repeated, up to ten times this long in total. At interpreter exit it is not repeated.
            If a signal ends the run, the wait is a fifth of this, or a tenth after a long wait for saves.

    Raises:
        TypeError, ValueError: `drain_timeout` is not a number, or below 0.
    """

    @knowing_others
    def __init__(self, *, drain_timeout: float = 10.0) -> None:
        check_seconds("drain_timeout", drain_timeout, zero=True)
        self.drain_timeout = drain_timeout
        self.closed = False
        self.for_runs = False
        """True for a trainer's bus: after a close, the next run or background subscription reopens it."""
        self.begins_in_forks = False
        """True for a bridge's bus: a process that is forked before the first run keeps the subscribers."""
        self.overtime = True  # False once a signal ends the run: waits are shorter, and never extended
        self.stopped_at: float | None = None  # the `monotonic` time at which a signal stopped the run's loop
        self._background = Background()
        self._subscribers = Subscribers(self, self._background)
        self._dispatch = self._subscribers.dispatch if plan_file() is None else FirstEvent(self)
        self._wanted = self._subscribers.wanted
        self.health = self._background.health
        """The health events and errors of background subscribers, which `poll` handles."""
        self._recording: ref[Recording] | None = None  # weak: the background keeps it alive until its end
        self._module_subscriptions: WeakSet[ModuleSubscription] = WeakSet()  # their handlers keep them alive
        watch(self, self._background)

    # --- subscribing ---------------------------------------------------------------------------------------

    @knowing_others
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
        """Subscribe the decorated function and return it unchanged; `subscribe` explains the arguments.

        A coroutine function runs on the bus's event loop in the background, or on the given `loop`.
        """
        refuse_functions(events)

        def decorate(fn: F) -> F:
            """Subscribe the function after a check of the arguments, and return it."""
            background = SubscriberOptions(queue, overflow, on_error, stall_timeout, batch)
            arguments = priority, every, start, once, when, name, offload, budget_us, loop
            self._subscribe(fn, events, Options.checked(fn, *arguments, background))
            return fn

        return decorate

    @knowing_others
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
        linger: float = 0.0,
        timed: bool = False,
    ) -> Subscription:
        """Call `fn` whenever one of `events` is emitted.

        Args:
            fn: `(trainer, event)` or `(event)`; in the background only `(event)`.
            events: names, classes, or "*" for all events (for a sync handler all that no background creates).
            priority: of a sync handler: a `Priority`, its name, or 0..100; lower first, ties as registered.
            every, start: call `fn` when the event's counter `c` has `c > start and (c - start) % every == 0`.
            once: call `fn` a single time, then unsubscribe it.
            when: a function of the event that returns whether `fn` is called.
            name: name in reports; by default the function's own name.
            offload: run a plain function off the emitting thread: on a "thread", or in a "process" if it
                computes much in Python. A process imports `fn`, so it must be a function of a module (not of
                the main script), or a method of an object that pickles. A process that stalls is killed; one
                that dies is started again, and unfinished events are delivered again.
            queue, overflow: number of events that may wait for a background subscriber, and the policy beyond
                it: "spill" (to temporary files of at most 1 GiB), "drop_oldest", "drop_newest", "latest"
                (keep one), or "block" (the emitting thread waits). The emitting thread appends to a list, and
                the policy is applied to the list 5 times a second. So with a policy that drops, the queue
                needs room for the events of 0.2 s, however fast the subscriber is, or it drops some. With
                "spill" a subscriber that delivers takes events from the list all the time. The list holds at
                most 1,048,576 events; beyond that the oldest are dropped and counted.
            on_error: reaction to an error of a background subscriber: "disable" it, "log" and go on, or
                "raise" the error on the training thread at the next iteration boundary.
            stall_timeout: seconds until a delivery, `on_flush`, `on_close` or `when` disables the subscriber.
            batch: deliver `list[Event]`: all waiting events with True, or at most this number of events.
            budget_us: microseconds for the p99 of its calls; beyond it, one warning and one `slow_handler`.
            loop: the asyncio event loop that runs a coroutine function, in place of the bus's; for objects of
                a program's loop, such as an HTTP session. Events wait while that loop is busy, as while
                `trainer.train()` or `bus.close()` runs on its thread; these calls do not wait for the
                subscriber. `await asyncio.to_thread(trainer.train)` leaves the loop free, but no signal
                reaches a training there: call `trainer.stop(reason)` when the task is cancelled. Events left
                when the loop ends count as failed or dropped.
            on_flush, on_close: called on the background subscriber's own thread at a flush and a close.
            linger: the least seconds from one delivery to the next, so that a delivery has more events, for a
                destination whose calls cost much. A flush or close does not wait for them.
            timed: with `batch`, deliver `list[Timed]`: events with the Unix times of their emits.

        Raises:
            TypeError, ValueError: an unknown event, a wrong signature or a bad option, named in the message.
            RuntimeError: a background subscriber is added to a closed bus without a trainer.
        """
        background = SubscriberOptions(
            queue, overflow, on_error, stall_timeout, batch, on_flush, on_close, linger, timed
        )
        arguments = priority, every, start, once, when, name, offload, budget_us, loop
        return self._subscribe(fn, events, Options.checked(fn, *arguments, background))

    def off(self, fn: Callable[..., Any]) -> None:
        """Cancel every subscription of `fn`.

        Raises:
            ValueError: `fn` has no subscription.
        """
        of_modules = [each for each in self._module_subscriptions if each.active and each.fn == fn]
        subscriptions: list[Subscription | ModuleSubscription] = [*self._subscribers.of(fn), *of_modules]
        if not subscriptions:
            raise ValueError(f"{handler_name(fn)} is not subscribed to this bus")
        for subscription in subscriptions:
            subscription.cancel()

    def exclude(self, events: Iterable[str | type[Event]], reason: str) -> None:
        """Refuse subscriptions to events that this bus never emits, with an error that has `reason`.

        Raises:
            ValueError: one of the events has a subscription already.
        """
        self._subscribers.exclude({find_event(event): reason for event in events})

    def possible(self, events: Iterable[str | type[Event]]) -> list[str | type[Event]]:
        """Return the given events without those that `exclude` refuses; "*" is never refused."""
        return [each for each in events if each == "*" or find_event(each) not in self._subscribers.excluded]

    def on_module(
        self,
        model: torch.nn.Module,
        pattern: str | Sequence[str],
        kind: Kind = "forward",
        *,
        every: int = 1,
        start: int = 0,
    ) -> Callable[[F], F]:
        """Register the decorated function as a PyTorch hook of some modules, and return it unchanged.

            @bus.on_module(model, "layers.*", "forward", every=500)
            def log_outputs(module, inputs, outputs): ...

        `subscribe_module` explains the arguments.
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
        """Call `fn` as a PyTorch hook of some modules, in the training iterations chosen by `every`, `start`.

        `fn` takes `(module, inputs, outputs)` or `(name, module, inputs, outputs)`, and its result is
        ignored. In all other iterations the modules have no hooks. Compiled modules run eagerly in the chosen
        iterations, because compiled code calls no hooks.

        Args:
            pattern: pattern of module names, or several: `*` within one part of a name, `**` for any number
                of parts.
            kind: "forward", or "backward" for `(module, grad_inputs, grad_outputs)`.

        Raises:
            TypeError, ValueError: not a module, a wrong signature, or a pattern without a match.
        """
        from eventloop.bus.modules import ModuleSubscription  # here, because it imports torch

        subscription = ModuleSubscription(self.subscribe, fn, model, pattern, kind, every, start)
        self._module_subscriptions.add(subscription)
        return subscription

    # --- emitting ------------------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Append an event to its background subscribers' queues, and run its sync handlers on this thread.

        Background subscribers may call this too. In a forked process the event reaches no handler.

        Raises:
            TypeError: `event` is not an event.
            Exception: the error of a handler, with a note that names the handler.
        """
        try:  # a plain dict, because Python looks up faster in it than in a subclass such as defaultdict
            dispatch = self._dispatch[type(event)]
        except KeyError:
            if not isinstance(event, Event):
                raise TypeError(
                    f"bus.emit takes an event, built by keyword as AfterValEpoch(metrics=...), got {event!r}"
                ) from None
            dispatch = self.signal(type(event)).dispatch
        dispatch(event, trainer)

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether an event has a subscriber. Check it before building a costly event."""
        try:
            return self._wanted[event_type]
        except KeyError:
            return self.signal(event_type).wanted

    def wanted(self, *event_types: type[Event]) -> Mapping[type[Event], bool]:
        """Return a mapping from event types to the results of `wants`, which the bus keeps up to date."""
        for event_type in event_types:
            self.signal(event_type)
        return self._wanted

    def latest(self, event: str | type[E]) -> E | None:
        """Return the last emitted event of a type, or None. A trainer emits no event without a subscriber."""
        event_type: Any = find_event(event)
        if event_type in self._background.latest:
            return self._background.latest[event_type]  # type: ignore[return-value]
        signal = self._subscribers.signals.get(event_type)
        return signal.latest if signal is not None else None  # type: ignore[return-value]

    def post(self, deferred: Deferred, *types: type[Event]) -> None:
        """Post an object that creates events of `types` in the background once its values are on the host."""
        if self._background.finished:
            self._subscribers.refuse_posted(types)
        else:
            self._background.post(deferred, types)

    def warm_up(self) -> None:
        """Start the background thread now; its start would delay the first posted event by some 50 ms."""
        if not self.closed:
            self._background.start()

    def poll(self, trainer: Any = None) -> None:
        """Run the sync handlers of health events: `handler_failed`, `events_dropped`, `slow_handler`.

        A training loop calls this once an iteration. A program without a trainer calls it from time to time.

        Raises:
            Exception: the error of a subscriber with `on_error="raise"`.
        """
        self.deliver_mail(trainer)
        if self.health.errors:
            raise self.health.errors.popleft()

    def deliver_mail(self, trainer: Any = None) -> None:
        """Run the sync handlers of health events, and leave subscribers' errors for `close` to raise."""
        mail = self.health.mail
        while mail:
            event = mail.popleft()
            self.signal(type(event)).run_sync(event, trainer)

    # --- inspecting ----------------------------------------------------------------------------------------

    def signal(self, event: str | type[Event]) -> EventSignal:
        """Return the blinker signal of an event.

        Raises:
            TypeError, ValueError: no such event.
        """
        return self._subscribers.signal(event)

    def plan(self, event: str | type[Event]) -> list[PlanRow]:
        """Return the handlers of an event: sync handlers in their order, then background subscribers."""
        return self._subscribers.plan(event)

    @property
    def failing(self) -> BaseException | None:
        """The error of an earlier handler of the event that is being handled; None if all have succeeded.

        After an error, the remaining handlers of an `after_*` event still run: check this before a save.
        """
        errors = (signal.failing for signal in self._subscribers.signals.values())
        return next((error for error in errors if error is not None), None)

    def stats(self) -> list[SubscriptionStats]:
        """Return one record per subscription, in order of registration; the counts are exact at this call."""
        return self._subscribers.stats()

    def handler_costs(self, wall: float = 0.0, trend: HandlerTrend | None = None) -> list[HandlerCost]:
        """Return one record per sync handler and event: calls, times, share of `wall` seconds, trend."""
        return self._subscribers.handler_costs(wall, trend)

    def subscriber_costs(self) -> list[SubscriberCost]:
        """Return one record per background subscriber."""
        return self._subscribers.subscriber_costs()

    def __str__(self) -> str:
        return plan_table(event_plans(self.plan))

    def capture(self, *events: str | type[Event]) -> AbstractContextManager[list[Event]]:
        """Collect the events emitted within the block in a list; add events of the background at its end."""
        return capture(self.subscribe, self.flush, events)

    def record(self, recorder: SpanRecorder) -> Recording:
        """Record spans of events, handlers and deliveries, and queue depths, until the recording stops.

            recorder = SpanRecorder()
            with bus.record(recorder) as recording:
                trainer.train()
            recording.wait(1.0)  # for the background subscribers

        Recording costs about 2 us per event and 1 us per handler.

        Raises:
            RuntimeError: another recorder is on the bus.
        """
        previous = None if self._recording is None else self._recording()
        recording = begin_recording(recorder, self._subscribers, self._background, previous)
        self._recording = ref(recording)
        return recording

    # --- ending --------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """The seconds that a flush or close without a timeout waits, before any extension."""
        return self.drain_timeout if self.overtime else after_signal(self.drain_timeout, self.stopped_at)

    def flush(self, timeout: float | None = None) -> DrainReport:
        """Wait until all events are delivered, also those that background subscribers emit meanwhile.

        Args:
            timeout: seconds to wait at most; None for `drain_timeout`, and longer while subscribers deliver
                or compute.

        Raises:
            RuntimeError: a background subscriber calls this, so that the flush might wait for its caller.
        """
        self._refuse_in_background("flush")
        if plan_file() is not None:  # a dry run delivers nothing
            return DrainReport(True, self._subscribers.stats())
        allowed = (lambda: self.overtime) if timeout is None else None
        seconds = self.patience if timeout is None else timeout
        complete = closing.flush(self._background, seconds, self._subscribers.counting_emissions, allowed)
        return DrainReport(complete, self._subscribers.stats())

    def on_undelivered(self, store: StoreUndelivered, command: str = "") -> None:
        """Set a function that `close` calls with the events that it could not deliver.

        An error of `store` is logged. The log names `command`. If `store` returns True, the command delivers
        the events later; if not, the command says how to deliver them.
        """
        self._background.store_undelivered, self._background.replay_command = store, command

    def never_wait(self) -> None:
        """Stop honouring `overflow="block"`: emits return at once, and full queues exceed their limit."""
        self._background.never_waits = True

    def close(self, timeout: float | None = None) -> DrainReport:
        """Deliver all events, close the background subscribers, and stop the background thread.

        Events that background subscribers emit during the close are delivered too; a subscriber that always
        emits should check `bus.closed`. Lost events are logged. Sync handlers keep working. Events emitted
        later count as dropped, until `reopen`. Closing again does nothing. A close that Ctrl-C interrupts is
        completed by the next `close` or at interpreter exit. If two threads call this, the second one waits
        for the first, within its own `timeout`.

        Args:
            timeout: seconds to wait at most; None for `drain_timeout`, and longer while subscribers deliver
                or compute. A delivery for which a flush has waited in vain gets only half a second.

        Raises:
            RuntimeError: a background subscriber calls this.
            Exception: the error of a subscriber with `on_error="raise"` that was not raised yet.
        """
        self._refuse_in_background("close")
        complete = self.end(timeout) if timeout is not None else self.end(self.patience, overtime=True)
        report = DrainReport(complete, self._subscribers.stats())
        if self.health.errors:
            raise self.health.errors.popleft()
        return report

    def end(self, timeout: float, *, overtime: bool = False) -> bool:
        """Close the bus as at interpreter exit, without a report; return whether all events were delivered.

        Args:
            timeout: seconds to wait at most. If it is shorter than the default, no advice is logged.
            overtime: whether to extend the wait while subscribers make progress, until a signal ends the run.
        """
        self.closed, background = True, self._background  # a local name, because a thread may reopen the bus
        allowed = (lambda: self.overtime) if overtime else None
        complete = closing.close(background, timeout, allowed, advises=timeout >= self.patience)
        if background.finished:  # if not, another thread is closing it, or Python's exit will close it
            unwatch(background)
            self._subscribers.refresh_routes()
        return complete

    def reopen(self) -> None:
        """Deliver events to the subscribers again after a close, in the same order.

        A trainer that trains again calls this. On an open bus it does nothing. Filters, pauses and `once`
        keep their state, and the counts of events continue; events that the close could not deliver count as
        dropped. Every background subscriber restarts, also disabled ones: a writer opens its files again. If
        a subscriber is still in a delivery, this waits, `drain_timeout` seconds for all. A subscriber that is
        not ready then gets no more events, and the log names it.

        Raises:
            RuntimeError: called from a background subscriber, or in a forked process; another thread is still
                closing the bus after `drain_timeout` seconds; or no thread can be started.
        """
        if not self.closed:
            return
        self._refuse_in_background("reopen")
        self.end(self.drain_timeout)  # completes a close that a Ctrl-C has interrupted
        self._background.check_replaceable(self.drain_timeout)
        background = Background()
        background.start()
        background.continue_from(self._background)
        self._background, self.health = background, background.health
        watch(self, background)
        if self._recording is not None and (recording := self._recording()) and not recording.stopped:
            recording.continue_on(background)
        self._subscribers.move_to(background, self.drain_timeout)
        self.closed = False

    def ending_run(self, ends: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
        """Let the caller log the events lost in the block; end a flush there early once `ends()` is True."""
        return self._background.ending_run(ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close the bus; an error of the close becomes a note of the block's error, if there is one."""
        try:
            self.close()
        except Exception as closing_error:
            if error is None:
                raise
            error.add_note(f"closing the bus then raised {closing_error!r}")

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Raise TypeError, because a bus belongs to its process, with its threads and locks."""
        raise TypeError(
            "a Bus cannot be pickled: it belongs to the process that made it. Something sent to another "
            "process (a Dataset, a collate function) holds it, or the trainer: let it hold plain values"
        )

    def become_inert(self) -> None:
        """Close the bus in a forked process, and drop every subscriber, so that nothing is written twice.

        With `begins_in_forks` the subscribers are kept if no trainer has used the bus yet.
        """
        self.closed, keeps = True, self.begins_in_forks and not self.for_runs
        self._background.become_inert(reopens=keeps)
        self._subscribers.drop_inherited(kept=keeps)

    # --- private -------------------------------------------------------------------------------------------

    def _subscribe(
        self, fn: Callable[..., Any], events: tuple[str | type[Event], ...], options: Options
    ) -> Subscription:
        """Subscribe with checked options; a new background subscriber reopens a bus that a run has closed."""
        if self.closed and self.for_runs and (options.offload or is_coroutine_function(fn)):
            self._subscribers.check(fn, events, options)  # first, so that only a valid one reopens the bus
            self.reopen()
        return self._subscribers.add(fn, events, options)

    def _refuse_in_background(self, what: str) -> None:
        if on_background_thread():
            raise RuntimeError(f"bus.{what} was called by a background subscriber: it may wait for itself")
