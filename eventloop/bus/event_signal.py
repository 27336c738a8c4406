"""A blinker signal with an order: one per event type of a bus."""

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
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.base import event_name, snake_case
from eventloop.events.priority import Priority
from eventloop.util.functions import handler_name, is_coroutine_function

logger = logging.getLogger("eventloop")

Receiver = Callable[..., Any]
F = TypeVar("F", bound=Receiver)

_arrivals = count()
"""Registration order over all signals: the tie-breaker of equal priorities."""


class EventSignal(blinker.Signal):
    """Everything connected to one event, compiled into one function.

    It is a `blinker.Signal`: `connect`, `disconnect`, `connected_to`, `muted` and `send` work, and keep the
    order. Unlike blinker's, receivers are held strongly unless `weak=True` is asked for: a lambda connected
    weakly is gone before it is ever called. A foreign receiver runs as `receiver(sender, event=event)` at
    NORMAL priority, the sender being the trainer of the emit, else the bus.

    `dispatch(event, trainer)` is the compiled plan; it is replaced, never changed, so an emit under way keeps
    the plan it began with. It is compiled when the event is emitted first after a change: between two emits
    there may be dozens of changes, and most events of a bus are never emitted.
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
        self.emitted = 0
        self._owner = owner
        self._published = published
        self._housekeeping = housekeeping
        self._handlers: dict[Any, Handler] = {}
        self._hand_overs: tuple[HandOver, ...] = ()
        self._sampled_hand_overs: tuple[HandOver, ...] = ()
        self._heard = False  # whether those lead to anybody
        self._mutes = 0
        self._measured = self._since_measured = 0
        self._recorder: SpanRecorder | None = None
        self._plan: Plan | None = None  # none since the last change
        self._latest: Event | None = None  # that the plans before this one saw
        self._changes = 0
        self._compiling = threading.RLock()  # a weak receiver may die, and disconnect itself, in the middle
        self._changed()

    # --- what blinker users call ---------------------------------------------------------------------------

    def connect(self, receiver: F, sender: Any = ANY, weak: bool = False) -> F:
        """Connect a receiver as in blinker. The class docstring says how it is called.

        Raises:
            TypeError: the receiver is a coroutine function, which would not be awaited.
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
        """Connect a handler again, at the place it had."""
        order = handler.order
        self.connect(handler)
        handler.order = order
        self._changed()

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        # blinker's one way out: explicit, by the death of a weak receiver, or by connected_to
        super()._disconnect(receiver_id, sender_id)
        if receiver_id not in self.receivers and self._handlers.pop(receiver_id, None) is not None:
            self._changed()

    def receivers_for(self, sender: Any) -> Generator[Receiver, None, None]:
        """Yield the receivers of a sender in the order of the plan."""
        yield from sorted(super().receivers_for(sender), key=self._order_of)

    @property
    def is_muted(self) -> bool:
        """True inside `muted()`; nesting counts."""
        return self._mutes > 0

    @is_muted.setter
    def is_muted(self, muted: bool) -> None:
        if not hasattr(self, "_mutes"):  # blinker's __init__ sets the flag before ours has run
            return
        self._mutes = max(0, self._mutes + (1 if muted else -1))
        self._changed()

    # --- what the bus calls --------------------------------------------------------------------------------

    def emit(self, event: Event, trainer: Any = None) -> None:
        """Run every handler, in order. `bus.emit` does the same after looking the signal up."""
        self._compiled().dispatch(event, trainer)

    @property
    def dispatch(self) -> Callable[[Event, Any], object]:
        """The compiled plan; after a change, what compiles it and goes on with it."""
        plan = self._plan
        return self.emit if plan is None else plan.dispatch

    @property
    def wanted(self) -> bool:
        """True when anybody, here or in the background, would notice the event."""
        return not self.is_muted and bool(self._handlers or self._heard)

    @property
    def latest(self) -> Event | None:
        """The last event emitted."""
        plan = self._plan
        return self._latest if plan is None else plan.latest()

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The synchronous handlers, in the order they run."""
        return tuple(sorted(self._handlers.values(), key=lambda h: (h.priority, h.order)))

    def hand_over_to(
        self, hand_overs: tuple[HandOver, ...], sampled: tuple[HandOver, ...], *, heard: bool
    ) -> None:
        """Set the functions that hand every event to the background first.

        Args:
            sampled: the functions for a measured event.
            heard: whether the event has a background subscriber; otherwise it is only counted.
        """
        if hand_overs != self._hand_overs:
            self._hand_overs, self._sampled_hand_overs, self._heard = hand_overs, sampled, heard
            self._changed()

    def hand_over(self, event: Event) -> None:
        """Hand an event only to the background, after the synchronous handlers have run."""
        for hand_over in () if self.is_muted else self._hand_overs:
            hand_over(event)

    def run_sync(self, event: Event, trainer: Any) -> None:
        """Run the synchronous handlers alone, for an event the background side has had already."""
        handlers = () if self.is_muted else self.handlers
        for index, handler in enumerate(handlers):
            try:
                if not handler.filtered:
                    handler.calls += 1
                handler.measure(event, trainer)
            except BaseException as error:
                self._on_failure(error, handlers, index, event, trainer)
                raise

    def silence(self) -> None:
        """Drop everything connected; what a forked child does to its copy."""
        self._compiling = threading.RLock()  # another thread may have held it when the process was copied
        self._clear_state()
        self._handlers.clear()
        self._hand_overs = self._sampled_hand_overs = ()
        self._heard = False
        self._changed()

    def record(self, recorder: SpanRecorder | None) -> None:
        """From the next event on, leave spans with a recorder, or with none."""
        if recorder is not self._recorder:
            self._recorder = recorder
            self._changed()

    def settle(self) -> None:
        """Bring `emitted` and every handler's `calls` up to date."""
        plan = self._plan
        if plan is not None and not plan.untouched:
            self._changed()
            self._compiled()  # here, and not in the next emit

    # --- the plan ------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Retire the plan, and count what it ran."""
        with self._compiling:
            self._changes += 1
            old, self._plan = self._plan, None
            self._published(self)
            if old is None:
                return
            self._latest = old.latest()
            self._measured += old.measured
            ran, self._since_measured = old.settle()
            self.emitted += ran
            for handler in old.handlers:
                if not handler.filtered:
                    handler.calls += ran

    def _compiled(self) -> Plan:
        if (plan := self._plan) is not None:
            return plan
        with self._compiling:  # or a change on another thread would be published, and then what was before it
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
            () if muted else self._sampled_hand_overs,
            self._on_failure,
            self._housekeeping,
            latest=self._latest,
            measured_before=self._measured,
            since_measured=self._since_measured,
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
        """Say whose error it is. After a closing event's failure, still reach every remaining handler."""
        if not 0 <= index < len(handlers):
            return False
        error.add_note(_note(handlers, index, event))
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
            handlers[i].run(event, trainer)
        except Exception as error:
            error.add_note(_note(handlers, i, event))
            first.add_note("then also failed:\n" + "".join(traceback.format_exception(error)))
            logger.exception("handler %s failed while closing after another error", handlers[i].name)


def _note(handlers: tuple[Handler, ...], index: int, event: Event) -> str:
    handler = handlers[index]
    place = f"priority {handler.priority}, {index + 1} of {len(handlers)}"
    return f"raised by handler {handler.name} ({place}) on {event!r}"


def _refuse_other_config(event_type: type[Event]) -> None:
    """Refuse an event class with options that events cannot have. msgspec sets them after the declaration.

    Raises:
        TypeError: it is not frozen, or has a tag of its own.
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
