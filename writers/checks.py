"""Check a writer's methods and attributes, when its class is defined and again when it is attached.

`Writer.__init_subclass__` and `Writer.attach` call these functions, so that a mistake is an error before the
run.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from types import FunctionType
from typing import Any, Protocol

from eventloop.background.queues.options import SubscriberOptions
from eventloop.bus.subscription import check_budget
from eventloop.events.catalogue import find_event, several
from eventloop.util.checks import check_choice


class WriteMethods(Protocol):
    """Declare the two methods of a writer that receive events; a subclass overrides at least one."""

    batch: bool | int

    def write(self, event: Any) -> None:
        """Write one event."""

    def write_batch(self, events: Any) -> None:
        """Write several events."""


OFFLOADS = ("auto", "thread", "process")
_PARAMETERS = {
    "open": ["run"],
    "write": ["event"],
    "write_batch": ["events"],
    "write_timed": ["events"],
    "flush": [],
    "close": [],
}
"""The methods of a writer, each with the names of its parameters after `self`."""
_QUEUE_OPTIONS = ("queue", "overflow", "on_error", "stall_timeout", "batch", "linger")
_TRAINER_NAMES = ("trainer", "runner")


def check_signatures(cls: type, base: type) -> None:
    """Refuse a writer class whose methods do not accept the arguments that `base` declares.

    Raises:
        TypeError: a method has another signature, or is a coroutine function or a generator function.
    """
    for name, parameters in _PARAMETERS.items():
        found = inspect.getattr_static(cls, name, None)  # only some writers have `write_timed`
        if found is not vars(base).get(name):
            _check_signature(f"{cls.__name__}.{name}", found, parameters)


def _check_signature(where: str, found: object, parameters: list[str]) -> None:
    bound = isinstance(found, staticmethod)
    method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    arguments = parameters if bound else ["self", *parameters]
    expected = f"expected ({', '.join(arguments)})"
    if not isinstance(method, FunctionType):
        if callable(method) or _is_computed(method):  # its parameters are unknown until the first call
            return
        raise TypeError(f"{where} must be a method, {expected}, got {found!r}")
    if inspect.iscoroutinefunction(method):
        raise TypeError(
            f"{where} is a coroutine function, which is never awaited: make it a plain method, "
            "as a writer has a thread of its own"
        )
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{where} is a generator function: its body would never run")
    signature = inspect.signature(method, follow_wrapped=False)  # a wrapper may pass on other arguments
    try:
        signature.bind(*arguments)
    except TypeError:
        hint = (
            ": a writer does not receive the trainer" if {*_TRAINER_NAMES} & {*signature.parameters} else ""
        )
        raise TypeError(f"{where}{signature} has a wrong signature: {expected}{hint}") from None


def check_attributes(owner: object, name: str) -> None:
    """Refuse attributes of a writer, or of its class, that the bus would not accept.

    Computed attributes of a class, such as properties, are not checked. The events of a class are not looked
    up, because an event may be declared later.

    Args:
        name: name of the writer or class, with which an error message begins.

    Raises:
        TypeError, ValueError: an attribute has a wrong type or value, or the event is unknown.
    """
    attributes = ("events", "offload", "budget_us", *_QUEUE_OPTIONS)
    values = {key: value for key in attributes if not _is_computed(value := getattr(owner, key))}
    if values.get("budget_us") is not None:
        check_budget(name, values["budget_us"])
    try:
        SubscriberOptions(**{key: values[key] for key in _QUEUE_OPTIONS if key in values}).check()
        check_choice("offload", values.get("offload", "auto"), OFFLOADS)
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


def check_writes(writer: WriteMethods, base: type[WriteMethods]) -> None:
    """Refuse a writer without `write`, unless it has `write_batch` and its `batch` is not False."""
    if getattr(writer.write, "__func__", None) is not base.write:
        return
    cls = type(writer)
    if getattr(writer.write_batch, "__func__", None) is base.write_batch:
        own = [
            key for key, value in inspect.getmembers_static(cls) if callable(value) and not hasattr(base, key)
        ]
        near = get_close_matches("write", own, n=1)
        hint = f"; is {cls.__name__}.{near[0]} meant to be write?" if near else ""
        raise TypeError(f"{cls.__name__} has no write(event): override it{hint}")
    if writer.batch is False:
        raise TypeError(
            f"{cls.__name__} has write_batch(events) and no write(event), but its batch is False: "
            "set batch = True"
        )


def _is_computed(value: object) -> bool:
    """Return whether `value` is a descriptor, such as a property or a method."""
    return hasattr(type(value), "__get__")
