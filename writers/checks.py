"""What can be wrong with a writer, found where its class is defined, or where it is attached."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from types import FunctionType
from typing import Any, Protocol

from eventloop.background.queues.options import LaneOptions
from eventloop.bus.subscription import check_budget, check_lane
from eventloop.events.catalogue import find_event, several


class Writes(Protocol):
    """The methods of a writer, one of which writes."""

    batch: bool | int

    def write(self, event: Any) -> None:
        """Write one event."""

    def write_batch(self, events: Any) -> None:
        """Write several events."""


PLACES = ("auto", "thread", "process")
_GIVEN = {"open": ["run"], "write": ["event"], "write_batch": ["events"], "flush": [], "close": []}
"""The methods of a writer, and what each is called with."""
_LANE = ("queue", "overflow", "on_error", "stall_timeout", "batch")
_TRAINERS = ("trainer", "runner")


def check_place(offload: Any) -> str:
    """The `offload` of a writer.

    Raises:
        ValueError: it is none of `PLACES`.
    """
    if offload not in PLACES:
        raise ValueError(f"offload must be one of {', '.join(map(repr, PLACES))}, got {offload!r}")
    place: str = offload
    return place


def check_signatures(cls: type, base: type) -> None:
    """Refuse methods that cannot be called as the base's are.

    Raises:
        TypeError: see the message.
    """
    for name, given in _GIVEN.items():
        found = inspect.getattr_static(cls, name)
        if found is not vars(base)[name]:
            _check_signature(f"{cls.__name__}.{name}", found, given)


def _check_signature(where: str, found: object, given: list[str]) -> None:
    bound = isinstance(found, staticmethod)
    method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    arguments = given if bound else ["self", *given]
    expected = f"expected ({', '.join(arguments)})"
    if not isinstance(method, FunctionType):
        if callable(method) or _is_computed(method):  # what it takes its first call says
            return
        raise TypeError(f"{where} must be a method, {expected}, got {found!r}")
    if inspect.iscoroutinefunction(method):
        raise TypeError(
            f"{where} is a coroutine function, which nobody awaits: a writer has a thread of its own"
        )
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{where} is a generator function: its body would never run")
    signature = inspect.signature(method, follow_wrapped=False)  # a wrapper may pass on something else
    try:
        signature.bind(*arguments)
    except TypeError:
        hint = ": no writer is given the trainer" if {*_TRAINERS} & {*signature.parameters} else ""
        raise TypeError(f"{where}{signature} has a wrong signature: {expected}{hint}") from None


def check_attributes(owner: object, name: str) -> None:
    """Refuse attributes of a writer, or of its class, that no bus could take. Of a class those that are computed are not
    looked at, nor whether the events are there: one may be declared later.

    Raises:
        TypeError, ValueError: see the message, which begins with the name.
    """
    attributes = ("events", "offload", "budget_us", *_LANE)
    values = {key: value for key in attributes if not _is_computed(value := getattr(owner, key))}
    if values.get("budget_us") is not None:
        check_budget(name, values["budget_us"])
    try:
        check_lane(LaneOptions(**{key: values[key] for key in _LANE if key in values}))
        check_place(values.get("offload", "auto"))
        events = several(values.get("events", "*"))
        if not isinstance(owner, type):
            _check_events(events)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _check_events(events: tuple[Any, ...]) -> None:
    if not events:
        raise TypeError("events is empty: name at least one, or '*' for all")
    for event in events:
        if event != "*":
            find_event(event)


def check_writes(writer: Writes, base: type[Writes]) -> None:
    """Refuse a writer that would not write.

    Raises:
        TypeError: it has neither `write`, nor `write_batch` and a `batch`.
    """
    if getattr(writer.write, "__func__", None) is not base.write:
        return
    cls = type(writer)
    if getattr(writer.write_batch, "__func__", None) is base.write_batch:
        own = [
            key for key, value in inspect.getmembers_static(cls) if callable(value) and not hasattr(base, key)
        ]
        near = get_close_matches("write", own, n=1)
        hint = f"; is {cls.__name__}.{near[0]} meant to be it?" if near else ""
        raise TypeError(f"{cls.__name__} has no write(event): override it{hint}")
    if writer.batch is False:
        raise TypeError(
            f"{cls.__name__} has write_batch(events) and no write(event), but its batch is False: set batch = True"
        )


def _is_computed(value: object) -> bool:
    """Whether it is a property, say, or a method: what it gives only an object knows."""
    return hasattr(type(value), "__get__")
