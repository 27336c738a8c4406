"""Fields that no event may have: those of live objects, which are refused where the class is declared.

A type is known by its module and name, so that none of these libraries is imported here.
"""

from __future__ import annotations

import builtins
import collections.abc
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, ForwardRef, Literal, get_args, get_origin

_ARRAY = "give it a number (x.item()), a list (x.tolist()), or bytes with their shape and dtype, as image_logged has"
_MODULE = "give it a name; a sync handler finds the module itself in trainer.model"
_LIVE = {
    ("torch", "Tensor"): _ARRAY,
    ("numpy", "ndarray"): _ARRAY,
    ("torch.nn.modules.module", "Module"): _MODULE,
}
"""Module and name of a class whose objects, and those of its subclasses, are live; and what to do."""
_NO_VALUES = (ClassVar, Literal, type, collections.abc.Callable)
"""What is between their brackets are no types of values that a field holds."""


def refuse_live_fields(cls: type) -> None:
    """Look at the fields that an event class declares itself. A name that cannot be found is passed over.

    Raises:
        TypeError: one of them is annotated with the type of live objects.
    """
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        for named in _types_in(annotation, cls.__module__):
            for base in getattr(named, "__mro__", ()):
                if (what_to_do := _LIVE.get((base.__module__, base.__qualname__))) is not None:
                    raise TypeError(
                        f"field {name!r} of event {cls.__module__}.{cls.__qualname__} is a {_called(named)}, and an "
                        "event holds plain values, which can cross a thread, a process and a file and which nobody "
                        f"changes: {what_to_do}"
                    )


def _types_in(annotation: Any, module: str) -> Iterator[Any]:
    """The classes that an annotation names, within Optional, lists and the like, too."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    for _ in range(2):  # a text in a text, where quotes were left behind the import
        if isinstance(annotation, str):
            annotation = _evaluated(annotation, module)
    origin = get_origin(annotation)
    if origin is None:
        yield annotation
    elif origin not in _NO_VALUES:
        yield origin
        arguments = get_args(annotation)
        for argument in arguments[:1] if hasattr(annotation, "__metadata__") else arguments:
            yield from _types_in(argument, module)


def _evaluated(annotation: str, module: str) -> Any:
    """What a text stands for, under `from __future__ import annotations`; nothing where it cannot be told
    here.
    """
    try:
        return eval(annotation, {}, _Names(module))
    except Exception:
        return None


class _Names(dict[str, Any]):
    """The names of a module; of those that only a type checker imports, the modules that somebody else has."""

    def __init__(self, module: str) -> None:
        super().__init__({**vars(builtins), **vars(sys.modules.get(module, builtins))})

    def __missing__(self, name: str) -> Any:
        return sys.modules.get(name, Any)


def _called(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
