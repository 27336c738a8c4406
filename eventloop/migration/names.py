"""Raise errors about names of other training systems, with the replacement in eventloop.

The trainer, hooks and the registry use it; `eventloop.migration.tables` has the names.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import NoReturn, ParamSpec, TypeVar

from eventloop.migration.tables import (
    ARGUMENTS,
    ATTRIBUTES,
    CALLS,
    CLASSES,
    METHODS,
    PLACES,
    RENAMED,
    STORAGE,
    SWITCHES,
)
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


def knowing_others(function: Callable[P, T]) -> Callable[P, T]:
    """Make a constructor or method raise a TypeError that says what to write for a wrong argument.

    The argument is unknown, is missing, or needs a name.
    """
    # not those of a function that it wraps, which a user's wrapper may call with other arguments
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    any_number = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters.values())
    kinds = {name: parameter.kind for name, parameter in [*parameters.items()][1:]}
    named = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    any_name = Parameter.VAR_KEYWORD in kinds.values()
    various = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    known = [name for name, kind in kinds.items() if kind not in various]
    nameless = [name for name in known if name not in named]
    needed = [name for name in known if parameters[name].default is Parameter.empty]
    owner = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any_name and (unknown := [name for name in kwargs if name not in known]):
            hints = [f"{name!r}{argument_meant([owner], name) or suggest(name, known)}" for name in unknown]
            raise TypeError(f"{owner} has no argument " + "\n  nor ".join(hints))
        if named and not any_number and len(args) - 1 > len(nameless):
            takes = f"only {' and '.join(nameless)}" if nameless else "no argument"
            raise TypeError(
                f"{owner} takes without a name {takes}, got {len(args) - 1} arguments: write the names of "
                f"the others, such as {named[0]}=..."
            )
        if not any_number and len(args) - 1 > len(nameless):
            others = "".join(f"\n  {name}: use {meant}" for name, meant in ARGUMENTS.get(owner, {}).items())
            takes = (
                f"at most {len(nameless)} arguments ({', '.join(nameless)})" if nameless else "no argument"
            )
            raise TypeError(
                f"{owner} takes {takes}, got {len(args) - 1}{': of other systems' * bool(others)}{others}"
            )
        given = [*nameless[: len(args) - 1], *kwargs]
        missing = [_described(parameters[name]) for name in needed if name not in given]
        if missing and not any_name:
            got = f"only {', '.join(map(str, given))}" if given else "no argument"
            raise TypeError(f"{owner} needs {' and '.join(missing)}, got {got}")
        return function(*args, **kwargs)

    return checked


def _described(parameter: Parameter) -> str:
    """Return the name of a parameter with its type, such as "model (torch.nn.Module)"."""
    kind = parameter.annotation
    if kind is Parameter.empty:
        return parameter.name
    return f"{parameter.name} ({kind if isinstance(kind, str) else inspect.formatannotation(kind)})"


def knowing_calls(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of the trainer raise a TypeError that names the place where a wrong argument belongs."""
    parameters = inspect.signature(method).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    nameless = len(parameters) - len(named) - 1
    place = PLACES.get(method.__name__)

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        owner = type(args[0]).__name__
        for name in kwargs:
            if name not in parameters:
                meant = f": {place}" if place else _call_meant(name, type(args[0]))
                raise TypeError(f"{owner}.{method.__name__} has no argument {name!r}{meant}")
        if len(args) - 1 > nameless:
            got = ", ".join(type(value).__name__ for value in args[1:])
            others = (
                place or f"loaders and lengths are arguments of {owner}(train_loader=..., max_epochs=...)"
            )
            raise TypeError(
                f"{owner}.{method.__name__} takes {nameless or 'no'} argument without a name, got {got}: "
                + (f"write the name of the other, {named[0]}=..." if named else others)
            )
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
    """Another name of an attribute: reading it raises an AttributeError with the name to use."""

    def __init__(self, name: str, meant: str) -> None:
        self._name, self._meant = name, meant

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: use {self._meant}")


class _ForeignSwitch(_ForeignAttribute):
    """Such a name that steers another system's run by being set: setting it raises the error, too."""

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance, type(instance))  # it would be a new attribute, which nothing reads


def knowing_attributes(trainer: type[T]) -> type[T]:
    """Make attributes of other trainers raise an AttributeError that names ours; `hasattr` stays False.

    A `__getattr__` would make each look-up of the trainer's own attributes 30 ns slower, and would hide an
    AttributeError that a property raises.
    """
    return _with_foreign(trainer, ATTRIBUTES)


def knowing_storages(storage: type[T]) -> type[T]:
    """Make attributes of other storages raise an AttributeError that names ours; `hasattr` stays False."""
    return _with_foreign(storage, STORAGE)


def knowing_renamed(cls: type[T]) -> type[T]:
    """Make former names of a class's attributes raise an AttributeError with the new name."""
    return _with_foreign(cls, RENAMED[cls.__name__])


def _with_foreign(cls: type[T], names: Mapping[str, str]) -> type[T]:
    for name, meant in names.items():
        setattr(cls, name, (_ForeignSwitch if name in SWITCHES else _ForeignAttribute)(name, meant))
    return cls


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
