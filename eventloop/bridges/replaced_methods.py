"""Replace methods of another engine's objects during a run, so that bridges can measure their calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_ABSENT = object()


class _Replaced(NamedTuple):
    owner: Any
    name: str
    replacement: Callable[..., Any]
    before: Any
    """The object's attribute of that name before the replacement; `_ABSENT` if only its class had one."""


class ReplacedMethods:
    """Replace methods of objects by other functions until `restore` is called.

        methods = ReplacedMethods()
        methods.replace(callback, "on_step_end", lambda call: measured(call))
        methods.restore()

    The function becomes an attribute of the object. The object's class stays the same, because engines check
    it with `isinstance`. An object that accepts no attributes keeps its method.
    """

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def replace(self, owner: Any, name: str, change: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a method by the function that `change` returns when called with the bound method."""
        before = getattr(owner, "__dict__", {}).get(name, _ABSENT)
        replacement = change(getattr(owner, name))
        with suppress(AttributeError, TypeError):
            setattr(owner, name, replacement)
            self._replaced.append(_Replaced(owner, name, replacement, before))

    def restore(self) -> None:
        """Undo all replacements, except of methods that other code has replaced since."""
        while self._replaced:
            owner, name, replacement, before = self._replaced.pop()
            if getattr(owner, "__dict__", {}).get(name) is not replacement:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
