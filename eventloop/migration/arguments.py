"""Make a constructor suggest a replacement for each unknown argument.

The trainer and hooks decorate their constructors with this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from eventloop.migration.names import argument_meant
from eventloop.util.suggest import suggest

P = ParamSpec("P")


def knowing_others(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor raise a TypeError that suggests a replacement for each unknown argument."""
    parameters = inspect.signature(init).parameters
    known = [*parameters][1:]
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if unknown := [name for name in kwargs if name not in parameters]:
            hints = [f"{name!r}{argument_meant([owner], name) or suggest(name, known)}" for name in unknown]
            raise TypeError(f"{owner} has no argument " + "\n  nor ".join(hints))
        init(*args, **kwargs)

    return checked
