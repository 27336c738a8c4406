"""Define the base class of all events, and the names by which its subclasses are found."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform

import msgspec
from msgspec import StructMeta

Counter = Literal["iter", "batch", "epoch", "val_epoch", "occurrence"]
"""The counter of an event, counted from 1, whose multiples pass the filter `every=`.

"iter" is `iter + 1`, "batch" is `batch_idx + 1`, and "epoch" is `epoch + 1`. "val_epoch" is the number of
completed epochs, or in a run without epochs the number of times that the event was emitted. "occurrence" is
always the number of times that the event was emitted.
"""

OWN_MODULES = ("eventloop.events.types", "eventloop.events.health")
"""The modules that define eventloop's own events."""
ALIASES = {"before_step": "before_train_iter", "after_step": "after_train_iter"}
"""The names that detectron2 and Pet use for the events of a train iteration, with ours."""

_BY_NAME: dict[str, list[type[Event]]] = {}


def known_events() -> dict[str, list[type[Event]]]:
    """Return the event classes by event name; several modules may each declare a class of one name."""
    return _BY_NAME


def event_name(event_type: type[Event]) -> str:
    """Return the snake_case name of an event class, which also marks the type of an encoded event."""
    return str(event_type.__struct_config__.tag)


def declare(name: str, event_type: type[Event]) -> None:
    """Register an event class under `name`, in place of an earlier class that the same module declared.

    A notebook cell that runs twice defines its class twice.

    Raises:
        ValueError: eventloop itself has an event of this name, or an alias.
    """
    if name in ALIASES:
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            f"which is another name of {ALIASES[name]!r}: choose another class name"
        )
    known = _BY_NAME.setdefault(name, [])
    if any(other.__module__ in OWN_MODULES for other in known):
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            "which is an event of eventloop: choose another class name"
        )
    known[:] = [other for other in known if other.__module__ != event_type.__module__]
    known.append(event_type)


def snake_case(name: str) -> str:
    """Convert `AfterTrainIter` to `after_train_iter`, and `OOMCaught` to `oom_caught`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


if TYPE_CHECKING:

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
    class _EventMeta(StructMeta):
        """The metaclass seen by type checkers: every event is frozen and built by keyword."""
else:
    # With a metaclass written in Python, building an event takes 320 ns instead of 72 ns (CPython 3.11).
    _EventMeta = StructMeta


class Event(
    msgspec.Struct,
    metaclass=_EventMeta,
    frozen=True,
    gc=False,
    kw_only=True,
    tag_field="event",
    tag=snake_case,
):
    """The base class of events: immutable, built by keyword, and not tracked by the garbage collector.

    Many tracked events in the queues would let the collector run in the middle of a training step.
    """

    background_born: ClassVar[bool] = False
    """True for events that a background thread creates. Sync handlers cannot subscribe to them."""
    counter: ClassVar[Counter] = "occurrence"
    """The counter whose multiples pass the filter `every=`."""

    def __init_subclass__(cls, **config: Any) -> None:
        """Declare an event class by its name, and check its fields if it is not eventloop's own."""
        super().__init_subclass__()
        if (
            cls.__module__ not in OWN_MODULES
        ):  # a test checks eventloop's own events, not each start of a process
            from eventloop.events.validation import refuse_live_fields

            refuse_live_fields(cls)
        if not cls.__name__.startswith("_"):
            declare(snake_case(cls.__name__), cls)


def step_of(event: Event) -> int:
    """Return an event's field `step`, or `iter` if it has no `step`; 0 without either, or if it is no int."""
    step = getattr(event, "step", getattr(event, "iter", None))
    return step if isinstance(step, int) else 0
