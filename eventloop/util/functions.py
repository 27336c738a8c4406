"""Inspect functions that users pass in: their names for messages, their kinds and their signatures."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

_GIVEN = ("{0}", "{0} is not None", "callable({0})")
"""The source of conditions that are false if the variable {0} is None."""
_MISSING = ("not {0}", "{0} is None", "not callable({0})")
"""The source of conditions that are true if the variable {0} is None."""


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
    """Return the end of a message about a call that takes long: ", waiting for X", or "".

    X is the attribute `waits_for`, a text, of the object that the method `fn` belongs to.
    """
    try:
        text = getattr(getattr(fn, "__self__", None), "waits_for", "")
    except Exception:  # a user's property raised it; the message does without this text
        return ""
    return f", waiting for {text}" if isinstance(text, str) and text else ""


def untaken_by(fn: Callable[..., object]) -> int:
    """Return the attribute `untaken` of the object that the method `fn` belongs to; 0 if it has none.

    Of the events that were delivered to the object, this is the number that its destination, such as a
    server, has not received yet.
    """
    return int(getattr(getattr(fn, "__self__", None), "untaken", 0))


def is_coroutine_function(fn: Callable[..., object]) -> bool:
    """Return whether `fn` is an `async def` function or a partial of it, or its `__call__` is `async def`."""
    if inspect.isroutine(fn):
        return inspect.iscoroutinefunction(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def check_plain(what: str, fn: object, *parameters: str) -> None:
    """Refuse a Python function that cannot be called with these arguments; accept any other object.

    The signature of another object need not be the true one. That of a `torch.nn.Module`, for example, does
    not show the parameters of `forward`.

    Args:
        what: the name of the function in messages.
        parameters: the names of the positional arguments.

    Raises:
        TypeError: the function cannot be called with these arguments.
    """
    is_function = inspect.isfunction(fn) or inspect.ismethod(fn) or isinstance(fn, functools.partial)
    # a decorated function has the signature of the original, but may take other arguments
    if is_function and not hasattr(fn, "__wrapped__"):
        check_call(what, fn, *parameters)


def check_call(what: str, fn: object, *parameters: str) -> None:
    """Refuse a value that cannot be called with these positional arguments.

    Args:
        what: the name of the function in messages.
        fn: the value.
        parameters: the names of the positional arguments.

    Raises:
        TypeError: the value is not callable, or not with these arguments.
    """
    expected = f"({', '.join(parameters)})"
    if not callable(fn):
        raise TypeError(f"{what} must be a function {expected}, got {fn!r}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtin functions have no signature
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise TypeError(
            f"{what} is called with {expected}, but the signature is {handler_name(fn)}{signature}: {error}"
        ) from error


def needs_argument(method: Callable[..., object]) -> bool:
    """Return whether a method of an object fails without an argument, even if its first has a default.

    The method's source is searched for an assertion that the argument is given, for an error that is raised
    if it is missing, and for a call of the argument without a test. For a method of PyTorch, or if there is
    no source, an argument with a default is not needed. `method` may be any callable, such as a partial.
    """
    try:
        parameters = [*inspect.signature(method).parameters.values()]
    except (ValueError, TypeError):  # some builtin functions have no signature
        return False
    # the function that a PyTorch scheduler puts in place of `step` has the signature of an unbound method
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    if not parameters or parameters[0].kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ):
        return False
    parameter = parameters[0]
    if parameter.default is parameter.empty:
        return True
    method = inspect.unwrap(method)
    if str(getattr(method, "__module__", "")).startswith("torch."):
        return False
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError, TypeError):  # TypeError: no function, as a partial
        return False
    nodes = [*ast.walk(source)]
    return any(_refuses_none(node, parameter.name) for node in nodes) or _only_called(nodes, parameter.name)


def _refuses_none(node: ast.AST, name: str) -> bool:
    """Return whether a statement raises an error if the variable `name` has the value None."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) in [condition.format(name) for condition in _GIVEN]
    if isinstance(node, ast.If):
        conditions = [condition.format(name) for condition in _MISSING]
        return ast.unparse(node.test) in conditions and isinstance(node.body[-1], ast.Raise)
    return False


def _only_called(nodes: list[ast.AST], name: str) -> bool:
    """Return whether the variable `name` is called as a function, and is used in no other way."""
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return bool(uses) and all(id(node) in called for node in uses)
