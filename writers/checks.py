"""Check a writer's methods and attributes, when its class is defined and again when it is attached to a bus.

`Writer.__init_subclass__` and `Writer.attach` call these functions, so that a mistake raises an error before
the run begins.
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
"""The values that `Writer.offload` may have."""
_PARAMETERS = {
    "open": ["run"],
    "write": ["event"],
    "write_batch": ["events"],
    "write_timed": ["events"],
    "flush": [],
    "close": [],
}
"""The names of each writer method's parameters after `self`."""
_QUEUE_OPTIONS = ("queue", "overflow", "on_error", "stall_timeout", "batch", "linger")
"""The attributes of a writer that become options of its subscription."""
_TRAINER_NAMES = ("trainer", "runner")
"""Names of a parameter for the trainer, which a writer does not receive."""


def check_signatures(cls: type, base: type) -> None:
    """Refuse a writer class if a method that it overrides does not accept the arguments in `_PARAMETERS`.

    Args:
        cls: the writer class.
        base: `Writer`, whose own methods are not checked.

    Raises:
        TypeError: a method has another signature, or is a coroutine function or a generator function.
    """
    for name, parameters in _PARAMETERS.items():
        attribute = inspect.getattr_static(cls, name, None)  # `Writer` has no `write_timed`
        if attribute is not vars(base).get(name):
            _check_signature(f"{cls.__name__}.{name}", attribute, parameters)


def _check_signature(method_name: str, attribute: object, parameters: list[str]) -> None:
    """Raise a TypeError unless a class attribute is a plain method that accepts `parameters` after `self`."""
    function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    arguments = parameters if isinstance(attribute, staticmethod) else ["self", *parameters]
    expected = f"expected ({', '.join(arguments)})"
    if not isinstance(function, FunctionType):
        # the parameters of a callable object or of a property's value are unknown before it is used
        if callable(function) or _is_descriptor(function):
            return
        raise TypeError(f"{method_name} must be a method, {expected}, got {attribute!r}")
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{method_name} is a coroutine function, which is never awaited: make it a plain method, "
            "as a writer has a thread of its own"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{method_name} is a generator function: its body would never run")
    # for a decorated method, the signature of the wrapper counts, because the bus calls the wrapper
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*arguments)
    except TypeError:
        has_trainer = any(name in signature.parameters for name in _TRAINER_NAMES)
        hint = ": a writer does not receive the trainer" if has_trainer else ""
        raise TypeError(f"{method_name}{signature} has a wrong signature: {expected}{hint}") from None


def check_attributes(owner: object, name: str) -> None:
    """Refuse a writer, or a writer class, with an attribute that the bus would not accept.

    Properties of a class are not checked, because only a writer has their values. Nor are the names in the
    `events` of a class, because an event may be declared after the class.

    Args:
        owner: the writer or the class.
        name: the name with which an error message begins.

    Raises:
        TypeError, ValueError: an attribute has a wrong type or value, or an event is unknown.
    """
    attributes = {key: getattr(owner, key) for key in ("events", "offload", "budget_us", *_QUEUE_OPTIONS)}
    values = {key: value for key, value in attributes.items() if not _is_descriptor(value)}
    if values.get("budget_us") is not None:
        check_budget(name, values["budget_us"])
    options = {key: values[key] for key in _QUEUE_OPTIONS if key in values}
    try:
        SubscriberOptions(**options).check()
        check_choice("offload", values.get("offload", "auto"), OFFLOADS)
        events = several(values.get("events", "*"))
        if not isinstance(owner, type):
            _check_events(events)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _check_events(events: tuple[Any, ...]) -> None:
    """Refuse an empty tuple of events, and names or classes of events that do not exist."""
    if not events:
        raise TypeError("events is empty: name at least one, or '*' for all")
    for event in events:
        if event != "*":
            find_event(event)


def check_writes(writer: WriteMethods, base: type[WriteMethods]) -> None:
    """Refuse a writer that does not override the method that the bus will call.

    The bus calls `write` if the writer's `batch` is False. Otherwise it calls `write_batch`, which by default
    calls `write` for each event.

    Raises:
        TypeError: the writer overrides neither method, or only `write_batch` while `batch` is False.
    """
    if getattr(writer.write, "__func__", None) is not base.write:
        return
    cls = type(writer)
    if getattr(writer.write_batch, "__func__", None) is base.write_batch:
        members = inspect.getmembers_static(cls)
        new_methods = [key for key, value in members if callable(value) and not hasattr(base, key)]
        misspelled = get_close_matches("write", new_methods, n=1)
        hint = f"; is {cls.__name__}.{misspelled[0]} meant to be write?" if misspelled else ""
        raise TypeError(f"{cls.__name__} has no write(event): override it{hint}")
    if writer.batch is False:
        raise TypeError(
            f"{cls.__name__} has write_batch(events) and no write(event), but its batch is False: "
            "set batch = True"
        )


def _is_descriptor(value: object) -> bool:
    """Return whether `value` is a descriptor, such as a property or a function."""
    return hasattr(type(value), "__get__")
