"""The base of every hook: methods named after events, subscribed where they are overridden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from eventloop.bus import Bus
from eventloop.catalogue import declared_events, event_name, find_event, suggest
from eventloop.filters import Predicate
from eventloop.hooks.points import GENERIC, Points
from eventloop.priority import Priority, get_priority

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_eventloop_on"


def on(
    *,
    priority: Priority | int | str | None = None,
    every: int = 1,
    start: int = 0,
    once: bool = False,
    when: Predicate | None = None,
) -> Callable[[F], F]:
    """Give one method of a hook its own place and filter; the words are those of `bus.on`.

    @on(priority=49, every=10)
    def after_train_iter(self, trainer, event): ...
    """
    if priority is not None:
        get_priority(priority)

    def mark(method: F) -> F:
        setattr(
            method, _MARK, {"priority": priority, "every": every, "start": start, "once": once, "when": when}
        )
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
    (`event.mode` says which), unless the hook overrides the one of that mode. What `state_dict` returns is saved
    with every checkpoint under the hook's `name`, which must be unique, and given back to `load_state_dict`.
    """

    priority: Priority | int | str = Priority.NORMAL
    name: str | None = None

    _points: ClassVar[dict[str, str]] = {}
    """Event name -> method name, of everything this class overrides."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        get_priority(cls.priority)
        cls._points = _overridden_points(cls)

    def attach(self, bus: Bus) -> None:
        """Subscribe every overridden point.

        Raises:
            TypeError: a method's signature is not (self, trainer, event).
        """
        for event, method_name in self._points.items():
            method = getattr(self, method_name)
            options = dict(getattr(method, _MARK, {}))
            if options.get("priority") is None:
                options["priority"] = self.priority
            bus.subscribe(method, event, **options)

    def check(self, trainer: Trainer) -> None:
        """Refuse, when the trainer is built, one the hook cannot serve."""

    @property
    def stateful(self) -> bool:
        """True when the hook has a state to save."""
        return type(self).state_dict is not Hook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """The hook's state as plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` returned."""

    # --- MMEngine's helpers --------------------------------------------------------------------------------

    def every_n_epochs(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """In train epoch events: every `n`-th epoch, counted from epoch `start` on; never for n <= 0."""
        return _every(trainer.epoch + 1 - start, n)

    def every_n_train_iters(self, trainer: Trainer, n: int, start: int = 0) -> bool:
        """In train iteration events: every `n`-th iteration of the run, from `start` on; never for n <= 0."""
        return _every(trainer.iter + 1 - start, n)

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


def _every(counted: int, n: int) -> bool:
    return n > 0 and counted >= 0 and counted % n == 0


def _overridden_points(cls: type[Hook]) -> dict[str, str]:
    """Find what a hook class overrides.

    Raises:
        TypeError: a method that looks like a point and is none.
    """
    names = [event_name(event_type) for event_type in declared_events()]
    points: dict[str, str] = {}
    for attribute in dir(cls):
        if attribute.startswith("_") or not callable(getattr(cls, attribute, None)):
            continue
        if getattr(cls, attribute) is getattr(Hook, attribute, None) or attribute in _HELPERS:
            continue
        if attribute in GENERIC:
            for event in GENERIC[attribute]:
                points.setdefault(event, attribute)
        elif attribute in names or attribute in ("before_step", "after_step"):
            points[event_name(find_event(attribute))] = attribute
        elif attribute.startswith(("before_", "after_")) or get_close_matches(
            attribute, names, 1, cutoff=0.85
        ):
            raise TypeError(
                f"{cls.__name__}.{attribute} is no event{suggest(attribute, [*names, *GENERIC])} "
                "(a method of yours that is no point must not look like one)"
            )
    return {event: points[event] for event in names if event in points}


_HELPERS = frozenset(
    name for name in vars(Hook) if name.startswith(("every_", "end_", "is_")) or name in ("attach", "check")
)
