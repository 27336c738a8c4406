"""Define `Hook`, the base class of hooks: each overridden method is subscribed to the event of its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from eventloop.bus import Bus
from eventloop.bus.subscription import check_budget
from eventloop.events.base import ALIASES, Event, event_name
from eventloop.events.catalogue import declared_events, find_event
from eventloop.events.filters import Predicate, check_filter
from eventloop.events.priority import Priority, get_priority
from eventloop.events.subscribed import check_possible
from eventloop.hooks.points import GENERIC, Points
from eventloop.migration.names import point_meant
from eventloop.state.containers import copied
from eventloop.util.functions import handler_name, is_coroutine_function
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_eventloop_on"


def on(
    method: None = None,
    /,
    *,
    priority: Priority | int | str | None = None,
    every: int = 1,
    start: int = 0,
    once: bool = False,
    when: Predicate | None = None,
    budget_us: float | None = None,
) -> Callable[[F], F]:
    """Set the priority, the filter and the budget of one method of a hook; options are those of `bus.on`.

    @on(priority=49, every=10)
    def after_train_iter(self, trainer, event): ...

    Raises:
        TypeError, ValueError: a priority, filter or budget is invalid, or the parentheses are missing; raised
            where the decorator is written.
    """
    if method is not None:
        raise TypeError(f"@on needs its options: expected @on(priority=...), got @on above {method!r}")
    if priority is not None:
        get_priority(priority)
    check_filter(every, start, once, when)
    if budget_us is not None:
        check_budget("@on", budget_us)
    options = {
        "priority": priority,
        "every": every,
        "start": start,
        "once": once,
        "when": when,
        "budget_us": budget_us,
    }

    def mark(method: F) -> F:
        setattr(method, _MARK, options)
        return method

    return mark


class Hook(Points):
    """Subscribe the event methods that a subclass overrides; the others cost nothing.

        class PrintLoss(Hook):
            priority = "LOW"

            def after_train_iter(self, trainer, event):
                if self.every_n_train_iters(trainer, 100):
                    print(trainer.metrics.latest()["loss"])

    `before_epoch`, `after_epoch`, `before_iter` and `after_iter` are called in training, validation and test,
    with the mode in `event.mode`, except in a mode whose own method the hook overrides too. An `async def`
    method takes `(self, event)` and runs in the background. The return value of `state_dict` is saved with
    every checkpoint under the hook's `name`, which must be unique, and passed to `load_state_dict` on resume.

    A hook with a state belongs to one trainer. In a second one it starts over: its constructor is called
    again, with the same arguments, and what was set on it before its first trainer is set again. A list, dict
    or set among these that the hook has changed is the same object again, unless the hook's new state would
    then depend on it: that hook gets a copy of the first values. The first trainer can then begin no other
    run.
    """

    priority: Priority | int | str = Priority.NORMAL
    budget_us: float | None = None
    """The time in µs that the 99th percentile of each method should stay under; see `bus.on`."""
    name: str | None = None
    runs_phases: ClassVar[tuple[str, ...]] = ()
    """Phases of the iteration that the hook's `after_train_iter` runs, and adds to `trainer.clock`."""

    owns: ClassVar[str] = ""
    """The part of the loop that the hook does itself, such as "the optimizer's step". A trainer that another
    engine drives refuses such a hook, because that engine does this part.
    """

    tunable: ClassVar[tuple[str, ...]] = ()
    """The attributes that `eventloop tell RUN set HOOK.ATTRIBUTE=VALUE` may set during a run, such as
    ("patience",); a property's setter refuses a value by a TypeError or ValueError."""

    can_start_over: ClassVar[bool] = True
    """False if constructing the hook again, as a second trainer does, would not restore its first state."""

    _points: ClassVar[dict[str, list[str]]] = {}
    """Method name -> names of the events it serves, for all methods that this class overrides."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]
        get_priority(cls.priority)
        if cls.budget_us is not None:
            check_budget(cls.__name__, cls.budget_us)
        if not isinstance(cls.tunable, tuple) or any(name.startswith("_") for name in cls.tunable):
            raise TypeError(
                f"{cls.__name__}.tunable must be a tuple of names of public attributes, such as "
                f'("patience",), got {cls.tunable!r}'
            )
        if "offload" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.offload has no effect, because hooks run on the training thread: make the "
                "method `async def (self, event)`, or use a Writer, which runs in the background"
            )
        cls._points = _overridden_points(cls)

    def attach(self, bus: Bus) -> None:
        """Subscribe every overridden method to its events.

        Raises:
            TypeError: a method's signature is not (self, trainer, event), or `budget_us` is not a number.
            ValueError: `budget_us` is not above 0; also checked for a hook without event methods.
        """
        if self.budget_us is not None:
            check_budget(type(self).__name__, self.budget_us)
        for method, events in self._subscriptions(bus):
            options = {**_marked(method), "priority": priority_of(self, method)}
            if options.get("budget_us") is None:
                options["budget_us"] = self.budget_us
            # one subscription a method: `once` counts all its events, an async method keeps their order
            bus.subscribe(method, *events, **options)

    def _subscriptions(self, bus: Bus) -> Iterator[tuple[Callable[..., Any], list[str]]]:
        """Yield each function that `attach` subscribes to the bus, with its events."""
        for name, served in self._points.items():
            events = [*served]
            # eventloop's hooks skip events that the trainer does not have; in a user's hook they are an error
            if name in GENERIC or _is_from_eventloop(_defining_class(type(self), name)):
                events = [event for event in served if bus.possible([event])]
            if events:
                yield getattr(self, name), events

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer that the hook cannot serve; called when the trainer is built."""

    @property
    def stateful(self) -> bool:
        """True when the hook has a state to save."""
        return type(self).state_dict is not Hook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state as plain values, tensors and NumPy's numeric arrays.

        If the trainer saves checkpoints, this is also called before the first iteration, so that a state that
        cannot be saved is known then.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        `Trainer.resume` calls this before the optimizer, the counters and the model are loaded. If this or a
        later part raises, the resume is refused: the hook's attributes are restored, and if `state_dict`
        still differs from before, `load_state_dict` is called with a copy of the former state. Change nothing
        but the hook: other objects are not restored. A warning is logged for a hook that saves a state and
        does not define this method.
        """
        if state and type(self).load_state_dict is Hook.load_state_dict:  # not by `super()` in a subclass
            logger.warning(
                "the hook %s has a state_dict and no load_state_dict: its state of the checkpoint is not "
                "restored",
                self.name,
            )

    def settings(self) -> dict[str, Any]:
        """Return the options that change the course of a training, by the names of the arguments.

            def settings(self):
                return {"temperature": self._temperature}

        Every checkpoint stores these options, and `resume` compares those that the checkpoint and the hook
        both have. It refuses changed options; with changed="keep" or "apply" it goes on with the options of
        this hook. Values that are not plain are left out. Called once, after `check`.
        """
        return {}

    # --- helpers, as in MMEngine -------------------------------------------------------------------------

    def every_n_epochs(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """Return True in every `n`-th epoch after `start`; for train epoch events. False if n <= 0."""
        return _every(trainer.epoch + 1 - start, n)

    def every_n_train_iters(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """Return True in every `n`-th iteration after `start`; for train iter events. False if n <= 0."""
        return _every(trainer.iter + 1 - start, n)

    every_n_iters = every_n_train_iters
    """mmcv's name of `every_n_train_iters`."""

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Return True for every `n`-th batch of a pass. False if n <= 0."""
        return _every(batch_idx + 1, n)

    def end_of_epoch(self, loader: Any, batch_idx: int) -> bool:
        """Return True at the last batch of a pass over `loader`."""
        return bool(batch_idx + 1 == len(loader))

    def is_last_train_epoch(self, trainer: Trainer) -> bool:
        """Return True in the last epoch of the run; for train epoch events only."""
        return trainer.max_epochs is not None and trainer.epoch + 1 == trainer.max_epochs

    def is_last_train_iter(self, trainer: Trainer) -> bool:
        """Return True in the last iteration of the run; for train iteration events only."""
        return trainer.max_iters is not None and trainer.iter + 1 == trainer.max_iters


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that stores its arguments, so that the hook can be constructed again.

    It also stores the attributes that it made: a user has set the others since.
    """

    @wraps(init)
    def remembering(self: Hook, *args: Any, **kwargs: Any) -> None:
        outermost = "_made_with" not in vars(self)
        vars(self).setdefault("_made_with", (args, kwargs))
        init(self, *args, **kwargs)
        if outermost:
            vars(self)["_as_made"] = copied(vars(self))

    return remembering


def check_events(hook: object, bus: Bus, excluded: Mapping[type[Event], str]) -> None:
    """Refuse a hook that would subscribe to an excluded event, before it is attached.

    A hook whose own `attach` may leave methods out is checked only when it is attached.

    Args:
        excluded: the events that are never emitted, with the reasons.

    Raises:
        ValueError: naming the method, the event and the reason.
    """
    if isinstance(hook, Hook) and _is_from_eventloop(_defining_class(type(hook), "attach")):
        for method, events in hook._subscriptions(bus):
            check_possible(handler_name(method), map(find_event, events), excluded)


def _marked(method: Callable[..., Any]) -> dict[str, Any]:
    options = getattr(method, _MARK, None)
    return options if isinstance(options, dict) else {}  # a mock has every attribute


def priority_of(hook: Hook, method: Callable[..., Any]) -> Priority | int | str:
    """Return the priority of one of a hook's methods: the method's own, set with `on`, or the hook's."""
    own: Priority | int | str | None = _marked(method).get("priority")
    if own is None:  # a hook's priority is that of its plain methods
        return Priority.NORMAL if is_coroutine_function(method) else hook.priority
    return own


def _every(counted: int, n: int) -> bool:
    return n > 0 and counted >= 0 and counted % n == 0


def _overridden_points(cls: type[Hook]) -> dict[str, list[str]]:
    """Map the methods that a hook class overrides to the events they serve.

    Raises:
        TypeError: a method looks like an event method but is not one (MMEngine's with an underscore and
            Lightning's with "on_" included), or two methods serve one event.
    """
    names = [event_name(event_type) for event_type in declared_events()]
    ours = [event_name(event_type) for event_type in declared_events() if _is_from_eventloop(event_type)]
    _refuse_mmengine_names(cls)
    methods = []
    for method in _candidate_methods(cls):
        # eventloop's own hooks ignore events that other code declares, whatever their names
        known = ours if _is_from_eventloop(_defining_class(cls, method)) else names
        if method in GENERIC or ALIASES.get(method, method) in known:
            _refuse_missing_self(cls, method)
            methods.append(method)
        else:
            _refuse_near_miss(cls, method, known)
    return events_of(methods, cls.__name__)


def events_of(points: Iterable[str], owner: str) -> dict[str, list[str]]:
    """Map names of event methods to the events that each method handles.

    A name is that of an event, an alias, or a method for all modes, such as `after_iter`. For an event with a
    method of its own, that method takes precedence over the one for all modes.

    Args:
        owner: name of the class that has the methods, for the error message.
    """
    served: dict[str, str] = {}
    for point in points:
        for event in GENERIC.get(point, (ALIASES.get(point, point),)):
            other = served.setdefault(event, point)
            if point in GENERIC or other == point:
                continue
            if other not in GENERIC:
                raise TypeError(
                    f"{owner} has both {other} and {point}, two names of one event: keep one of them"
                )
            served[event] = point
    found: dict[str, list[str]] = {}
    for event in map(event_name, declared_events()):
        if event in served:
            found.setdefault(served[event], []).append(event)
    return found


def _is_from_eventloop(cls: type) -> bool:
    """Return True for a class of eventloop, False for a class of other code."""
    return cls.__module__.partition(".")[0] == "eventloop"


def _defining_class(cls: type[Hook], method: str) -> type:
    """Return the class among the bases of `cls` that defines the method."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _candidate_methods(cls: type[Hook]) -> list[str]:
    """List the public methods that differ from `Hook`'s, and all methods decorated with `@on`."""
    found = []
    for attribute in dir(cls):
        value = getattr(cls, attribute, None)
        public = not attribute.startswith("_") and attribute not in _NOT_EVENTS
        inherited = value is getattr(Hook, attribute, None)
        if callable(value) and not inherited and (public or hasattr(value, _MARK)):
            found.append(attribute)
    return found


def _refuse_mmengine_names(cls: type[Hook]) -> None:
    """Refuse MMEngine's `_before_epoch(self, runner, mode)` and its like, which would never be called."""
    for method in GENERIC:
        if callable(getattr(cls, f"_{method}", None)):
            raise TypeError(
                f"{cls.__name__}._{method} is MMEngine's name and would never be called: define "
                f"{method}(self, trainer, event), where event.mode is the mode (or give a helper another "
                "name)"
            )


def _refuse_missing_self(cls: type[Hook], method: str) -> None:
    code = getattr(vars(cls).get(method), "__code__", None)  # static and class methods have none
    takes = () if code is None else code.co_varnames[: code.co_argcount]
    if takes[:1] in [("trainer",), ("event",)]:
        raise TypeError(
            f"{cls.__name__}.{method} must take (self, trainer, event), got ({', '.join(takes)}): "
            "self is missing"
        )


def _refuse_near_miss(cls: type[Hook], method: str, names: list[str]) -> None:
    if (meant := point_meant(method)) in names or meant in GENERIC:
        raise TypeError(
            f"{cls.__name__}.{method} is not an event and would never be called: define "
            f"{meant}(self, trainer, event) (or give a helper another name)"
        )
    looks_like_one = method.startswith(("before_", "after_")) or get_close_matches(
        method, names, 1, cutoff=0.85
    )
    if looks_like_one or hasattr(getattr(cls, method), _MARK):
        raise TypeError(
            f"{cls.__name__}.{method} is not an event{suggest(method, [*names, *GENERIC])} "
            "(give a method that handles no event a name that does not look like one)"
        )


_NOT_EVENTS = frozenset(vars(Hook))
"""Attributes that every hook has, such as `settings` and `state_dict`; they never stand for an event."""
