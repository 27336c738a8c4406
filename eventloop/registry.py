"""Hooks and writers by name: `dict(type="EMAHook", ...)` in a config, `@HOOKS.register` for your own.

    @HOOKS.register
    class MyHook(Hook): ...

    Trainer(..., hooks=[dict(type="MyHook", priority="LOW")])

A name is looked for among what was registered, then among eventloop's own, then in the entry points of installed
packages (groups `eventloop.hooks` and `eventloop.writers`). The modules that hold eventloop's own are imported when
a name is first looked up, so the core depends on none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, overload

from eventloop.bus.subscription import check_budget
from eventloop.migration.names import CLASSES, argument_meant
from eventloop.util.checks import check_bools
from eventloop.util.suggest import near, suggest

C = TypeVar("C", bound=type)

_ATTRIBUTES = ("priority", "name", "budget_us")


class Registry:
    """Classes of one kind by name.

    Args:
        kind: what messages call them.
        package: where eventloop's own are; also the group of the entry points.
        base: the class there that eventloop's own are derived from, where there are others beside them.
    """

    def __init__(self, kind: str, package: str, base: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._base = base
        self._classes: dict[str, type] = {}

    @overload
    def register(self, cls: C) -> C: ...

    @overload
    def register(self, cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...

    def register(self, cls: Any = None, *, name: str | None = None) -> Any:
        """Make a class known under its name, or another: `@HOOKS.register` or `@HOOKS.register(name="Mine")`.
        A class defined anew in the same module replaces itself.

        Raises:
            TypeError: not a class.
            ValueError: another module registered that name, or eventloop has it.
        """
        if cls is None:
            return lambda cls: self._add(cls, name)
        return self._add(cls, name)

    def register_module(
        self, name: str | Sequence[str] | type | None = None, force: bool = False, module: type | None = None
    ) -> Any:
        """`register` as MMEngine and mmcv write it: `@HOOKS.register_module()`, or `HOOKS.register_module(module=Mine)`.

        Args:
            name: what configs call the class; several names in a list; by default its own.
            force: let it take the place of another class of that name.
            module: the class, where this is not written over it.

        Raises:
            TypeError: not a class, or a name that is no str.
            ValueError: the name is taken, and `force` is not given.
        """
        check_bools(force=force)
        if isinstance(name, type):  # mmcv's decorator without parentheses
            name, module = None, name
        names: Sequence[Any] = name if isinstance(name, list | tuple) else [name]

        def add(cls: C) -> C:
            for each in names:
                self._add(cls, each, force)
            return cls

        return add if module is None else add(module)

    def build(self, config: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
        """Make an object of `dict(type=name or class, **arguments)`, as MMEngine and mmcv write it.

        Args:
            default_args: arguments that the config may lack.

        Raises:
            TypeError, ValueError: as `eventloop.registry.build`.
        """
        if isinstance(config, Mapping):
            config = {**(default_args or {}), **config}
            if isinstance(name := config.get("type"), str):
                config["type"] = self.find(name) or name
        return build(config, self)

    def find(self, name: str) -> type | None:
        """The class of a name, None where nobody has it.

        Raises:
            ImportError: a package's entry point cannot be loaded.
            TypeError: it is no class.
        """
        return self._classes.get(name) or self._own(name) or self._plugin(name)

    get = find
    """MMEngine's name."""

    def names(self) -> list[str]:
        """What can be built: what was registered, eventloop's own, and what installed packages have. Of eventloop's own
        neither the base nor what is beside them: a hook's helpers, which `find` knows if they are classes."""
        module = importlib.import_module(self._package)
        base: type = object if self._base is None else getattr(module, self._base)
        own = [name for name in module.__all__ if _is_derived(getattr(module, name), base)]
        return [*dict.fromkeys([*self._classes, *own, *(point.name for point in self._points())])]

    def forget(self, name: str) -> None:
        """Take back a registration; a name that has none is left alone."""
        self._classes.pop(name, None)

    def _add(self, cls: C, name: str | None, force: bool = False) -> C:
        if not isinstance(cls, type):
            raise TypeError(f"@register goes on a class, got {cls!r}")
        name = cls.__name__ if name is None else name
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} must be a str, got {name!r}")
        known = None if force else self._classes.get(name) or self._own(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{name!r} is registered already, by {known.__module__}: choose another name")
        self._classes[name] = cls
        return cls

    def _own(self, name: str) -> type | None:
        module = importlib.import_module(self._package)
        found = getattr(module, name) if name in module.__all__ else None
        return found if isinstance(found, type) else None

    def _points(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self._package))

    def _plugin(self, name: str) -> type | None:
        points = [point for point in self._points() if point.name == name]
        if not points:
            return None
        if len({point.value for point in points}) > 1:
            raise ValueError(
                f"several packages have a {self.kind} {name!r}: {', '.join(p.value for p in points)}; give the class"
            )
        try:
            loaded = points[0].load()
        except Exception as error:
            raise ImportError(
                f"the {self.kind} {name!r} of an installed package cannot be loaded from {points[0].value!r}: {error}"
            ) from error
        if not isinstance(loaded, type):
            raise TypeError(f"the entry point {points[0].value!r} must name a class, got {loaded!r}")
        return loaded


HOOKS = Registry("hook", "eventloop.hooks", "Hook")
WRITERS = Registry("writer", "eventloop.writers", "Writer")


def register(cls: C) -> C:
    """Make a hook or a writer known under its name; a class that can `write` is a writer.

    Raises:
        TypeError: not a class.
        ValueError: another module registered that name, or eventloop has it.
    """
    return (WRITERS if hasattr(cls, "write") else HOOKS).register(cls)


def find_class(name: str, among: Registry | None = None) -> type:
    """The hook or writer of a name.

    Args:
        among: the kind that is wanted, whose names are told where nothing is near.

    Raises:
        ValueError: there is none (with a suggestion).
    """
    found = HOOKS.find(name) or WRITERS.find(name)
    if found is None:
        if name in CLASSES:
            raise ValueError(f"unknown type {name!r}: what it does elsewhere is here {CLASSES[name]}")
        both = HOOKS.names() + WRITERS.names()
        hint = near(name, both) or suggest(name, both if among is None else among.names())
        raise ValueError(f"unknown type {name!r}{hint}; @register makes your own known")
    return found


def build(config: Mapping[str, Any], among: Registry | None = None, /, **also: Any) -> Any:
    """Make an object from `dict(type=name or class, **arguments)`; a hook's `priority`, and a hook's or writer's `name`
    and `budget_us`, where its constructor does not take them, are set on the object. `among` is the kind that is wanted, see
    `find_class`.

    Raises:
        TypeError: the config is no mapping with a `type` that is a class or a name, an argument is missing, or
            `budget_us` is no number.
        ValueError: an unknown type or argument (with a suggestion), or `budget_us` is not above 0.
    """
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(f"expected an object or a config dict(type=...), got {config!r}")
    arguments = {**config, **also}
    kind = arguments.pop("type")
    cls = find_class(kind, among) if isinstance(kind, str) else kind
    if not isinstance(cls, type):
        raise TypeError(f"type must be a class or its name, got {kind!r}")
    parameters = inspect.signature(cls).parameters
    attributes = [key for key in _ATTRIBUTES if key not in parameters and hasattr(cls, key)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in arguments:
        if key not in parameters and key not in attributes and not takes_any:
            meant = argument_meant((base.__name__ for base in cls.__mro__), key)
            raise ValueError(
                f"{cls.__name__} has no argument {key!r}{meant or suggest(key, [*parameters, *attributes])}"
            )
    to_set = {key: arguments.pop(key) for key in attributes if key in arguments}
    if to_set.get("budget_us") is not None:  # here: a writer of another rank than the first is never attached
        check_budget(cls.__name__, to_set["budget_us"])
    built = cls(**arguments)
    for key, value in to_set.items():
        setattr(built, key, value)
    return built


def _is_derived(thing: object, base: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, base) and thing is not base
