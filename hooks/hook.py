"""The base of every hook: methods named after events, subscribed where they are overridden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from eventloop.bus import Bus
from eventloop.bus.subscription import check_budget
from eventloop.events.base import ALIASES, event_name
from eventloop.events.catalogue import declared_events
from eventloop.events.filters import Predicate, check_filter
from eventloop.events.priority import Priority, get_priority
from eventloop.hooks.points import GENERIC, Points
from eventloop.migration.names import point_meant
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_eventloop_on"


def on(
    *,
    priority: Priority | int | str | None = None,
    every: int = 1,
    start: int = 0,
    once: bool = False,
    when: Predicate | None = None,
    budget_us: float | None = None,
) -> Callable[[F], F]:
    """Give one method of a hook its own place and filter; the words are those of `bus.on`.

    @on(priority=49, every=10)
    def after_train_iter(self, trainer, event): ...

    Raises:
        TypeError, ValueError: a bad priority, filter or budget, where it is written.
    """
    if priority is not None:
        get_priority(priority)
    check_filter(every, start, once, when)
    if budget_us is not None:
        check_budget("@on", budget_us)
    options = {
        "priority": priority, "every": every, "start": start, "once": once, "when": when, "budget_us": budget_us,
    }  # fmt: skip

    def mark(method: F) -> F:
        setattr(method, _MARK, options)
        return method

    return mark


class Hook(Points):
    """Override the points you need; only those are subscribed, so the rest cost nothing.

        class PrintLoss(Hook):
            priority = "LOW"

            def after_train_iter(self, trainer, event):
                if self.every_n_train_iters(trainer, 100):
                    print(trainer.metrics.latest()["loss"])

    `before_epoch`, `after_epoch`, `before_iter` and `after_iter` serve training, validation and test alike
    (`event.mode` says which), unless the hook overrides the one of that mode. An `async def` method takes
    `(self, event)` and runs in the background. What `state_dict` returns is saved with every checkpoint under the
    hook's `name`, which must be unique, and given back to `load_state_dict`.
    """

    priority: Priority | int | str = Priority.NORMAL
    budget_us: float | None = None
    """What the p99 of each of its methods should stay under; see `bus.on`."""
    name: str | None = None
    runs_phases: ClassVar[tuple[str, ...]] = ()
    """Phases of the iteration that its `after_train_iter` runs, and books with `trainer.clock`."""

    _points: ClassVar[dict[str, list[str]]] = {}
    """Method name -> names of the events it serves, of everything this class overrides."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        get_priority(cls.priority)
        if cls.budget_us is not None:
            check_budget(cls.__name__, cls.budget_us)
        cls._points = _overridden_points(cls)

    def attach(self, bus: Bus) -> None:
        """Subscribe every overridden point.

        Raises:
            TypeError: a method's signature is not (self, trainer, event), or `budget_us` is no number.
            ValueError: `budget_us` is not above 0, of a hook without points too.
        """
        if self.budget_us is not None:
            check_budget(type(self).__name__, self.budget_us)
        for method_name, events in self._points.items():
            method = getattr(self, method_name)
            options = {**getattr(method, _MARK, {}), "priority": priority_of(self, method)}
            if options.get("budget_us") is None:
                options["budget_us"] = self.budget_us
            # one subscription a method: `once` means once, and an async method hears its events in their order
            bus.subscribe(method, *events, **options)

    def check(self, trainer: Trainer) -> None:
        """Refuse, when the trainer is built, one the hook cannot serve."""

    @property
    def stateful(self) -> bool:
        """True when the hook has a state to save."""
        return type(self).state_dict is not Hook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """The hook's state as plain values and tensors."""
        return {}

    @property
    def loads_itself(self) -> bool:
        """True when the class has a `load_state_dict` of its own, which may fail after a part of the state."""
        return type(self).load_state_dict is not Hook.load_state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` returned.

        `Trainer.resume` calls it before the model, the optimizer and the counters are loaded. If it raises, or a later
        hook, the resume is refused: the hook's attributes are put back, and where that leaves another `state_dict`
        than before, it is given a copy of that one.
        """
        self.prepare_state(state)()

    def prepare_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state that `state_dict` returned, change nothing, and return what takes it, which must not fail.

            def prepare_state(self, state):
                patience = int(state["patience"])
                return lambda: setattr(self, "patience", patience)

        A hook that overrides this instead of `load_state_dict` need not be put back: `Trainer.resume` calls what is
        returned last, when nothing of the checkpoint can be refused any more.
        """
        return lambda: None

    def settings(self) -> dict[str, Any]:
        """The options that change the course of a training, by the names they were given under.

            def settings(self):
                return {"temperature": self._temperature}

        They are in every checkpoint, and compared when a trainer resumes: `resume` refuses what was changed, and with
        changed="keep" or "apply" goes on with what this hook was built with. Options that both sides have are
        compared; what is no plain value is left out. Called once, after `check`.
        """
        return {}

    # --- MMEngine's helpers --------------------------------------------------------------------------------

    def every_n_epochs(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """In train epoch events: every `n`-th epoch, counted from epoch `start` on; never for n <= 0."""
        return _every(trainer.epoch + 1 - start, n)

    def every_n_train_iters(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """In train iteration events: every `n`-th iteration of the run, from `start` on; never for n <= 0."""
        return _every(trainer.iter + 1 - start, n)

    every_n_iters = every_n_train_iters
    """mmcv's name."""

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Every `n`-th batch of a pass; never for n <= 0."""
        return _every(batch_idx + 1, n)

    def end_of_epoch(self, loader: Any, batch_idx: int) -> bool:
        """True at the last batch of a pass over `loader`."""
        return bool(batch_idx + 1 == len(loader))

    def is_last_train_epoch(self, trainer: Trainer) -> bool:
        """In train epoch events: True in the last epoch of the run."""
        return trainer.max_epochs is not None and trainer.epoch + 1 == trainer.max_epochs

    def is_last_train_iter(self, trainer: Trainer) -> bool:
        """In train iteration events: True in the last iteration of the run."""
        return trainer.max_iters is not None and trainer.iter + 1 == trainer.max_iters


def priority_of(hook: Hook, method: Callable[..., Any]) -> Priority | int | str:
    """That of one of its methods: its own, by `on`, or the hook's."""
    own: Priority | int | str | None = getattr(method, _MARK, {}).get("priority")
    return hook.priority if own is None else own


def _every(counted: int, n: int) -> bool:
    return n > 0 and counted >= 0 and counted % n == 0


def _overridden_points(cls: type[Hook]) -> dict[str, list[str]]:
    """Find what a hook class overrides.

    Raises:
        TypeError: a method that looks like a point and is none, MMEngine's with an underscore and Lightning's with "on_"
            among them, or two methods for one event.
    """
    names = [event_name(event_type) for event_type in declared_events()]
    ours = [event_name(event_type) for event_type in declared_events() if _is_ours(event_type)]
    _refuse_mmengines(cls)
    served: dict[str, str] = {}
    for method in _own_methods(cls):
        if method in GENERIC:
            for event in GENERIC[method]:
                served.setdefault(event, method)
            continue
        event = ALIASES.get(method, method)
        # a hook of eventloop knows no events of others, who may use any name
        known = ours if _is_ours(_author(cls, method)) else names
        if event not in known:
            _refuse_near_miss(cls, method, known)
            continue
        other = served.get(event, method)
        if other not in GENERIC and other != method:
            raise TypeError(
                f"{cls.__name__} has both {other} and {method}, two names of one event: keep one of them"
            )
        served[event] = method
    points: dict[str, list[str]] = {}
    for event in names:
        if event in served:
            points.setdefault(served[event], []).append(event)
    return points


def _is_ours(cls: type) -> bool:
    """True for a class of eventloop's, False for one of somebody who uses it."""
    return cls.__module__.partition(".")[0] == "eventloop"


def _author(cls: type[Hook], method: str) -> type:
    """The class, or the base of it, that has the method's code."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _own_methods(cls: type[Hook]) -> list[str]:
    """The public methods that are not as `Hook` has them, and whatever carries the mark of `@on`."""
    found = []
    for attribute in dir(cls):
        value = getattr(cls, attribute, None)
        public = not attribute.startswith("_") and attribute not in _NO_POINTS
        inherited = value is getattr(Hook, attribute, None)
        if callable(value) and not inherited and (public or hasattr(value, _MARK)):
            found.append(attribute)
    return found


def _refuse_mmengines(cls: type[Hook]) -> None:
    """MMEngine's hooks override `_before_epoch(self, runner, mode)`; here nobody would call it."""
    for method in GENERIC:
        if callable(getattr(cls, f"_{method}", None)):
            raise TypeError(
                f"{cls.__name__}._{method} is MMEngine's and would never be called: here it is "
                f"{method}(self, trainer, event), where event.mode says which mode (a helper of yours needs another name)"
            )


def _refuse_near_miss(cls: type[Hook], method: str, names: list[str]) -> None:
    if (meant := point_meant(method)) in names or meant in GENERIC:
        raise TypeError(
            f"{cls.__name__}.{method} is no event and would never be called: here it is {meant}(self, trainer, event) "
            "(a helper of yours needs another name)"
        )
    looks_like_one = method.startswith(("before_", "after_")) or get_close_matches(
        method, names, 1, cutoff=0.85
    )
    if looks_like_one or hasattr(getattr(cls, method), _MARK):
        raise TypeError(
            f"{cls.__name__}.{method} is no event{suggest(method, [*names, *GENERIC])} "
            "(a method of yours that is no point must not look like one)"
        )


_NO_POINTS = frozenset(vars(Hook))
"""What every hook has, `settings` and `state_dict` as well, stands for no event, whatever events are declared."""
