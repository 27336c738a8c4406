"""Refuse event classes with fields for live objects: tensors, arrays and modules.

`Event` calls `refuse_live_fields` for each subclass. The types are recognized by their module and name, so
that neither torch nor numpy is imported.
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
"""The classes of live objects by module and name, each with advice. Their subclasses are refused as well."""
_NO_VALUES = (ClassVar, Literal, type, collections.abc.Callable)
"""Annotations whose arguments in brackets are not types of the field's value."""


def refuse_live_fields(cls: type) -> None:
    """Raise TypeError if a field of an event class is annotated with a type of live objects.

    Only the fields that the class itself declares are checked. Annotations that cannot be resolved pass.
    """
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        for field_type in _types_in(annotation, cls.__module__):
            for base in getattr(field_type, "__mro__", ()):
                if (advice := _LIVE.get((base.__module__, base.__qualname__))) is not None:
                    raise TypeError(
                        f"field {name!r} of event {cls.__module__}.{cls.__qualname__} is a "
                        f"{field_type.__module__}.{field_type.__qualname__}, and an event holds plain, "
                        f"unchanging values, which can cross a thread, a process and a file: {advice}"
                    )


def _types_in(annotation: Any, module: str) -> Iterator[Any]:
    """Yield the classes in an annotation, including those in brackets, as in `list[Tensor] | None`."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    for _ in range(2):  # twice, for an annotation in quotes below `from __future__ import annotations`
        if isinstance(annotation, str):
            annotation = _evaluated(annotation, module)
    origin = get_origin(annotation)
    if origin is None:
        yield annotation
    elif origin not in _NO_VALUES:
        yield origin
        arguments = get_args(annotation)
        if hasattr(annotation, "__metadata__"):  # `Annotated`, whose later arguments are no types
            arguments = arguments[:1]
        for argument in arguments:
            yield from _types_in(argument, module)


def _evaluated(annotation: str, module: str) -> Any:
    """Evaluate an annotation given as a text; return None if that fails."""
    try:
        return eval(annotation, {}, _Names(module))
    except Exception:
        return None


class _Names(dict[str, Any]):
    """The names that a module's annotations may use, as a mapping for `eval`.

    A name that the module imports only for type checkers leads to the imported module of this name, or to
    Any.
    """

    def __init__(self, module: str) -> None:
        super().__init__({**vars(builtins), **vars(sys.modules.get(module, builtins))})

    def __missing__(self, name: str) -> Any:
        return sys.modules.get(name, Any)
