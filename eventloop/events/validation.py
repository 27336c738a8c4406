"""Refuse event classes with fields of live objects: tensors, arrays and modules.

`Event` calls it for each subclass. Types are recognized by module and name, so that this module imports
neither torch nor numpy.
"""

from __future__ import annotations

import builtins
import collections.abc
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, ForwardRef, Literal, get_args, get_origin

_ARRAY = (
    "give it a number (x.item()), a list (x.tolist()), or bytes with their shape and dtype, "
    "as in image_logged"
)
_MODULE = "give it a name; a sync handler finds the module itself in trainer.model"
_LIVE = {
    ("torch", "Tensor"): _ARRAY,
    ("numpy", "ndarray"): _ARRAY,
    ("torch.nn.modules.module", "Module"): _MODULE,
}
"""The classes of live objects by module and name, each with advice; subclasses count, too."""
_NO_VALUES = (ClassVar, Literal, type, collections.abc.Callable)
"""Annotations whose arguments in brackets are not the types of field values."""


def refuse_live_fields(cls: type) -> None:
    """Check the fields that an event class itself declares; accept annotations that cannot be resolved."""
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        for named in _types_in(annotation, cls.__module__):
            for base in getattr(named, "__mro__", ()):
                if (what_to_do := _LIVE.get((base.__module__, base.__qualname__))) is not None:
                    raise TypeError(
                        f"field {name!r} of event {cls.__module__}.{cls.__qualname__} is a "
                        f"{_called(named)}, and an event holds plain, unchanging values, which can cross a "
                        f"thread, a process and a file: {what_to_do}"
                    )


def _types_in(annotation: Any, module: str) -> Iterator[Any]:
    """Yield the classes in an annotation, including those within Optional, lists and the like."""
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
    """Evaluate an annotation given as a text; return None if that fails."""
    try:
        return eval(annotation, {}, _Names(module))
    except Exception:
        return None


class _Names(dict[str, Any]):
    """The names of a module. Names imported only for type checkers resolve to already imported modules."""

    def __init__(self, module: str) -> None:
        super().__init__({**vars(builtins), **vars(sys.modules.get(module, builtins))})

    def __missing__(self, name: str) -> Any:
        return sys.modules.get(name, Any)


def _called(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
