"""What a worker process is to call: a function and its callbacks, as bytes that name what the worker imports.

    data = pack(fn, on_flush, on_close)      # here, when it is subscribed: refused unless a worker can import it
    fn, on_flush, on_close = unpack(data)    # there

They are pickled together, so that three methods of one object are three methods of one object there, too.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eventloop.util.functions import handler_name

Callback = Callable[[], object] | None


@runtime_checkable
class Remade(Protocol):
    """An object whose methods may be handlers in a process although it does not pickle: it is made anew there."""

    def worker_recipe(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """What to call in the worker, and with which arguments, for an object like this one; both must pickle."""

    def worker_facts(self) -> object:
        """What the new object is told before its first event; asked for when there is one, and pickled."""

    def begin_in_worker(self, facts: Any, *, restarts: int, first: Any) -> None:
        """Called there, on the new object. `restarts` says how many workers died before, `first` is the event that
        is about to be delivered."""


class Target(NamedTuple):
    """What the worker calls."""

    fn: Callable[..., object]
    on_flush: Callback
    on_close: Callback


def pack(fn: Callable[..., object], on_flush: Callback = None, on_close: Callback = None) -> bytes:
    """The bytes of a handler.

    Raises:
        TypeError: a worker could not import it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((fn, on_flush, on_close))
    except Exception as error:  # a `__reduce__` may raise anything
        owner = owner_of(fn)
        name = handler_name(fn) if owner is None else type(owner).__name__  # of a writer: its method is ours
        raise TypeError(
            f"{name} cannot be sent to a worker process: {error}. A worker imports what it calls and "
            "knows nothing else of this process: pass a function of a module, or a writer whose class is in a "
            "module and whose arguments pickle; or use offload='thread'"
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Target:
    """The handler again, in the worker. What importing it raises, this raises."""
    return Target(*pickle.loads(data))


def owner_of(fn: Callable[..., object]) -> Remade | None:
    """The object that `fn` is a method of, where it has something to say to its worker."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, Remade) else None


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            reason = why_not_importable(obj)
            if reason:
                raise pickle.PicklingError(reason)
        elif isinstance(obj, Remade):
            return obj.worker_recipe()
        return NotImplemented


def why_not_importable(thing: Any) -> str:
    """Why another process cannot import a function or a class by its name; nothing if it can."""
    module, name = thing.__module__, thing.__qualname__
    if module == "builtins":
        return ""
    if module == "__main__":
        return f"{name} is defined in __main__, the program itself, which a worker does not run again"
    if "<lambda>" in name:
        return f"{name} is a lambda, which has no name to import it by"
    if "<locals>" in name:
        return f"{name} is defined inside a function, where nobody can import it"
    if not _can_be_found(module):
        return f"{name} is defined in {module}, which no import finds"
    try:
        found = find(module, name)
    except (ImportError, AttributeError):
        return f"{module} has no {name}"
    return "" if found is thing else f"{module}.{name} is another object by now"


def find(module: str, name: str) -> Any:
    """The object of a qualified name in a module, which is imported if need be."""
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _can_be_found(module: str) -> bool:
    """Look where an import would: a module may have been made by hand, and only be known to this process."""
    package, _, _ = module.rpartition(".")
    if package and (package not in sys.modules or not _can_be_found(package)):
        return False
    path = sys.modules[package].__path__ if package else None
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find_spec(module, path) is not None for find_spec in finders if find_spec is not None)
