"""Define the base class of all events, and the names under which its subclasses are known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform

import msgspec
from msgspec import StructMeta

from eventloop.events.validation import refuse_live_fields

Counter = Literal["iter", "batch", "epoch", "val_epoch", "occurrence"]
"""What `every=` counts, 1-based: `iter + 1`, `batch_idx + 1`, `epoch + 1`, the completed epochs of a validation
(its occurrences where the run has no epochs), or how often the event was emitted."""

ALIASES = {"before_step": "before_train_iter", "after_step": "after_train_iter"}
"""detectron2's and Pet's names of the train iteration pair."""

_BY_NAME: dict[str, list[type[Event]]] = {}


def known_events() -> dict[str, list[type[Event]]]:
    """Return the classes of each event name: one, or one of each module that declares it."""
    return _BY_NAME


def event_name(event_type: type[Event]) -> str:
    """The snake_case name of an event class, which is also its tag when encoded."""
    return str(event_type.__struct_config__.tag)


def declare(name: str, event_type: type[Event]) -> None:
    """Make a class known under `name`. A class defined anew (a notebook cell run twice) replaces itself.

    Raises:
        ValueError: the name belongs to an event of eventloop itself, or stands for one.
    """
    if name in ALIASES:
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            f"which is another name of {ALIASES[name]!r}: choose another class name"
        )
    known = _BY_NAME.setdefault(name, [])
    if any(other.__module__ == "eventloop.events.types" for other in known):
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            "which is one of eventloop's own: choose another class name"
        )
    known[:] = [other for other in known if other.__module__ != event_type.__module__]
    known.append(event_type)


def snake_case(name: str) -> str:
    """`AfterTrainIter` -> `after_train_iter`; a run of capitals is one word (`OOMCaught` -> `oom_caught`)."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


if TYPE_CHECKING:

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
    class _EventMeta(StructMeta):
        """What type checkers see: every event is frozen and built by keyword."""
else:
    # A metaclass in Python would lose CPython 3.11's fast call: 320 ns instead of 72 ns to build an event.
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
    """Base of every event: immutable, built by keyword, and untracked by the garbage collector, which a million
    tracked ones would wake in the middle of a step."""

    background_born: ClassVar[bool] = False
    """Made on the background side: no sync handler can subscribe to it."""
    counter: ClassVar[Counter] = "occurrence"

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__()
        refuse_live_fields(cls)
        if not cls.__name__.startswith("_"):
            declare(snake_case(cls.__name__), cls)
