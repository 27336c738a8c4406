"""Connect the handlers of one event type as a blinker signal that keeps their order.

A bus has one `EventSignal` for each event type. A signal may change on any thread; a plan never changes.
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
"""The counter that numbers the handlers of all signals as they are connected; it breaks ties of priority."""


class EventSignal(blinker.Signal):
    """A blinker signal that compiles the handlers of one event into one function.

    `connect`, `disconnect`, `connected_to`, `muted` and `send` work as in blinker, and keep the order.
    Receivers are held strongly unless `weak=True` is given, because a lambda connected weakly is freed before
    its first call. A receiver that was connected with `connect` is called as `receiver(sender, event=event)`
    at NORMAL priority. The sender is the trainer that was passed to `emit`, or the bus without one.

    `dispatch(event, trainer)` is the compiled plan. It is replaced and never changed, so a running emit keeps
    its plan. It is compiled at the first emit after a change: between two emits there may be dozens of
    changes, and most events of a bus are never emitted.
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
        self.closing = self.name.startswith("after_")
        self.failing: BaseException | None = None
        self._emitted = 0  # number of events of all former plans
        self._owner = owner
        self._published = published
        self._housekeeping = housekeeping
        self._handlers: dict[Any, Handler] = {}
        self._hand_overs: tuple[HandOver, ...] = ()
        self._timed_hand_overs: tuple[HandOver, ...] = ()
        self._has_background = False  # whether the hand-overs lead to a background subscriber
        self._mutes = 0
        self._counted = 0  # number of events already included in the handlers' counts of calls
        self._sampling = Sampling()
        self._recorder: SpanRecorder | None = None
        self._plan: Plan | None = None  # None after a change, until the next emit
        self._latest: Event | None = None  # the last event of the former plans
        self._changes = 0
        self._compiling = threading.RLock()  # reentrant: a weak receiver may be freed here
        self._changed()

    # --- what blinker users call ---------------------------------------------------------------------------

    def connect(self, receiver: F, sender: Any = ANY, weak: bool = False) -> F:
        """Connect a receiver as in blinker. It is called as `receiver(sender, event=event)`."""
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
        """Connect a handler again at its former position in the order."""
        order = handler.order
        self.connect(handler)
        handler.order = order
        self._changed()

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        # blinker calls this for every disconnect: explicit, of a freed weak receiver, and by connected_to
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
        if not hasattr(self, "_mutes"):  # blinker's __init__ sets the flag before ours has run
            return
        self._mutes = max(0, self._mutes + (1 if muted else -1))
        self._changed()

    # --- what the bus calls --------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Run every handler in order; compile the plan first if handlers have changed."""
        self._compiled().dispatch(event, trainer)

    @property
    def dispatch(self) -> Callable[[Event, Any], object]:
        """The function that dispatches an event: the compiled plan, or `emit` until a plan is compiled."""
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
        return tuple(sorted(self._handlers.values(), key=lambda h: (h.priority, h.order)))

    def hand_over_to(
        self, hand_overs: tuple[HandOver, ...], timed: tuple[HandOver, ...], *, has_background: bool
    ) -> None:
        """Set the functions by which each emit puts its event into background queues, before handlers run.

        Args:
            hand_overs: the functions, one for each background subscriber.
            timed: the functions that also note the time of the emit, for events whose wait is measured.
            has_background: False on a closed bus, where the functions only count the event as dropped.
        """
        if hand_overs != self._hand_overs:
            self._hand_overs, self._timed_hand_overs = hand_overs, timed
            self._has_background = has_background
            self._changed()

    def hand_over(self, event: Event) -> None:
        """Count an event as emitted whose handlers `run_sync` has run, and put it into background queues."""
        with self._compiling:
            self._changed()
            self._latest = event
            self._emitted += 1
            self._counted += 1
        for hand_over in () if self.is_muted else self._hand_overs:
            hand_over(event)

    def run_sync(self, event: Event, trainer: Any) -> None:
        """Run only the synchronous handlers, for an event of the background, or of what may be refused."""
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
        self._compiling = threading.RLock()  # another thread may have held it when the process was copied
        if kept:
            return
        self._clear_state()
        self._handlers.clear()
        self._hand_overs = self._timed_hand_overs = ()
        self._has_background = False
        self._changed()

    def record(self, recorder: SpanRecorder | None) -> None:
        """Record spans with `recorder` from the next event on, or stop with None."""
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
        """Drop the plan, and add its calls to the counts of the signal and its handlers."""
        with self._compiling:
            self._changes += 1
            old, self._plan = self._plan, None
            self._published(self)
            if old is None:
                return
            self._latest = old.latest()
            self._emitted = self._count(old)

    def _count(self, plan: Plan) -> int:
        """Add the events since the last count to the calls of the plan's handlers; return the total count."""
        count = plan.count()
        ran, self._counted = count - self._counted, count
        for handler in plan.handlers:
            if not handler.filtered:
                handler.calls += ran
        return count

    def _compiled(self) -> Plan:
        if (plan := self._plan) is not None:
            return plan
        with (
            self._compiling
        ):  # else a plan from before a change on another thread could be published after it
            while (plan := self._plan) is None:
                changes, made = self._changes, self._make_plan()
                if changes == self._changes:
                    self._plan = made
                    self._published(self)
            return plan

    def _make_plan(self) -> Plan:
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
        resolve = self.receivers[receiver_id] if weak else lambda: receiver
        senders = self._by_receiver[receiver_id]

        def call(trainer: Any, *, event: Event) -> None:
            sender = self._owner if trainer is None else trainer
            target = resolve()
            if target is not None and (ANY_ID in senders or make_id(sender) in senders):
                target(sender, event=event)

        return Handler(call, "blinker", name=handler_name(receiver), priority=Priority.NORMAL)

    def _order_of(self, receiver: Receiver) -> tuple[int, int]:
        handler = self._handlers[make_id(receiver)]
        return handler.priority, handler.order

    def _on_failure(
        self, error: BaseException, handlers: tuple[Handler, ...], index: int, event: Event, trainer: Any
    ) -> bool:
        """Name the failed handler in a note of its error.

        For an `after_*` event, which closes something, run the remaining handlers. Return whether they ran.
        """
        if not 0 <= index < len(handlers):
            return False
        error.add_note(_place_of(handlers, index, event))
        if not self.closing or not isinstance(error, Exception) or self.failing is not None:
            return False
        self.failing = error
        try:
            for i in range(index + 1, len(handlers)):
                self._run_after(error, handlers, i, event, trainer)
        finally:
            self.failing = None
        return True

    def _run_after(
        self, first: Exception, handlers: tuple[Handler, ...], i: int, event: Event, trainer: Any
    ) -> None:
        try:
            handlers[i].measure(event, trainer)
        except Exception as error:
            error.add_note(_place_of(handlers, i, event))
            first.add_note("then also failed:\n" + "".join(traceback.format_exception(error)))
            logger.exception("handler %s failed while closing after another error", handlers[i].name)


def _place_of(handlers: tuple[Handler, ...], index: int, event: Event) -> str:
    handler = handlers[index]
    place = f"priority {handler.priority}, {index + 1} of {len(handlers)}"
    return f"raised by handler {handler.name} ({place}) on {event!r}"


def _refuse_other_config(event_type: type[Event]) -> None:
    """Refuse an event class declared with msgspec options that events cannot have.

    msgspec sets these options only after the class is declared.
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
