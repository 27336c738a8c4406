"""Hooks and writers by name: `dict(type="EMAHook", ...)` in a config, `@register` for your own.

The modules that hold eventloop's own are imported when a name is first looked up, so the core depends on none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from eventloop.catalogue import suggest

C = TypeVar("C", bound=type)

_LOCATIONS = ("eventloop.hooks", "eventloop.writers")
_ATTRIBUTES = ("priority", "name")
_classes: dict[str, type] = {}


def register(cls: C) -> C:
    """Make a class known under its name; a class defined anew in the same module replaces itself.

    Raises:
        TypeError: not a class.
        ValueError: another module registered that name, or eventloop has it.
    """
    if not isinstance(cls, type):
        raise TypeError(f"@register goes on a class, got {cls!r}")
    known = _classes.get(cls.__name__) or _own(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise ValueError(
            f"{cls.__name__!r} is registered already, by {known.__module__}: choose another name"
        )
    _classes[cls.__name__] = cls
    return cls


def find_class(name: str) -> type:
    """The class of a name.

    Raises:
        ValueError: nothing is registered under it (with a suggestion).
    """
    found = _classes.get(name) or _own(name)
    if found is None:
        known = [*_classes]
        for location in _LOCATIONS:
            known += importlib.import_module(location).__all__
        raise ValueError(f"unknown type {name!r}{suggest(name, known)}; @register makes your own known")
    return found


def build(config: Mapping[str, Any], **also: Any) -> Any:
    """Make an object from `dict(type=name or class, **arguments)`; a hook's or writer's `priority` and `name`, where
    its constructor does not take them, are set on the object.

    Raises:
        TypeError: the config is no mapping with a `type` that is a class or a name, or an argument is missing.
        ValueError: an unknown type or argument (with a suggestion).
    """
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(f"expected an object or a config dict(type=...), got {config!r}")
    arguments = {**config, **also}
    kind = arguments.pop("type")
    cls = find_class(kind) if isinstance(kind, str) else kind
    if not isinstance(cls, type):
        raise TypeError(f"type must be a class or its name, got {kind!r}")
    parameters = inspect.signature(cls).parameters
    attributes = [key for key in _ATTRIBUTES if key not in parameters and hasattr(cls, key)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in arguments:
        if key not in parameters and key not in attributes and not takes_any:
            raise ValueError(
                f"{cls.__name__} has no argument {key!r}{suggest(key, [*parameters, *attributes])}"
            )
    to_set = {key: arguments.pop(key) for key in attributes if key in arguments}
    built = cls(**arguments)
    for key, value in to_set.items():
        setattr(built, key, value)
    return built


def _own(name: str) -> type | None:
    for location in _LOCATIONS:
        module = importlib.import_module(location)
        if name in module.__all__:
            found: type = getattr(module, name)
            return found
    return None
