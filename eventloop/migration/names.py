"""Raise errors about names of other training systems, with the replacement in eventloop.

The trainer, hooks and the registry use it; `eventloop.migration.tables` has the names.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

from eventloop.migration.tables import ARGUMENTS, ATTRIBUTES, CALLS, CLASSES, METHODS
from eventloop.util.suggest import suggest

P = ParamSpec("P")
T = TypeVar("T")


def argument_meant(classes: Iterable[str], name: str) -> str:
    """Return the replacement of an unknown argument, as the end of an error message.

    It is "" if no other system has an argument with this name.

    Args:
        classes: names of the class and its bases.
        name: the argument.
    """
    found = (f": use {ARGUMENTS[each][name]}" for each in classes if name in ARGUMENTS.get(each, {}))
    return next(found, "")


def knowing_others(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor raise a TypeError that says what to write for unknown and for nameless arguments."""
    parameters = inspect.signature(init).parameters
    known = [*parameters][1:]
    named = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    nameless = [name for name in known if name not in named]
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if unknown := [name for name in kwargs if name not in parameters]:
            hints = [f"{name!r}{argument_meant([owner], name) or suggest(name, known)}" for name in unknown]
            raise TypeError(f"{owner} has no argument " + "\n  nor ".join(hints))
        if named and len(args) - 1 > len(nameless):
            raise TypeError(
                f"{owner} takes without a name only {' and '.join(nameless) or 'no argument'}, got "
                f"{len(args) - 1} arguments: write the names of the others, such as {named[0]}=..."
            )
        init(*args, **kwargs)

    return checked


def knowing_calls(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise a TypeError that names the place where an unknown argument belongs."""
    parameters = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in parameters:
                meant = _call_meant(name, type(args[0]))
                owner = type(args[0]).__name__
                raise TypeError(f"{owner}.{method.__name__} has no argument {name!r}{meant}")
        return method(*args, **kwargs)

    return checked


def _call_meant(name: str, owner: type) -> str:
    if name in CALLS:
        return f": use {CALLS[name]}"
    arguments = [*inspect.signature(owner).parameters]
    if name in arguments:
        return f": it is an argument of {owner.__name__}(...)"
    return suggest(name, arguments)


class _ForeignAttribute:
    """An attribute of another system's trainer: reading it raises an AttributeError with the replacement."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        meant = ATTRIBUTES[self._name]
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: use {meant}")


def knowing_attributes(trainer: type[T]) -> type[T]:
    """Make attributes of other trainers raise an AttributeError that names ours; `hasattr` stays False.

    A `__getattr__` would make each look-up of the trainer's own attributes 30 ns slower, and would hide an
    AttributeError that a property raises.
    """
    for name in ATTRIBUTES:
        setattr(trainer, name, _ForeignAttribute(name))
    return trainer


def explain_absent(package: str, name: str) -> NoReturn:
    """Raise an error for a name that a package lacks; called by the `__getattr__` of a package.

    Raises:
        ImportError: another system has the name. In an import statement Python replaces the text of an
            AttributeError, and keeps that of an ImportError.
        AttributeError: no other system has the name.
    """
    if name in CLASSES:
        raise ImportError(f"cannot import name {name!r} from {package!r}: use {CLASSES[name]}", name=package)
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)


_WHEN = {"start": "before", "begin": "before", "end": "after"}
_WHAT = {"batch": "iter", "step": "iter", "validation": "val", "fit": "run"}


def point_meant(method: str) -> str:
    """Translate a callback method of Lightning or Transformers, or an event of ignite, to our event's name.

    `on_train_batch_end` becomes `after_train_iter`. The event need not exist. A name of another form gives
    "".
    """
    if method in METHODS:
        return METHODS[method]
    if found := re.fullmatch(r"on_((?:before|after)_\w+)", method):
        return found[1]
    if found := re.fullmatch(r"on_(\w+)_(start|begin|end)", method):
        return "_".join([_WHEN[found[2]], *(_WHAT.get(word, word) for word in found[1].split("_"))])
    return ""
