"""Make hooks from plain functions, without a class for each hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eventloop.bus import Bus
from eventloop.bus.handler import calling_convention
from eventloop.events.base import ALIASES, event_name
from eventloop.events.catalogue import declared_events
from eventloop.events.priority import Priority, get_priority
from eventloop.hooks.hook import Hook
from eventloop.hooks.points import GENERIC, events_of
from eventloop.util.functions import handler_name, is_coroutine_function
from eventloop.util.suggest import suggest

_TRAINER_NAMES = ("trainer", "runner")
"""A function whose only parameter has one of these names is called with the trainer (detectron2, mmcv)."""


class CallbackHook(Hook):
    """Call plain functions at events; the keyword of each function is the name of its event.

        CallbackHook(
            before_train=lambda trainer, event: print(trainer.bus),
            after_train_iter=lambda event: seen.append(event.iter),
            priority="LOW",
        )

    Each keyword is the name of an event, which may be an event of your own. The functions of `before_epoch`,
    `after_epoch`, `before_iter` and `after_iter` run in training, validation and test. If `after_val_iter`
    is given too, `after_iter` does not run in validation; the other names of one mode act alike.
    detectron2's `before_step` and `after_step` are the train iteration's events. The names of its parameters
    decide whether a function is called with `(trainer, event)`, `(event)` or `(trainer)`. A coroutine
    function takes `(event)` and runs in the background.

    Use `bus.on` to subscribe one function with filters, and this hook to pass functions to a trainer or to
    name them in a config.

    Args:
        priority: the priority of all the functions.
        name: the hook's name in reports.
        points: the functions, each as event_name=function; a value of None is ignored.

    Raises:
        TypeError: a value is not a function or has another signature, or two names mean the same event.
        ValueError: no event has the name (the message suggests one), or no function is given.
    """

    def __init__(
        self,
        *,
        priority: Priority | int | str = Priority.NORMAL,
        name: str | None = None,
        **points: Callable[..., Any] | None,
    ) -> None:
        self._set_functions({point: fn for point, fn in points.items() if fn is not None}, priority, name)

    def _set_functions(
        self, points: Mapping[str, Callable[..., Any]], priority: Priority | int | str, name: str | None
    ) -> None:
        """Check and store the functions by the names of their events, with the hook's priority and name."""
        if not points:
            raise ValueError(
                f"{type(self).__name__} has no function to call: pass at least one, before_train=..., "
                "after_train_iter=..."
            )
        get_priority(priority)
        self.priority, self.name = priority, name
        known = [*map(event_name, declared_events()), *ALIASES, *GENERIC]
        for point, fn in points.items():
            if point not in known:
                raise ValueError(f"there is no event {point!r}{suggest(str(point), known)}")
            if not callable(fn):
                raise TypeError(f"{point} must be a function, got {fn!r}")
            calling_convention(_adapted(fn), background=is_coroutine_function(fn))
        self._functions = dict(points)
        self._events = events_of(points, type(self).__name__)

    def _subscriptions(self, bus: Bus) -> Iterator[tuple[Callable[..., Any], list[str]]]:
        """Yield the methods of a subclass and the given functions, each with the names of its events."""
        yield from super()._subscriptions(bus)
        for point, events in self._events.items():
            yield _adapted(self._functions[point]), events


class ClosureHook(CallbackHook):
    """Call one function at one event; mmcv's form of `CallbackHook`.

        ClosureHook("after_train_epoch", lambda trainer, event: print(trainer.epoch))

    Args:
        fn_name: the name of the event.
        fn: the function.
        priority, name: see `CallbackHook`.

    Raises:
        TypeError, ValueError: see `CallbackHook`.
    """

    def __init__(
        self,
        fn_name: str,
        fn: Callable[..., Any],
        *,
        priority: Priority | int | str = Priority.NORMAL,
        name: str | None = None,
    ) -> None:
        self._set_functions({fn_name: fn}, priority, name)


def _adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that the bus can call: `fn`, or a wrapper if `fn` takes only the trainer."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # a builtin without a signature
        return fn
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    takes_only_trainer = len(required) == 1 and required[0] in _TRAINER_NAMES
    if is_coroutine_function(fn) or not takes_only_trainer:
        return fn

    def with_trainer(trainer: Any, event: Any) -> Any:
        return fn(trainer)

    with_trainer.__qualname__ = handler_name(fn).replace("<lambda>", "lambda")
    return with_trainer
