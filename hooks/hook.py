"""Define `Hook`, the base class of hooks, which subscribes each event method that a subclass overrides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from eventloop.bus import Bus
from eventloop.bus.subscription import check_budget
from eventloop.events.base import ALIASES, Event, known_events
from eventloop.events.catalogue import find_event
from eventloop.events.filters import Predicate, check_filter
from eventloop.events.priority import Priority, get_priority
from eventloop.events.subscribed import check_possible
from eventloop.hooks.points import GENERIC, Points, events_of
from eventloop.migration.names import point_meant
from eventloop.state.containers import copied
from eventloop.util.functions import handler_name, is_coroutine_function
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

F = TypeVar("F", bound=Callable[..., Any])
_ON_OPTIONS = "_eventloop_on"
"""The attribute in which `on` stores its options on a method."""


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
    """Set the priority, the filter and the budget of one method of a hook; the options are those of `bus.on`.

    @on(priority=49, every=10)
    def after_train_iter(self, trainer, event): ...

    Raises:
        TypeError, ValueError: a priority, filter or budget is invalid, or the parentheses are missing; raised
            when the class is defined.
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

    def store_options(method: F) -> F:
        setattr(method, _ON_OPTIONS, options)
        return method

    return store_options


class Hook(Points):
    """Subscribe the event methods that a subclass overrides; methods that it does not override cost nothing.

        class PrintLoss(Hook):
            priority = "LOW"

            def after_train_iter(self, trainer, event):
                if self.every_n_train_iters(trainer, 100):
                    print(trainer.metrics.latest()["loss"])

    `before_epoch`, `after_epoch`, `before_iter` and `after_iter` are called in training, validation and test,
    with the mode in `event.mode`. If the hook overrides `after_val_iter` too, `after_iter` is not called in
    validation; the other methods of one mode act alike. An `async def` method takes `(self, event)` and runs
    in the background. The return value of `state_dict` is saved with every checkpoint under the hook's
    `name`, which must be unique, and passed to `load_state_dict` on resume.

    A hook with a state belongs to one trainer. If it is passed to a second trainer, it starts over: its
    constructor is called again with the same arguments, and attributes that were set before the first trainer
    was built are set again. Arguments and attributes that are lists, dicts or sets are passed as they are
    now, or as copies of their first values if the hook's new state would depend on a change of them. After
    that the first trainer can begin no other run.
    """

    priority: Priority | int | str = Priority.NORMAL
    budget_us: float | None = None
    """The limit in µs for the 99th percentile of the times of each method; see `bus.on`."""
    name: str | None = None
    """The name of the hook in reports and checkpoints; None if the trainer shall choose one."""
    runs_phases: ClassVar[tuple[str, ...]] = ()
    """The phases of an iteration, such as "backward", that `after_train_iter` runs and adds to the clock."""

    owns: ClassVar[str] = ""
    """The part of the loop that the hook does itself, such as "the optimizer's step".

    A trainer whose loop is another engine's refuses such a hook, because that engine does this part.
    """

    tunable: ClassVar[tuple[str, ...]] = ()
    """The attributes that `eventloop tell RUN set HOOK.ATTRIBUTE=VALUE` may set, such as ("patience",).

    An attribute may be a property whose setter raises TypeError or ValueError for a wrong value.
    """

    can_start_over: ClassVar[bool] = True
    """False if a second call of the constructor, for a second trainer, would not restore the first state."""

    _points: ClassVar[dict[str, list[str]]] = {}
    """The names of the event methods that this class overrides, each with the events that it handles."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the attributes of a new hook class, and find its event methods."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _storing_arguments(cls.__init__)  # type: ignore[method-assign]
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
            options = {**_on_options(method), "priority": priority_of(self, method)}
            if options.get("budget_us") is None:
                options["budget_us"] = self.budget_us
            # one subscription a method, so that `once` counts its events together, and a coroutine method
            # receives them in order
            bus.subscribe(method, *events, **options)

    def _subscriptions(self, bus: Bus) -> Iterator[tuple[Callable[..., Any], list[str]]]:
        """Yield each function that `attach` subscribes to the bus, with the names of its events."""
        for name, handled in self._points.items():
            events = [*handled]
            # eventloop's own hooks skip events that this trainer never emits; a user's hook is refused
            if name in GENERIC or _is_from_eventloop(_defining_class(type(self), name)):
                events = [event for event in handled if bus.possible([event])]
            if events:
                yield getattr(self, name), events

    def check(self, trainer: Trainer) -> None:
        """Raise an error for a trainer with which the hook cannot work; called when the trainer is built."""

    @property
    def stateful(self) -> bool:
        """True when the hook has a state to save."""
        return type(self).state_dict is not Hook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state as plain values, tensors and NumPy's numeric arrays.

        If the trainer saves checkpoints, this is also called before the first iteration, so that a state that
        cannot be saved is reported at once.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        `Trainer.resume` calls this before the optimizer, the counters and the model are loaded. If this or a
        later step of the resume raises, the hook's attributes are restored. If `state_dict` then still
        differs from its value before the resume, `load_state_dict` is called with a copy of that value.
        Change only the hook here, because other objects are not restored. A warning is logged for a hook that
        saves a state and does not define this method.
        """
        # a subclass that calls `super().load_state_dict` defines the method, and gets no warning
        if state and type(self).load_state_dict is Hook.load_state_dict:
            logger.warning(
                "the hook %s has a state_dict and no load_state_dict: its state of the checkpoint is not "
                "restored",
                self.name,
            )

    def settings(self) -> dict[str, Any]:
        """Return the options that change the course of a training, by the names of the arguments.

            def settings(self):
                return {"temperature": self._temperature}

        Every checkpoint stores these options, and `resume` compares the options that both the checkpoint and
        the hook have. It refuses changed options; with changed="keep" or "apply" it goes on with the options
        of this hook. Only plain values are stored: numbers, strings, None, and containers of these. Called
        once, after `check`.
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


def _storing_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that stores its arguments, so that the hook can be constructed again.

    It also stores a copy of the attributes that it has set, to find those that the user has set later.
    """

    @wraps(init)
    def constructor(self: Hook, *args: Any, **kwargs: Any) -> None:
        """Construct the hook; only the outermost constructor of a class stores arguments and attributes."""
        is_outermost = "_made_with" not in vars(self)  # not the constructor of a base class
        vars(self).setdefault("_made_with", (args, kwargs))
        init(self, *args, **kwargs)
        if is_outermost:
            vars(self)["_as_made"] = copied(vars(self))

    return constructor


def check_events(hook: object, bus: Bus, excluded: Mapping[type[Event], str]) -> None:
    """Refuse a hook that would subscribe to an event that is never emitted, before it is attached.

    A user's hook that defines `attach` may subscribe fewer methods, so it is checked when it is attached.

    Args:
        excluded: the events that are never emitted, with the reasons.

    Raises:
        ValueError: naming the method, the event and the reason.
    """
    if isinstance(hook, Hook) and _is_from_eventloop(_defining_class(type(hook), "attach")):
        for method, events in hook._subscriptions(bus):
            check_possible(handler_name(method), map(find_event, events), excluded)


def _on_options(method: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that `on` has stored on a method; {} without any."""
    options = getattr(method, _ON_OPTIONS, None)
    return options if isinstance(options, dict) else {}  # a mock in a test has every attribute


def priority_of(hook: Hook, method: Callable[..., Any]) -> Priority | int | str:
    """Return the priority of a hook's method: the one in `@on`, else the hook's, or NORMAL if it is async."""
    own: Priority | int | str | None = _on_options(method).get("priority")
    if own is not None:
        return own
    return Priority.NORMAL if is_coroutine_function(method) else hook.priority


def _every(count: int, n: int) -> bool:
    """Return whether a count of at least 0 is a multiple of n; False if n <= 0."""
    return n > 0 and count >= 0 and count % n == 0


def _overridden_points(cls: type[Hook]) -> dict[str, list[str]]:
    """Return the names of the event methods that a hook class overrides, each with its events.

    Raises:
        TypeError: two methods handle one event, or a method only looks as if it handled one.
    """
    handles_event = {method: _handles_event(cls, method) for method in _candidate_methods(cls)}
    if not _is_from_eventloop(cls):  # a test checks eventloop's own hooks, not each start of a process
        _check_methods(cls, handles_event)
    return events_of([method for method, handles in handles_event.items() if handles], cls.__name__)


def _check_methods(cls: type[Hook], handles_event: Mapping[str, bool]) -> None:
    """Refuse event methods without `self`, and other methods whose names look like an event's."""
    _refuse_mmengine_names(cls)
    for method, handles in handles_event.items():
        if handles:
            _refuse_missing_self(cls, method)
            continue
        own = _is_from_eventloop(_defining_class(cls, method))
        _refuse_near_miss(cls, method, [name for name in known_events() if not own or _is_own_event(name)])


def _handles_event(cls: type[Hook], method: str) -> bool:
    """Return whether a hook's method has the name of an event, or of a method for all modes."""
    event = ALIASES.get(method, method)
    if method in GENERIC or event not in known_events():
        return method in GENERIC
    # a method of eventloop's own hooks may have the name of an event that other code declares
    return _is_own_event(event) or not _is_from_eventloop(_defining_class(cls, method))


def _is_own_event(name: str) -> bool:
    """Return whether eventloop declares the event of a name."""
    return any(_is_from_eventloop(event_type) for event_type in known_events()[name])


def _is_from_eventloop(cls: type) -> bool:
    """Return True for a class of eventloop, False for a class of other code."""
    return cls.__module__.partition(".")[0] == "eventloop"


def _defining_class(cls: type[Hook], method: str) -> type:
    """Return the class that defines a method of `cls`: `cls` itself or one of its bases."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _candidate_methods(cls: type[Hook]) -> list[str]:
    """Return the names of the public methods that differ from `Hook`'s, and of all methods with `@on`."""
    names = []
    for name in dir(cls):
        value = getattr(cls, name, None)
        is_public = not name.startswith("_") and name not in _NOT_EVENTS
        is_inherited = value is getattr(Hook, name, None)
        if callable(value) and not is_inherited and (is_public or hasattr(value, _ON_OPTIONS)):
            names.append(name)
    return names


def _refuse_mmengine_names(cls: type[Hook]) -> None:
    """Refuse methods such as MMEngine's `_before_epoch(self, runner, mode)`, which would never be called."""
    for method in GENERIC:
        if callable(getattr(cls, f"_{method}", None)):
            raise TypeError(
                f"{cls.__name__}._{method} is MMEngine's name and would never be called: define "
                f"{method}(self, trainer, event), where event.mode is the mode (or give a helper another "
                "name)"
            )


def _refuse_missing_self(cls: type[Hook], method: str) -> None:
    """Refuse an event method whose first parameter is named `trainer` or `event`."""
    code = getattr(vars(cls).get(method), "__code__", None)  # static and class methods have no __code__
    parameters = () if code is None else code.co_varnames[: code.co_argcount]
    if parameters[:1] in [("trainer",), ("event",)]:
        raise TypeError(
            f"{cls.__name__}.{method} must take (self, trainer, event), got ({', '.join(parameters)}): "
            "self is missing"
        )


def _refuse_near_miss(cls: type[Hook], method: str, events: list[str]) -> None:
    """Refuse a method that handles no event although it has `@on`, or a name similar to an event's."""
    if (meant := point_meant(method)) in events or meant in GENERIC:
        raise TypeError(
            f"{cls.__name__}.{method} is not an event and would never be called: define "
            f"{meant}(self, trainer, event) (or give a helper another name)"
        )
    has_prefix = method.startswith(("before_", "after_"))
    is_close = has_prefix or get_close_matches(method, events, 1, cutoff=0.85)
    if is_close or hasattr(getattr(cls, method), _ON_OPTIONS):
        raise TypeError(
            f"{cls.__name__}.{method} is not an event{suggest(method, [*events, *GENERIC])} "
            "(give a method that handles no event a name that does not look like one)"
        )


_NOT_EVENTS = frozenset(vars(Hook))
"""The attributes that every hook has, such as `settings` and `state_dict`; none is an event method."""
