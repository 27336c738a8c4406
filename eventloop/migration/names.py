"""Raise errors for names of other training systems that name the replacement in eventloop.

The trainer, hooks and the registry use it. `eventloop.migration.tables` has the names.
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
    """Return the replacement of an unknown argument, as the end of an error message; "" without any.

    Args:
        classes: the names of the class and its bases.
        name: the name of the argument.
    """
    for class_name in classes:
        if name in ARGUMENTS.get(class_name, {}):
            return f": use {ARGUMENTS[class_name][name]}"
    return ""


def knowing_others(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a constructor or method to raise a TypeError with the remedy for a wrong argument.

    An argument is wrong if it is unknown or missing, or if it is given without a name and needs one.
    """
    signature = _Signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Refuse wrong, surplus or missing arguments, then call the function."""
        signature.check_names(kwargs)
        signature.check_count(len(args) - 1)
        signature.check_complete(len(args) - 1, kwargs)
        return function(*args, **kwargs)

    return checked


class _Signature:
    """Check the arguments of calls of a constructor or method against its parameters without `self`."""

    def __init__(self, function: Callable[..., object]) -> None:
        # of a wrapper: the function that it wraps may have other parameters than the wrapper itself
        self._parameters = inspect.signature(function, follow_wrapped=False).parameters
        _, *parameters = self._parameters.values()
        kinds = {parameter.kind for parameter in self._parameters.values()}
        self._takes_any_number = Parameter.VAR_POSITIONAL in kinds
        self._takes_any_name = Parameter.VAR_KEYWORD in kinds
        variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        known = [parameter for parameter in parameters if parameter.kind not in variadic]
        self._known = [parameter.name for parameter in known]
        self._keyword_only = [p.name for p in known if p.kind is Parameter.KEYWORD_ONLY]
        self._positional = [name for name in self._known if name not in self._keyword_only]
        self._required = [p.name for p in known if p.default is Parameter.empty]
        self._owner = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")

    def check_names(self, names: Iterable[str]) -> None:
        """Raise TypeError for names that no parameter has."""
        unknown = [name for name in names if name not in self._known]
        if unknown and not self._takes_any_name:
            hints = [
                f"{name!r}{argument_meant([self._owner], name) or suggest(name, self._known)}"
                for name in unknown
            ]
            raise TypeError(f"{self._owner} has no argument " + "\n  nor ".join(hints))

    def check_count(self, count: int) -> None:
        """Raise TypeError for too many arguments without a name."""
        owner, positional = self._owner, self._positional
        if self._takes_any_number or count <= len(positional):
            return
        if self._keyword_only:
            takes = f"only {' and '.join(positional)}" if positional else "no argument"
            raise TypeError(
                f"{owner} takes without a name {takes}, got {count} arguments: write the names of "
                f"the others, such as {self._keyword_only[0]}=..."
            )
        takes = "no argument"
        if positional:
            takes = f"at most {len(positional)} arguments ({', '.join(positional)})"
        others = "".join(f"\n  {name}: use {meant}" for name, meant in ARGUMENTS.get(owner, {}).items())
        raise TypeError(f"{owner} takes {takes}, got {count}{': of other systems' * bool(others)}{others}")

    def check_complete(self, count: int, names: Iterable[str]) -> None:
        """Raise TypeError for required parameters that `count` arguments and these names do not give."""
        given = [*self._positional[:count], *names]
        missing = [_described(self._parameters[name]) for name in self._required if name not in given]
        if missing and not self._takes_any_name:
            got = f"only {', '.join(map(str, given))}" if given else "no argument"
            raise TypeError(f"{self._owner} needs {' and '.join(missing)}, got {got}")


def _described(parameter: Parameter) -> str:
    """Return the name of a parameter with its type, such as "model (torch.nn.Module)"."""
    kind = parameter.annotation
    if kind is Parameter.empty:
        return parameter.name
    return f"{parameter.name} ({kind if isinstance(kind, str) else inspect.formatannotation(kind)})"


def knowing_calls(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of the trainer to raise a TypeError with the remedy for a wrong argument."""
    parameters = inspect.signature(method).parameters
    keyword_only = [
        name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY
    ]
    positional = len(parameters) - len(keyword_only) - 1
    hint = PLACES.get(method.__name__)

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Refuse arguments with wrong names, or too many, then call the method."""
        owner = type(args[0]).__name__
        for name in kwargs:
            if name not in parameters:
                meant = f": {hint}" if hint else _call_meant(name, type(args[0]))
                raise TypeError(f"{owner}.{method.__name__} has no argument {name!r}{meant}")
        if len(args) - 1 > positional:
            got = ", ".join(type(value).__name__ for value in args[1:])
            remedy = hint or f"loaders and lengths are arguments of {owner}(train_loader=..., max_epochs=...)"
            if keyword_only:
                remedy = f"write the name of the other, {keyword_only[0]}=..."
            raise TypeError(
                f"{owner}.{method.__name__} takes {positional or 'no'} argument without a name, got {got}: "
                f"{remedy}"
            )
        return method(*args, **kwargs)

    return checked


def _call_meant(name: str, owner: type) -> str:
    """Return the remedy for an unknown argument of a method, as the end of an error message, or "".

    Args:
        name: the name of the argument.
        owner: the class of the trainer, whose constructor may have such an argument.
    """
    if name in CALLS:
        return f": use {CALLS[name]}"
    arguments = [*inspect.signature(owner).parameters]
    if name in arguments:
        return f": it is an argument of {owner.__name__}(...)"
    return suggest(name, arguments)


class _ForeignAttribute:
    """Raise an AttributeError with the right name when another system's name of an attribute is read."""

    def __init__(self, name: str, meant: str) -> None:
        self._name, self._meant = name, meant

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: use {self._meant}")


class _ForeignSwitch(_ForeignAttribute):
    """Raise the error also when the attribute is set, because setting it controls another system's run."""

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance, type(instance))  # otherwise it would become an attribute that nothing reads


def knowing_attributes(trainer: type[T]) -> type[T]:
    """Decorate the trainer to raise an AttributeError with our name for an attribute of other trainers.

    `hasattr` stays False for them. A `__getattr__` would make each look-up of the trainer's own attributes
    30 ns slower, and would hide an AttributeError that a property raises.
    """
    return _with_foreign(trainer, ATTRIBUTES)


def knowing_storages(storage: type[T]) -> type[T]:
    """Decorate the metrics storage to raise an AttributeError with our name for another system's name."""
    return _with_foreign(storage, STORAGE)


def knowing_renamed(cls: type[T]) -> type[T]:
    """Decorate a class to raise an AttributeError with the new name for a former name of an attribute."""
    return _with_foreign(cls, RENAMED[cls.__name__])


def _with_foreign(cls: type[T], names: Mapping[str, str]) -> type[T]:
    """Give a class attributes that raise an error, by their names and the replacements; return the class."""
    for name, meant in names.items():
        setattr(cls, name, (_ForeignSwitch if name in SWITCHES else _ForeignAttribute)(name, meant))
    return cls


def explain_absent(package: str, name: str) -> NoReturn:
    """Raise the error of a package's `__getattr__` for a name that the package does not have.

    Raises:
        ImportError: a class of another system has the name; the text has the replacement. It is not an
            AttributeError, because Python replaces the text of that in an import statement.
        AttributeError: the name is unknown.
    """
    if name in CLASSES:
        raise ImportError(f"cannot import name {name!r} from {package!r}: use {CLASSES[name]}", name=package)
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)


_WHEN = {"start": "before", "begin": "before", "end": "after"}
"""The first word of our events' names, by the last word of a callback method's name."""
_WHAT = {"batch": "iter", "step": "iter", "validation": "val", "fit": "run"}
"""Our words in such names, by the words of other systems."""


def point_meant(method: str) -> str:
    """Translate the name of a callback method or an ignite event to the name of our event, or to "".

    For example, `on_train_batch_end` of Lightning becomes `after_train_iter`. The result is formed by rules,
    so there may be no such event.
    """
    if method in METHODS:
        return METHODS[method]
    if match := re.fullmatch(r"on_((?:before|after)_\w+)", method):
        return match[1]
    if match := re.fullmatch(r"on_(\w+)_(start|begin|end)", method):
        return "_".join([_WHEN[match[2]], *(_WHAT.get(word, word) for word in match[1].split("_"))])
    return ""
