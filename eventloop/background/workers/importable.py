"""Encode a handler and its callbacks for a worker process, which imports them.

    data = pack(fn, on_flush, on_close)      # in this process: TypeError unless a worker can import them
    fn, on_flush, on_close = unpack(data)    # in the worker

They are pickled together, so that methods of one object are methods of one object in the worker too.
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
    """An object, such as a writer, whose methods can be handlers in a worker although it does not pickle.

    The worker creates an equivalent object.
    """

    def worker_recipe(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return a function and arguments with which the worker creates the object; both must pickle."""

    def worker_facts(self) -> object:
        """Return facts about the run for the worker's object; called when the first event is sent.

        The facts must pickle.
        """

    def begin_in_worker(self, facts: Any, *, restarts: int, first: Any) -> None:
        """Receive the facts about the run; called in the worker before the first event.

        Args:
            facts: the result of `worker_facts` in the program's process.
            restarts: the number of earlier workers, which have died.
            first: the first event, which is delivered after this call.
        """


class Target(NamedTuple):
    """The functions that a worker calls."""

    fn: Callable[..., object]
    on_flush: Callback
    on_close: Callback


def pack(fn: Callable[..., object], on_flush: Callback = None, on_close: Callback = None) -> bytes:
    """Encode a handler and its callbacks as bytes.

    Raises:
        TypeError: a worker could not import one of them.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((fn, on_flush, on_close))
    except Exception as error:  # a `__reduce__` may raise anything
        owner = owner_of(fn)
        # of a writer the class, because a user does not know its method
        name = handler_name(fn) if owner is None else type(owner).__name__
        raise TypeError(
            f"{name} cannot be sent to a worker process: {error}. A worker imports what it calls and "
            "shares nothing else with this process: pass a function of a module, or a writer whose class is "
            "in a module and whose arguments pickle; or use offload='thread'"
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Target:
    """Return the functions that `pack` encoded; called in the worker, where importing them may fail."""
    return Target(*pickle.loads(data))


def owner_of(fn: Callable[..., object]) -> Remade | None:
    """Return the object of which `fn` is a method if that object is `Remade`, else None."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, Remade) else None


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Refuse a function or class that a worker cannot import, and pickle a `Remade` by its recipe."""
        if isinstance(obj, FunctionType | type):
            reason = why_not_importable(obj)
            if reason:
                raise pickle.PicklingError(reason)
        elif isinstance(obj, Remade):
            return obj.worker_recipe()
        return NotImplemented


def why_not_importable(thing: Any) -> str:
    """Return the reason why another process cannot import a function or class; "" if it can."""
    module, name = thing.__module__, thing.__qualname__
    if module == "builtins":
        return ""
    if module == "__main__":
        return f"{name} is defined in __main__, the program itself, which a worker does not run again"
    if "<lambda>" in name:
        return f"{name} is a lambda, which has no name to import it by"
    if "<locals>" in name:
        return f"{name} is defined inside a function, where no import finds it"
    if not _can_be_found(module):
        return f"{name} is defined in {module}, which no import finds"
    try:
        imported = find(module, name)
    except (ImportError, AttributeError):
        return f"{module} has no {name}"
    return "" if imported is thing else f"{module}.{name} is a different object now"


def find(module: str, name: str) -> Any:
    """Import a module, and return the object that a qualified name, such as "Class.method", has in it."""
    target: Any = import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _can_be_found(module: str) -> bool:
    """Return whether another process can import a module; it cannot if the module was created at run time."""
    package, _, _ = module.rpartition(".")
    if package and (package not in sys.modules or not _can_be_found(package)):
        return False
    path = sys.modules[package].__path__ if package else None
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find_spec(module, path) is not None for find_spec in finders if find_spec is not None)
