"""Set attributes of hooks by a command, those that a hook lists in `tunable`; `set_values` uses it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from math import isfinite
from typing import Any, ClassVar

import msgspec

from eventloop.steering.protocols import CommandError, SteeredTrainer
from eventloop.util.checks import positive

logger = logging.getLogger("eventloop")

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class HookChange:
    """An attribute of a hook that is set by a command.

    Args:
        label: the attribute's name in the answer and in messages.
        hook: the hook.
        name: the attribute, one of the hook's `tunable`.
        given: the value, or a text of it, which is converted to the type of the present value; an attribute
            of None takes a number.
    """

    def __init__(self, label: str, hook: Any, name: str, given: Any) -> None:
        self.label = label
        self._hook, self._name, self._given = hook, name, given
        self._old = getattr(hook, name)
        self._made = False

    def check(self) -> None:
        """Refuse a value of another type than the present one."""
        self._next()

    def make(self) -> None:
        """Set the attribute, whose setter may refuse the value."""
        value, former = self._next(), getattr(self._hook, self._name)
        try:
            setattr(self._hook, self._name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise CommandError(f"{self.label}={self._given} was refused: {error}") from None
        self._former, self._made = former, True

    def restore(self) -> None:
        """Set the former value, if `make` has changed it."""
        if self._made:
            setattr(self._hook, self._name, self._former)

    def result(self) -> dict[str, Any]:
        """Return the former and the new value."""
        return {"old": self._old, "new": getattr(self._hook, self._name)}

    def _next(self) -> Any:
        present = getattr(self._hook, self._name)
        kind = float if present is None else type(present)
        try:
            value = msgspec.convert(self._given, kind, strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            raise CommandError(
                f"{self.label} expects a value of the type {kind.__name__}, got {self._given!r}: {error}"
            ) from None
        if isinstance(value, float) and not isfinite(value):
            raise CommandError(f"{self.label} expects a finite number, got {self._given!r}")
        return value


class TunableInterval:
    """The interval of a hook, in its attribute `_interval`, as an attribute that a command may set."""

    tunable: ClassVar[tuple[str, ...]] = ("interval",)
    _interval: int

    @property
    def interval(self) -> int:
        """The number of iterations or epochs from one action of the hook to the next."""
        return self._interval

    @interval.setter
    def interval(self, interval: int) -> None:
        positive("interval", interval)
        if self._interval < 1:  # the hook has prepared nothing
            raise ValueError(f"the hook acts at no interval (interval={self._interval})")
        self._interval = interval


def hook_changes(trainer: SteeredTrainer, name: str, given: Any, multiplies: bool) -> list[HookChange]:
    """Return the change of the attribute that a name means; an empty list if it means none.

    Raises:
        CommandError: the attribute would be multiplied.
    """
    owner, _, attribute = name.rpartition(".")
    for hook in trainer.hooks:
        if owner in _names_of(hook.name) and attribute in _tunable(hook):
            if multiplies:  # it could not be set again after a resume
                raise CommandError(
                    f"{name} is an attribute of a hook: expected {name}=VALUE, got {name}*={given}"
                )
            return [HookChange(name, hook, attribute, given)]
    return []


def hook_names(trainer: SteeredTrainer) -> Iterator[str]:
    """Yield the names of the attributes of hooks that can be set."""
    for hook in trainer.hooks:
        for attribute in _tunable(hook):
            yield f"{_names_of(hook.name)[-1]}.{attribute}"


def set_again(trainer: SteeredTrainer) -> None:
    """Set those attributes of hooks again that commands had set before the checkpoint that was resumed.

    The hooks' states do not have them. A hook that the program no longer has is left out; a value that its
    hook refuses is logged.
    """
    for applied in trainer.applied_commands:
        if applied.command != "set":
            continue
        for name, given in applied.arguments.items():
            try:
                for change in hook_changes(trainer, name.strip(), given, multiplies=False):
                    change.make()
                    logger.info("%s is %s, as it was set after iteration %d", name, given, applied.iter)
            except CommandError as error:
                logger.warning("%s, set after iteration %d, is not set again: %s", name, applied.iter, error)


def _tunable(hook: Any) -> list[str]:
    """Return the attributes of a hook that can be set now; a property may say that it has no value."""
    return [name for name in getattr(type(hook), "tunable", ()) if hasattr(hook, name)]


def _names_of(name: str) -> list[str]:
    """Return the names by which a hook can be addressed: its own, and its own in lower case with "_"."""
    lower = _WORDS.sub("_", name).lower()
    return list(dict.fromkeys((name, lower, lower.removesuffix("_hook"))))
