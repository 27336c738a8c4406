"""Connect the handlers of one event type as a blinker signal that calls them in priority order.

A bus has one `EventSignal` for each event type. Any thread may connect and disconnect handlers.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, TypeVar

import blinker
from blinker import ANY
from blinker._utilities import make_id
from blinker.base import ANY_ID

from eventloop.bus.dispatch import HandOver, Plan
from eventloop.bus.handler import Handler
from eventloop.costs.sampling import Sampling
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.base import event_name, snake_case
from eventloop.events.priority import Priority
from eventloop.util.functions import handler_name, is_coroutine_function

logger = logging.getLogger("eventloop")

Receiver = Callable[..., Any]
F = TypeVar("F", bound=Receiver)

_arrivals = count()
"""The numbers of handlers in the order in which they are connected, which decides among equal priorities."""


class EventSignal(blinker.Signal):
    """A blinker signal that compiles the handlers of one event into one function.

    `connect`, `disconnect`, `connected_to`, `muted` and `send` work as in blinker, and keep the order. Unlike
    blinker, a signal refers to receivers strongly unless `weak=True` is given, because a lambda that is
    connected weakly is freed before its first call. A receiver that was connected with `connect` is called as
    `receiver(sender, event=event)` at NORMAL priority. The sender is the trainer that was passed to `emit`,
    or the bus if none was passed.

    `dispatch(event, trainer)` calls the compiled function, the plan. A change of the handlers replaces the
    plan, so that an emit under way completes with the old one. The new plan is compiled at the next emit,
    because dozens of changes may come between two emits, and most events of a bus are never emitted.

    Args:
        event_type: the type of the event.
        owner: the bus.
        published: called when `dispatch` or `wanted` has changed.
        housekeeping: called now and then on the emitting thread, to keep background queues bounded.
    """

    def __init__(
        self,
        event_type: type[Event],
        owner: object,
        published: Callable[[EventSignal], None],
        housekeeping: Callable[[], None],
    ) -> None:
        _refuse_other_config(event_type)
        super().__init__(doc=event_type.__doc__)
        self.event_type = event_type
        self.name = event_name(event_type)
        self.closing = self.name.startswith("after_")  # whether a handler's error lets the later ones run
        self.failing: BaseException | None = None  # that error, while the later handlers run
        self._emitted = 0  # the number of events that the plans dropped so far have dispatched
        self._owner = owner
        self._published = published
        self._housekeeping = housekeeping
        self._handlers: dict[Any, Handler] = {}
        self._hand_overs: tuple[HandOver, ...] = ()
        self._timed_hand_overs: tuple[HandOver, ...] = ()
        self._has_background = False  # whether the event has a background subscriber
        self._mutes = 0  # the number of `muted()` blocks that are entered
        self._counted = 0  # the number of events that the handlers' counts of calls include
        self._sampling = Sampling()
        self._recorder: SpanRecorder | None = None
        self._plan: Plan | None = None  # None from a change to the next emit
        self._latest: Event | None = None  # the last event of the plans dropped so far, for `latest`
        self._changes = 0  # the number of changes so far, to find a change during a compilation
        # reentrant, because a weak receiver may be freed, and so disconnected, while the lock is held
        self._compiling = threading.RLock()
        self._changed()

    # --- what blinker users call ---------------------------------------------------------------------------

    def connect(self, receiver: F, sender: Any = ANY, weak: bool = False) -> F:
        """Connect a receiver as in blinker; it is called as `receiver(sender, event=event)`.

        Raises:
            TypeError: the receiver is a coroutine function.
        """
        if is_coroutine_function(receiver):
            raise TypeError(
                f"{handler_name(receiver)} is a coroutine function: use bus.subscribe, which awaits it"
            )
        super().connect(receiver, sender, weak)
        receiver_id = make_id(receiver)
        if receiver_id not in self._handlers:
            handler = (
                receiver if isinstance(receiver, Handler) else self._foreign(receiver, receiver_id, weak)
            )
            handler.order = next(_arrivals)
            self._handlers[receiver_id] = handler
        self._changed()
        return receiver

    def reconnect(self, handler: Handler) -> None:
        """Connect a disconnected handler once more, at its earlier position in the order."""
        order = handler.order
        self.connect(handler)
        handler.order = order
        self._changed()

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        """Drop the handler of a receiver that blinker has disconnected from its last sender.

        blinker also calls this when a weak receiver is freed, and at the end of a `connected_to` block.
        """
        super()._disconnect(receiver_id, sender_id)
        if receiver_id not in self.receivers and self._handlers.pop(receiver_id, None) is not None:
            self._changed()

    def receivers_for(self, sender: Any) -> Generator[Receiver, None, None]:
        """Yield the receivers of a sender in the order in which they are called."""
        yield from sorted(super().receivers_for(sender), key=self._order_of)

    @property
    def is_muted(self) -> bool:
        """True within a `muted()` block, in which no handler is called."""
        return self._mutes > 0

    @is_muted.setter
    def is_muted(self, muted: bool) -> None:
        """Count the begin or the end of a `muted()` block, because blocks may be nested."""
        if not hasattr(self, "_mutes"):  # blinker's `__init__` sets `is_muted` before `_mutes` exists
            return
        self._mutes = max(0, self._mutes + (1 if muted else -1))
        self._changed()

    # --- what the bus calls --------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Dispatch an event to all handlers in order; compile the plan first if handlers have changed."""
        self._compiled().dispatch(event, trainer)

    @property
    def dispatch(self) -> Callable[[Event, Any], object]:
        """The function that dispatches an event: the compiled one, or `emit` before it is compiled."""
        plan = self._plan
        return self.emit if plan is None else plan.dispatch

    @property
    def wanted(self) -> bool:
        """True if the event has a sync handler or background subscriber and is not muted."""
        return not self.is_muted and bool(self._handlers or self._has_background)

    @property
    def emitted(self) -> int:
        """The number of emits so far."""
        plan = self._plan
        return self._emitted if plan is None else plan.count()

    @property
    def latest(self) -> Event | None:
        """The last emitted event; None before the first one."""
        plan = self._plan
        return self._latest if plan is None else plan.latest()

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The synchronous handlers, in the order they run."""
        return tuple(sorted(self._handlers.values(), key=lambda handler: (handler.priority, handler.order)))

    def hand_over_to(
        self, hand_overs: tuple[HandOver, ...], timed: tuple[HandOver, ...], *, has_background: bool
    ) -> None:
        """Set the functions that append each emitted event to the background queues, before handlers run.

        Args:
            hand_overs: the functions, one for each background subscriber.
            timed: functions that also store the time of the emit, for events whose wait is measured.
            has_background: False on a closed bus, where the functions only count the event as dropped.
        """
        if hand_overs != self._hand_overs:
            self._hand_overs, self._timed_hand_overs = hand_overs, timed
            self._has_background = has_background
            self._changed()

    def hand_over(self, event: Event) -> None:
        """Append an event to the background queues, and count it as emitted.

        `run_sync` has run the event's synchronous handlers before.
        """
        with self._compiling:
            self._changed()
            self._latest = event
            self._emitted += 1
            self._counted += 1
        for hand_over in () if self.is_muted else self._hand_overs:
            hand_over(event)

    def run_sync(self, event: Event, trainer: Any) -> None:
        """Run the synchronous handlers of an event, and append it to no background queue.

        Events that the background creates reach synchronous handlers in this way. An event that a handler may
        still refuse reaches the background later, by `hand_over`.
        """
        handlers = () if self.is_muted else self.handlers
        for index, handler in enumerate(handlers):
            try:
                if not handler.filtered:
                    handler.calls += 1
                handler.measure(event, trainer)
            except BaseException as error:
                self._on_failure(error, handlers, index, event, trainer)
                raise

    def silence(self, *, kept: bool) -> None:
        """Disconnect all handlers and background subscribers in a forked process, unless they are `kept`."""
        self._compiling = threading.RLock()  # another thread may have held the lock at the fork
        if kept:
            return
        self._clear_state()
        self._handlers.clear()
        self._hand_overs = self._timed_hand_overs = ()
        self._has_background = False
        self._changed()

    def record(self, recorder: SpanRecorder | None) -> None:
        """Record a span of each event and handler from now on; None stops the recording."""
        if recorder is not self._recorder:
            self._recorder = recorder
            self._changed()

    def update_calls(self) -> None:
        """Bring every handler's `calls` up to date."""
        with self._compiling:
            if self._plan is not None:
                self._count(self._plan)

    # --- the plan ------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Drop the plan after a change, and add its calls to the counts of the signal and its handlers."""
        with self._compiling:
            self._changes += 1
            dropped, self._plan = self._plan, None
            self._published(self)
            if dropped is None:
                return
            self._latest = dropped.latest()
            self._emitted = self._count(dropped)

    def _count(self, plan: Plan) -> int:
        """Count the events since the last call as calls of the handlers; return the number of all events."""
        count = plan.count()
        new_events, self._counted = count - self._counted, count
        for handler in plan.handlers:
            if not handler.filtered:  # a handler with a filter counts its calls itself
                handler.calls += new_events
        return count

    def _compiled(self) -> Plan:
        """Return the plan, and compile it if a change has dropped it."""
        if (plan := self._plan) is not None:
            return plan
        # With the lock, because a plan from before another thread's change must not replace the newer one.
        with self._compiling:
            while (plan := self._plan) is None:
                changes, new_plan = self._changes, self._make_plan()
                if changes == self._changes:
                    self._plan = new_plan
                    self._published(self)
            return plan

    def _make_plan(self) -> Plan:
        """Compile the present handlers; a muted signal calls none of them."""
        muted = self.is_muted
        return Plan(
            self.name,
            () if muted else self.handlers,
            () if muted else self._hand_overs,
            () if muted else self._timed_hand_overs,
            self._on_failure,
            self._housekeeping,
            self._sampling,
            latest=self._latest,
            emitted=self._emitted,
            recorder=self._recorder,
        )

    def _foreign(self, receiver: Receiver, receiver_id: Any, weak: bool) -> Handler:
        """Return a handler that calls a receiver as blinker does: only for the senders it is connected to."""
        resolve = self.receivers[receiver_id] if weak else lambda: receiver
        senders = self._by_receiver[receiver_id]

        def call(trainer: Any, *, event: Event) -> None:
            """Call the receiver, unless it was freed or is connected only to other senders."""
            sender = self._owner if trainer is None else trainer
            target = resolve()
            if target is not None and (ANY_ID in senders or make_id(sender) in senders):
                target(sender, event=event)

        return Handler(call, "blinker", name=handler_name(receiver), priority=Priority.NORMAL)

    def _order_of(self, receiver: Receiver) -> tuple[int, int]:
        """Return the sort key of a receiver: its priority, and its number in the order of connecting."""
        handler = self._handlers[make_id(receiver)]
        return handler.priority, handler.order

    def _on_failure(
        self, error: BaseException, handlers: tuple[Handler, ...], index: int, event: Event, trainer: Any
    ) -> bool:
        """Add a note with the failed handler's name to its error; return whether the later handlers ran.

        They run for an `after_*` event, because handlers may use it to close files and the like.

        Args:
            error: the error of the handler.
            handlers: all handlers of the event, in their order.
            index: the failed handler; -1 if the error came before them, as from a background queue's filter.
            event, trainer: the arguments of the emit.
        """
        if not 0 <= index < len(handlers):
            return False
        error.add_note(_place_of(handlers, index, event))
        if not self.closing or not isinstance(error, Exception) or self.failing is not None:
            return False
        self.failing = error
        try:
            for later in range(index + 1, len(handlers)):
                self._run_after(error, handlers, later, event, trainer)
        finally:
            self.failing = None
        return True

    def _run_after(
        self, first_error: Exception, handlers: tuple[Handler, ...], index: int, event: Event, trainer: Any
    ) -> None:
        """Run a handler after the error of an earlier one, to which an error of its own becomes a note."""
        try:
            handlers[index].measure(event, trainer)
        except Exception as error:
            error.add_note(_place_of(handlers, index, event))
            first_error.add_note("then also failed:\n" + "".join(traceback.format_exception(error)))
            logger.exception("handler %s failed while closing after another error", handlers[index].name)


def _place_of(handlers: tuple[Handler, ...], index: int, event: Event) -> str:
    """Return a note that names the handler, its priority, its place in the order and the event."""
    handler = handlers[index]
    position = f"priority {handler.priority}, {index + 1} of {len(handlers)}"
    return f"raised by handler {handler.name} ({position}) on {event!r}"


def _refuse_other_config(event_type: type[Event]) -> None:
    """Raise TypeError for an event class with options of msgspec that events cannot have.

    The class itself cannot be checked when it is declared, because msgspec sets these options afterwards.
    """
    name, config = event_type.__name__, event_type.__struct_config__
    if not config.frozen:
        raise TypeError(
            f"class {name} is not frozen, and its events are read in the background while others would "
            "change them: leave frozen=False out"
        )
    if config.tag != (own := snake_case(name)):
        raise TypeError(
            f"class {name} has the tag {config.tag!r}, and is known as {own!r}, by which logs and other "
            "processes find it: leave tag= out, and name the class as the event is to be called"
        )
