"""Hold one synchronous handler of one event, and decide from its signature how it is called.

`EventSignal` connects handlers, and `dispatch` compiles their calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any, Literal

from eventloop.costs.handler_trend import HandlerTrend
from eventloop.costs.records import IN_ITERATION, HandlerCost
from eventloop.costs.timing import Budget, Timing
from eventloop.events import Event
from eventloop.events.filters import Passes
from eventloop.util.functions import handler_name

Takes = Literal["event", "trainer", "blinker"]
"""How a handler is called: `fn(event)`, `fn(trainer, event)`, or blinker's `fn(sender, event=event)`."""


class Handler:
    """A synchronous handler of one event, with its filter, its call count and its times.

    A handler that is not called at every event (`filtered`) counts its own calls, and each call is clocked,
    because its filter takes as long as the clock. Any other handler is called as often as its plan runs;
    `EventSignal.update_calls` adds that number to `calls`.
    """

    __slots__ = (
        "built_in",
        "calls",
        "filter",
        "fn",
        "name",
        "on_fired",
        "order",
        "passes",
        "priority",
        "takes",
        "test",
        "timing",
    )

    def __init__(
        self,
        fn: Callable[..., object],
        takes: Takes,
        *,
        name: str,
        priority: int,
        passes: Passes | None = None,
        test: str | None = None,
        filter: str = "",
        on_fired: Callable[[], object] | None = None,
    ) -> None:
        self.fn = fn
        self.takes = takes
        self.name = name
        self.priority = priority
        self.passes = passes
        self.test = test
        self.filter = filter
        self.on_fired = on_fired
        self.built_in = _is_built_in(fn)
        self.order = 0
        self.calls = 0
        self.timing = Timing()

    @property
    def filtered(self) -> bool:
        """True if the handler is not called at every event, so that it counts its own calls."""
        return self.passes is not None or self.on_fired is not None

    def __call__(self, sender: Any = None, *, event: Event) -> object:
        """Call the handler, and count the call, for blinker's `EventSignal.send`.

        Args:
            sender: the object that the handler receives as its trainer.
            event: the event.
        """
        if not self.filtered:  # a filtered handler is counted in `fire`, for events that pass its filter
            self.calls += 1
        return self.run(event, sender)

    def run(self, event: Event, trainer: Any) -> object:
        """Call the handler if its filter lets the event pass."""
        if self.passes is None or self.passes(event):
            return self.fire(event, trainer)
        return None

    def fire(self, event: Event, trainer: Any) -> object:
        """Call the handler for an event that passed its filter."""
        if self.filtered:
            self.calls += 1
            if self.on_fired is not None:
                self.on_fired()
        if self.takes == "event":
            return self.fn(event)
        if self.takes == "trainer":
            return self.fn(trainer, event)
        return self.fn(trainer, event=event)

    def clocked(self, event: Event, trainer: Any) -> None:
        """Call the handler for an event that passed its filter, and measure the call."""
        began = perf_counter()
        try:
            self.fire(event, trainer)
        finally:
            self.timing.add(perf_counter() - began)

    def measure(self, event: Event, trainer: Any) -> None:
        """Call the handler and measure the call if its filter lets the event pass."""
        if self.passes is None or self.passes(event):
            self.clocked(event, trainer)

    def account_copy(self) -> Handler:
        """Return a copy with the counts and times, for reports, after the subscription was cancelled.

        The copy refers neither to the function nor to the subscription, so that both can be freed.
        """
        copy = Handler(_nothing, "event", name=self.name, priority=self.priority, filter=self.filter)
        copy.built_in, copy.calls, copy.timing = self.built_in, self.calls, self.timing
        if (budget := self.timing.budget) is not None:  # replaced, because it refers to the subscription
            copy.timing.budget = Budget(budget.seconds, _nothing)
            copy.timing.budget.exceeded = budget.exceeded
        return copy

    def cost(self, event: str, wall: float, trend: HandlerTrend | None = None) -> HandlerCost:
        """Return the handler's cost in a run.

        The caller must have called `EventSignal.update_calls`.

        Args:
            event: the name of the event.
            wall: the seconds of all iterations, to which the share refers.
            trend: the times of handlers over the run, if known.
        """
        seconds, budget = self.timing.estimate(self.calls), self.timing.budget
        in_iteration = event in IN_ITERATION
        estimated = self.timing.clocked < self.calls
        # the optimizer hook runs the phases "backward" and "optimizer" in its handler of this event
        owner = getattr(self.fn, "__self__", None) if event == "after_train_iter" else None
        return HandlerCost(
            name=self.name,
            event=event,
            priority=self.priority,
            filter=self.filter,
            calls=self.calls,
            seconds=seconds,
            share=seconds / wall if wall and in_iteration else 0.0,
            in_iteration=in_iteration,
            includes=[*getattr(owner, "runs_phases", ())],
            times=self.timing.times(self.calls),
            trend=trend.of(self.timing, seconds) if trend and in_iteration and not estimated else [],
            estimated=estimated,
            budget=None if budget is None else budget.seconds,
            over_budget=budget is not None and budget.exceeded,
            built_in=self.built_in,
        )


def _is_built_in(fn: Callable[..., object]) -> bool:
    """Return whether a handler is a function, or a method of a class, that eventloop defines."""
    owner = fn if (bound := getattr(fn, "__self__", None)) is None else type(bound)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "eventloop"


def _nothing(_: object) -> None:
    """Do nothing, in place of the function of a cancelled handler."""


def refuse_functions(events: Iterable[object]) -> None:
    """Refuse a function among the events of `bus.on`, which subscribes only what it decorates.

    Raises:
        TypeError: there is one; the message says what to write.
    """
    for event in events:
        if callable(event) and not isinstance(event, type):
            raise TypeError(
                f'bus.on takes events, got {handler_name(event)}: write @bus.on("after_train_iter"), not '
                '@bus.on, above a function, or bus.subscribe(function, "after_train_iter")'
            )


def check_callable(fn: object) -> None:
    """Raise TypeError if a handler is something that cannot be called."""
    if not callable(fn):
        raise TypeError(f"a handler must be callable, got {fn!r}")


def calling_convention(fn: Callable[..., object], *, background: bool) -> Takes:
    """Return whether a handler takes `(event)` or `(trainer, event)`, from its signature."""
    if not background and isinstance(fn, MethodType) and _has_usual_signature(fn.__func__):
        return "trainer"
    return _convention(fn, background=background)


_OTHER_KINDS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""The flags of functions that are generators, or take any number of arguments."""
_DECORATED = {"__wrapped__", "__signature__"}
"""The attributes of functions whose parameters are not those that `inspect.signature` returns."""


def _has_usual_signature(method: Callable[..., object]) -> bool:
    """Return whether a method is a plain function of (self, trainer, event), as most event methods are.

    `inspect.signature` takes 50 us, for each of some 35 methods of each trainer (`benchmarks.short_run`).
    """
    if not isinstance(method, FunctionType) or method.__defaults__ or _DECORATED & vars(method).keys():
        return False
    code = method.__code__
    names = code.co_varnames[: code.co_argcount]
    return names == ("self", "trainer", "event") and not (
        code.co_kwonlyargcount or code.co_flags & _OTHER_KINDS
    )


def _convention(fn: Callable[..., object], *, background: bool) -> Takes:
    """Return how a handler is called, from its signature.

    Raises:
        TypeError: the handler is a generator function, or has a signature with which it cannot be called.
    """
    functions = (fn, getattr(type(fn), "__call__", fn))  # noqa: B004  # the method, if `fn` is an object
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in functions):
        raise TypeError(f"handler {handler_name(fn)} is a generator function: its body would never run")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have no signature; they are called with the event
        return "event"
    takes = _takes(signature, fn)
    if background and takes == "trainer":
        if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
            return "event"
        raise TypeError(
            f"background handler {handler_name(fn)}{signature} must take only (event): the trainer is passed "
            "only to sync handlers, on the training thread"
        )
    return takes


_MMENGINE_PARAMETERS = {
    **dict.fromkeys(
        ("batch_idx", "data_batch", "outputs", "metrics"),
        "batch_idx and metrics are the event's, batch and outputs the trainer's",
    ),
    "checkpoint": "the checkpoint is trainer.checkpoint",
}
"""The second parameters of MMEngine's hooks, each with a text that says where eventloop has its value.

A function with such a parameter is refused, because it would use the event as a batch or as metrics.
"""
_OTHER_FIRST = {
    "storage": "Pet, whose storage is trainer.metrics here, and its epoch and max_epoch the event's",
    "engine": "ignite, whose engine is the trainer here",
    "epoch": "Keras, whose epoch is event.epoch here, and its logs trainer.metrics.latest()",
    "net": "skorch, whose net is the trainer here",
    "state": "Composer or torchtnt, whose state is the trainer here",
}
"""The first parameters of other systems' handlers, each with the system and the place of its value.

A handler whose second parameter is called "event" is not refused for its first one.
"""
_OTHER_SECOND = {
    "pl_module": "Lightning, whose module is trainer.model here",
    "logger": "Composer, whose logger is trainer.metrics here",
    "unit": "torchtnt, whose unit is trainer.model here",
    "logs": "Keras, whose logs are trainer.metrics.latest() here",
}
"""The second parameters of other systems' handlers, each with the system and the place of its value."""


def _takes(signature: inspect.Signature, fn: Callable[..., object]) -> Takes:
    """Return whether a function with this signature takes `(event)` or `(trainer, event)`.

    Raises:
        TypeError: it takes neither, or has parameters of another system's handlers.
    """
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    unfilled = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if unfilled:
        raise TypeError(f"{_expected(fn, signature)}; the call does not pass {', '.join(unfilled)}")
    if not (positional or variadic):
        raise TypeError(f"{_expected(fn, signature)}: the trainer is an argument, not an attribute of a hook")
    if len(positional) > 1 and (where := _MMENGINE_PARAMETERS.get(positional[1].name)):
        raise TypeError(f"{_expected(fn, signature)}: the signature is that of MMEngine; here {where}")
    if (system := _other_system([p.name for p in positional])) is not None:
        raise TypeError(f"{_expected(fn, signature)}: the signature is that of {system}")
    if len(required) > 2:
        raise TypeError(_expected(fn, signature))
    if len(required) == 2 or (variadic and not positional):
        if required and required[0] == "event":
            raise TypeError(f"{_expected(fn, signature)}: the trainer comes first")
        return "trainer"
    if positional and positional[0].name in ("trainer", "runner"):
        raise TypeError(
            f"{_expected(fn, signature)}: a handler with one required parameter gets the event; "
            "parameters with a default are not counted"
        )
    return "event"


def _other_system(names: list[str]) -> str | None:
    """Return the other system that has handlers with these positional parameters, if one is known."""
    first, second = [*names, "", ""][:2]
    if second in _OTHER_SECOND:
        return _OTHER_SECOND[second]
    return _OTHER_FIRST.get(first) if second != "event" else None


def _expected(fn: Callable[..., object], signature: inspect.Signature) -> str:
    """Return the begin of an error's text: the handler, its signature and the expected ones."""
    return (
        f"handler {handler_name(fn)}{signature} has a wrong signature: expected (trainer, event) or (event)"
    )
