"""Steer another engine's training from one call of one of its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def callback_at(base: type, method: str, number: int, do: Callable[..., object]) -> Any:
    """Return a callback of a host's class that calls `do`, with the same arguments, at the n-th call of one method."""
    calls = 0

    def at(self: object, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            do(*args)

    return type("At", (base,), {method: at})()


def outcome(call: Callable[[], object]) -> str:
    """Return the error of a call, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
