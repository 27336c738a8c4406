"""A constructor that says which of its arguments was meant by another name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from eventloop.catalogue import suggest
from eventloop.peer_names import ARGUMENTS

P = ParamSpec("P")


def knowing_others(init: Callable[P, None]) -> Callable[P, None]:
    """Have a constructor that is given an argument it does not have say which was meant."""
    parameters = inspect.signature(init).parameters
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if unknown := [name for name in kwargs if name not in parameters]:
            raise TypeError(f"{owner} has no argument {unknown[0]!r}{_hint(unknown[0], [*parameters][1:])}")
        init(*args, **kwargs)

    return checked


def _hint(name: str, known: list[str]) -> str:
    for system, arguments in ARGUMENTS.items():
        if name in arguments:
            return f": {system}'s is here {arguments[name]}"
    return suggest(name, known)
