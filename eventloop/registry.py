"""Find hooks and writers by name, and build them from configs such as `dict(type="EMAHook", ...)`.

    @HOOKS.register
    class MyHook(Hook): ...

    Trainer(..., hooks=[dict(type="MyHook", priority="LOW")])

A name is looked up among registered classes, then among eventloop's classes, then in the entry points of
installed packages (groups `eventloop.hooks` and `eventloop.writers`). The modules of eventloop's hooks and
writers are imported at the first lookup, so that the core depends on none of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, overload

from eventloop.bus.subscription import check_budget
from eventloop.migration.names import argument_meant
from eventloop.migration.tables import CLASSES
from eventloop.util.checks import check_bools
from eventloop.util.suggest import near, suggest

C = TypeVar("C", bound=type)

_ATTRIBUTES = ("priority", "name", "budget_us")


class Registry:
    """The classes of one kind, hooks or writers, by name.

    Args:
        kind: "hook" or "writer", for messages.
        package: the package with the classes that come with eventloop; its name is also the group of the
            entry points.
        base: the name of the base class in `package`; classes there that do not derive from it are helpers.
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
        """Register a class: `@HOOKS.register`, or `@HOOKS.register(name="Mine")` for another name.

        A class that is defined again in the same module replaces itself.

        Raises:
            TypeError: not a class.
            ValueError: another module registered that name, or eventloop has a class of that name.
        """
        if cls is None:
            return lambda cls: self._add(cls, name)
        return self._add(cls, name)

    def register_module(
        self, name: str | Sequence[str] | type | None = None, force: bool = False, module: type | None = None
    ) -> Any:
        """Register a class as in MMEngine and mmcv.

        Both `@HOOKS.register_module()` and `HOOKS.register_module(module=Mine)` work.

        Args:
            name: the name of the class in configs, or a list of names; by default the class's own name.
            force: whether to replace another class of that name.
            module: the class, if this method is not used as a decorator.

        Raises:
            TypeError: `module` is not a class, or a name is not a str.
            ValueError: the name is taken, and `force` is False.
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
        """Build an object from `dict(type=name or class, **arguments)`, as in MMEngine and mmcv.

        Args:
            config: the dict.
            default_args: default values of arguments that the config lacks.

        Raises:
            TypeError: the config is not a mapping with a `type`, or an argument is missing.
            ValueError: the type or an argument is unknown; the message suggests the nearest one.
        """
        if isinstance(config, Mapping):
            config = {**(default_args or {}), **config}
            if isinstance(name := config.get("type"), str):
                config["type"] = self.find(name) or name
        return build(config, self)

    def find(self, name: str) -> type | None:
        """Return the class with a name, or None.

        Raises:
            ImportError: the entry point of a package cannot be loaded.
            TypeError: the entry point is not a class.
        """
        return self.known(name) or self._plugin(name)

    get = find
    """The name of `find` in MMEngine."""

    def holds(self, name: str, part: object) -> bool:
        """Return whether an object is of the class with a name, without importing that class.

        The class of an object that exists is imported already.
        """
        if (registered := self._classes.get(name)) is not None:
            return isinstance(part, registered)
        package = f"{self._package}."
        return any(
            base.__name__ == name and base.__module__.startswith(package) for base in type(part).__mro__
        )

    def known(self, name: str) -> type | None:
        """Return the class of a name that is registered or eventloop's own; search no installed packages."""
        return self._classes.get(name) or self._own(name)

    def names(self) -> list[str]:
        """Return the names that a config may use: those registered, eventloop's, and installed packages'.

        The base class and helper classes of eventloop are left out, although `find` finds them.
        """
        module = importlib.import_module(self._package)
        base: type = object if self._base is None else getattr(module, self._base)
        own = [name for name in module.__all__ if _is_derived(getattr(module, name), base)]
        return [*dict.fromkeys([*self._classes, *own, *(point.name for point in self._points())])]

    def forget(self, name: str) -> None:
        """Remove the registration of a name, if there is one."""
        self._classes.pop(name, None)

    def _add(self, cls: C, name: str | None, force: bool = False) -> C:
        """Register a class under a name; a module that is imported again may replace its own class."""
        if not isinstance(cls, type):
            raise TypeError(f"@register decorates a class, got {cls!r}")
        name = cls.__name__ if name is None else name
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} must be a str, got {name!r}")
        known = None if force else self.known(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{name!r} is already registered by {known.__module__}: choose another name")
        self._classes[name] = cls
        return cls

    def _own(self, name: str) -> type | None:
        module = importlib.import_module(self._package)
        found = getattr(module, name) if name in module.__all__ else None
        return found if isinstance(found, type) else None

    def _points(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self._package))

    def _plugin(self, name: str) -> type | None:
        """Load the class of this name that an installed package offers; return None without any."""
        points = [point for point in self._points() if point.name == name]
        if not points:
            return None
        if len({point.value for point in points}) > 1:
            raise ValueError(
                f"several packages have a {self.kind} {name!r}: {', '.join(p.value for p in points)}; pass "
                "the class itself"
            )
        try:
            loaded = points[0].load()
        except Exception as error:
            raise ImportError(
                f"the {self.kind} {name!r} of an installed package cannot be loaded from "
                f"{points[0].value!r}: {error}"
            ) from error
        if not isinstance(loaded, type):
            raise TypeError(f"the entry point {points[0].value!r} must name a class, got {loaded!r}")
        return loaded


HOOKS = Registry("hook", "eventloop.hooks", "Hook")
WRITERS = Registry("writer", "eventloop.writers", "Writer")


def register(cls: C) -> C:
    """Register a hook or a writer under the name of its class; a class with a method `write` is a writer.

    Raises:
        TypeError: `cls` is not a class.
        ValueError: another module registered that name, or eventloop has a class of that name.
    """
    return (WRITERS if hasattr(cls, "write") else HOOKS).register(cls)


def find_class(name: str, among: Registry | None = None) -> type:
    """Return the hook or writer class with a name.

    Args:
        among: the registry whose names the error lists if no known name is near; None for both.

    Raises:
        ValueError: the name is unknown; the message suggests the nearest one.
    """
    # installed packages come last: to read what they declare takes 10 ms or more
    found = HOOKS.known(name) or WRITERS.known(name) or HOOKS.find(name) or WRITERS.find(name)
    if found is None:
        if name in CLASSES:
            raise ValueError(f"unknown type {name!r}: use {CLASSES[name]}")
        both = HOOKS.names() + WRITERS.names()
        hint = near(name, both) or suggest(name, both if among is None else among.names())
        raise ValueError(f"unknown type {name!r}{hint}; @register adds a class of your own")
    return found


def build(config: Mapping[str, Any], among: Registry | None = None, /, **also: Any) -> Any:
    """Build an object from `dict(type=name or class, **arguments)`.

    If the constructor does not take `priority`, `name` or `budget_us`, they are set on the object as
    attributes.

    Args:
        config: the dict.
        among: the registry whose names an error lists, as in `find_class`.
        also: further arguments of the constructor, which replace those of the config.

    Raises:
        TypeError: the config is not a mapping with a `type` that is a class or a name, an argument is
            missing, or `budget_us` is not a number.
        ValueError: the type or an argument is unknown, which the message corrects with a suggestion, or
            `budget_us` is not above 0.
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
    positional = _pop_positional(arguments, parameters)
    # checked here, because on other ranks than the first a writer is never attached
    if to_set.get("budget_us") is not None:
        check_budget(cls.__name__, to_set["budget_us"])
    try:
        built = cls(*positional, **arguments)
    except (
        TypeError,
        ValueError,
    ) as error:  # an option's error names the option; no line of code shows the class
        if len(error.args) == 1 and cls.__name__ not in str(error):
            error.args = (f"{cls.__name__}: {error}",)
        raise
    for key, value in to_set.items():
        setattr(built, key, value)
    return built


def _pop_positional(arguments: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> list[Any]:
    """Remove the values of a parameter such as `*urls`, which a config gives as a list, and return them."""
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and name in arguments:
            given = arguments.pop(name)
            return [*given] if isinstance(given, list | tuple) else [given]
    return []


def _is_derived(thing: object, base: type) -> bool:
    derived = isinstance(thing, type) and issubclass(thing, base) and thing is not base
    return derived and not inspect.isabstract(thing)
