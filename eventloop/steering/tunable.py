"""Set attributes of hooks, which a hook lists in its `tunable`, for the command `set`."""

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
    """A change of one attribute of a hook by a command.

    Args:
        label: the attribute's name in the answer and in messages.
        hook: the hook.
        name: the attribute, one of the hook's `tunable`.
        given: the new value, or a text of it, which is converted to the type of the current value, or to a
            float if there is no current value (None).
    """

    def __init__(self, label: str, hook: Any, name: str, given: Any) -> None:
        self.label = label
        self._hook, self._name, self._given = hook, name, given
        self._old = getattr(hook, name)
        self._made = False

    def check(self) -> None:
        """Raise CommandError for a value that cannot be converted to the type of the current one."""
        self._new_value()

    def make(self) -> None:
        """Set the attribute; raise CommandError if its setter refuses the value."""
        value, value_before = self._new_value(), getattr(self._hook, self._name)
        try:
            setattr(self._hook, self._name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise CommandError(f"{self.label}={self._given} was refused: {error}") from None
        self._value_before, self._made = value_before, True

    def restore(self) -> None:
        """Set the value from before `make`, if `make` has changed it."""
        if self._made:
            setattr(self._hook, self._name, self._value_before)

    def result(self) -> dict[str, Any]:
        """Return the result of the command: the old and the new value."""
        return {"old": self._old, "new": getattr(self._hook, self._name)}

    def _new_value(self) -> Any:
        """Return the given value, converted to the type of the current one."""
        current = getattr(self._hook, self._name)
        kind = float if current is None else type(current)
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
    """A base class for hooks with an attribute `_interval`, which a command may set as `interval`."""

    tunable: ClassVar[tuple[str, ...]] = ("interval",)
    _interval: int

    @property
    def interval(self) -> int:
        """The number of iterations or epochs from one action of the hook to the next."""
        return self._interval

    @interval.setter
    def interval(self, interval: int) -> None:
        """Set the interval of a hook that acts at one; refuse it for a hook that is switched off."""
        positive("interval", interval)
        if self._interval < 1:  # the hook is switched off, and has not prepared its action
            raise ValueError(f"the hook acts at no interval (interval={self._interval})")
        self._interval = interval


def hook_changes(trainer: SteeredTrainer, name: str, given: Any, multiplies: bool) -> list[HookChange]:
    """Return a list of the change of the attribute that a name means; [] if it means no attribute.

    Raises:
        CommandError: `multiplies` is True, which attributes of hooks do not support.
    """
    hook_name, _, attribute = name.rpartition(".")
    for hook in trainer.hooks:
        if hook_name in _names_of(hook.name) and attribute in _tunable(hook):
            if multiplies:  # `set_again` could not repeat it after a resume
                raise CommandError(
                    f"{name} is an attribute of a hook: expected {name}=VALUE, got {name}*={given}"
                )
            return [HookChange(name, hook, attribute, given)]
    return []


def hook_names(trainer: SteeredTrainer) -> Iterator[str]:
    """Yield the names of the attributes of hooks that the command `set` can change."""
    for hook in trainer.hooks:
        for attribute in _tunable(hook):
            yield f"{_names_of(hook.name)[-1]}.{attribute}"


def set_again(trainer: SteeredTrainer) -> None:
    """Set attributes of hooks again that commands had set before the resumed checkpoint was saved.

    A checkpoint has the commands, but not these attributes. A hook that the program no longer has is ignored.
    A warning is logged for a value that its hook refuses.
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
    """Return the names in a hook's `tunable`, except of properties that now raise AttributeError."""
    return [name for name in getattr(type(hook), "tunable", ()) if hasattr(hook, name)]


def _names_of(name: str) -> list[str]:
    """Return the names of a hook in commands, such as EMAHook, ema_hook and ema for "EMAHook"."""
    lower = _WORDS.sub("_", name).lower()
    return list(dict.fromkeys((name, lower, lower.removesuffix("_hook"))))
