"""Replace methods of another engine's objects during a run, so that bridges can measure their calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_ABSENT = object()


class _Replaced(NamedTuple):
    owner: Any
    name: str
    ours: Callable[..., Any]
    before: Any
    """The former method in the object's own `__dict__`, or `_ABSENT` if only the class had it."""


class ReplacedMethods:
    """Replace methods of objects by other functions, until `restore`.

        methods = ReplacedMethods()
        methods.replace(callback, "on_step_end", lambda call: measured(call))
        methods.restore()

    The function becomes an attribute of the object. Its class does not change, because engines check it with
    `isinstance`. An object that takes no attributes keeps its method.
    """

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def replace(self, owner: Any, name: str, change: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a method by the function that `change` returns when called with the bound method."""
        before = getattr(owner, "__dict__", {}).get(name, _ABSENT)
        ours = change(getattr(owner, name))
        with suppress(AttributeError, TypeError):
            setattr(owner, name, ours)
            self._replaced.append(_Replaced(owner, name, ours, before))

    def restore(self) -> None:
        """Give all objects their own methods back.

        A method that other code has replaced in the meantime stays as that code made it.
        """
        while self._replaced:
            owner, name, ours, before = self._replaced.pop()
            if getattr(owner, "__dict__", {}).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
