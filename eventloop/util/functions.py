"""Inspect functions that users pass in: their names for messages, their kinds and their signatures."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

_GIVEN = ("{0}", "{0} is not None", "callable({0})")
"""The conditions, as source, that None does not meet."""
_MISSING = ("not {0}", "{0} is None", "not callable({0})")


def handler_name(fn: Callable[..., object]) -> str:
    """Return the name of a handler for plans and reports.

    Examples: `EMAHook.after_train_iter`, `step_lr`, `<lambda> (a.py:3)`.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__)).rsplit("<locals>.", 1)[-1]
    owner = getattr(inner, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        owner_class = owner if isinstance(owner, type) else type(owner)
        name = f"{owner_class.__qualname__.rsplit('<locals>.', 1)[-1]}.{getattr(inner, '__name__', name)}"
    code = getattr(inner, "__code__", None)
    if "<lambda>" in name and code is not None:
        name = f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    return name


def awaited_by(fn: Callable[..., object]) -> str:
    """Return ", waiting for X" if the object of the method `fn` has a text X in `waits_for`, else ""."""
    try:
        text = getattr(getattr(fn, "__self__", None), "waits_for", "")
    except Exception:  # of a user's property; the text is only a part of a message
        return ""
    return f", waiting for {text}" if isinstance(text, str) and text else ""


def untaken_by(fn: Callable[..., object]) -> int:
    """Return the number in `untaken` of the object of the method `fn`; 0 without one.

    It is the number of the last delivered events that the object's destination has not taken yet.
    """
    return int(getattr(getattr(fn, "__self__", None), "untaken", 0))


def is_coroutine_function(fn: Callable[..., object]) -> bool:
    """Return whether `fn` is an `async def` function, a partial of one, or has such a method `__call__`."""
    if inspect.isroutine(fn):
        return inspect.iscoroutinefunction(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def check_plain(what: str, fn: object, *parameters: str) -> None:
    """Refuse a Python function that cannot be called with these arguments; accept any other object.

    Such an object may be a module, whose signature does not show the parameters of its forward method.
    """
    plain = inspect.isfunction(fn) or inspect.ismethod(fn) or isinstance(fn, functools.partial)
    if plain and not hasattr(fn, "__wrapped__"):  # a wrapper may take other arguments than the function
        check_call(what, fn, *parameters)


def check_call(what: str, fn: object, *parameters: str) -> None:
    """Refuse a value that cannot be called with these positional arguments.

    Args:
        what: the name of the function in messages.
        fn: the value.
        parameters: the names of the arguments.
    """
    expected = f"({', '.join(parameters)})"
    if not callable(fn):
        raise TypeError(f"{what} must be a function {expected}, got {fn!r}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise TypeError(
            f"{what} is called with {expected}, but the signature is {handler_name(fn)}{signature}: {error}"
        ) from error


def needs_argument(method: Callable[..., object]) -> bool:
    """Return whether a method of a class needs its first argument, also if that has a default.

    By its source it does if it asserts that there is an argument, raises an error without it, or calls the
    argument and never tests it. The signature alone decides for PyTorch's methods, and without source.
    """
    method = inspect.unwrap(method)
    parameter = next(iter([*inspect.signature(method).parameters.values()][1:]), None)
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if parameter.default is parameter.empty:
        return True
    if method.__module__.startswith("torch."):
        return False
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return False
    nodes = [*ast.walk(source)]
    return any(_refuses_none(node, parameter.name) for node in nodes) or _only_called(nodes, parameter.name)


def _refuses_none(node: ast.AST, name: str) -> bool:
    """Return whether a statement raises an error if the variable `name` is None."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) in [each.format(name) for each in _GIVEN]
    if isinstance(node, ast.If):
        tests = [each.format(name) for each in _MISSING]
        return ast.unparse(node.test) in tests and isinstance(node.body[-1], ast.Raise)
    return False


def _only_called(nodes: list[ast.AST], name: str) -> bool:
    """Return whether the variable `name` is called, and is read nowhere else."""
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    reads = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return bool(reads) and all(id(node) in called for node in reads)
