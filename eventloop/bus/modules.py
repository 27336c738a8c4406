"""Subscribe functions to the forward and backward passes of a model's modules, for `Bus.subscribe_module`.

The functions are PyTorch hooks of the modules. A permanent hook would cost a Python call for each module in
every iteration, so the hooks are installed before the chosen iterations and removed after them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import torch
from torch.utils.hooks import RemovableHandle

from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrainIter, Event
from eventloop.events.priority import Priority
from eventloop.util.checks import check_choice
from eventloop.util.functions import handler_name
from eventloop.util.suggest import suggest

Kind = Literal["forward", "backward"]
KINDS = ["forward", "backward"]


class Eagerly:
    """Let compiled models run eagerly while subscriptions need it: compiled graphs call no module hooks.

    Several subscriptions may need it at once. The setting applies to the whole process.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._stance: AbstractContextManager[Any] | None = None

    def acquire(self, user: object) -> None:
        """Let compiled models run eagerly until `user` calls `release`."""
        if self._stance is None and "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")
        self._users.add(user)

    def release(self, user: object) -> None:
        """Let compiled models run compiled again, unless another user needs them eager."""
        self._users.discard(user)
        if not self._users and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


eagerly = Eagerly()
"""The only instance of `Eagerly`, because the setting of `torch.compiler` applies to the whole process."""


class ModuleSubscription:
    """The subscription of a function that some modules of a model call as a hook.

    As a context manager it cancels itself at the end of the block.
    """

    def __init__(
        self,
        subscribe: Callable[..., Subscription],
        fn: Callable[..., Any],
        model: torch.nn.Module,
        pattern: str | Sequence[str],
        kind: Kind,
        every: int,
        start: int,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"bus.on_module needs a torch.nn.Module, got {model!r}")
        check_choice("kind", kind, KINDS)
        self.fn = fn
        self.modules = match_modules(model, pattern)
        self._kind = kind
        self._named = takes_name(fn, kind)
        self._handles: list[RemovableHandle] = []
        name = handler_name(fn)
        # Module hooks are installed after the handlers that may skip the iteration. Forward hooks are removed
        # at the begin of after_train_iter, before `PreciseBN` runs other forward passes. Backward hooks are
        # removed at its end, because the optimizer hook runs the backward pass within it.
        removal = Priority.HIGHEST if kind == "forward" else Priority.LOWEST
        self._subscriptions: list[Subscription] = [
            subscribe(
                self._switch(name, "on"), BeforeTrainIter, priority=Priority.LOWEST, every=every, start=start
            ),
            subscribe(self._switch(name, "off"), AfterTrainIter, priority=removal, every=every, start=start),
            subscribe(self._switch(name, "off"), AfterTrain, priority=Priority.HIGHEST),
        ]

    @property
    def installed(self) -> bool:
        """True while the hooks are on the modules."""
        return bool(self._handles)

    def install(self) -> None:
        """Install the hooks on the modules, unless they are installed already."""
        if not self._handles:
            eagerly.acquire(self)
            self._handles = [self._register(name, module) for name, module in self.modules.items()]

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        while self._handles:
            self._handles.pop().remove()
        eagerly.release(self)

    def cancel(self) -> None:
        """Remove the hooks, and end the subscription. Cancelling again does nothing."""
        self.remove()
        for subscription in self._subscriptions:
            subscription.cancel()
        self._subscriptions = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def active(self) -> bool:
        """False once the subscription is cancelled."""
        return bool(self._subscriptions)

    def _switch(self, name: str, state: Literal["on", "off"]) -> Callable[[Event], None]:
        """Return a handler that installs or removes the hooks.

        Args:
            name: the name of the user's function, which the handler has in plans and tracebacks.
            state: "on" to install, "off" to remove.
        """

        def switch(event: Event) -> None:
            self.install() if state == "on" else self.remove()

        switch.__qualname__ = f"{name} ({state})"
        return switch

    def _register(self, name: str, module: torch.nn.Module) -> RemovableHandle:
        """Register a hook of a module that calls the user's function and ignores its result."""
        fn = self.fn
        if self._named:

            def call(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
                fn(name, module, inputs, outputs)
        else:

            def call(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
                fn(module, inputs, outputs)

        if self._kind == "forward":
            return module.register_forward_hook(call)
        return module.register_full_backward_hook(call)


def match_modules(model: torch.nn.Module, pattern: str | Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules whose names match a pattern, by name.

    `*` matches within one part of a name: "layers.*" matches "layers.0" but not "layers.0.norm". "**" matches
    any number of whole parts.

    Raises:
        ValueError: there is no pattern, or no module matches one of them.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns:
        raise ValueError(
            f"no module is chosen: the pattern is {pattern!r}; pass the name of a module, a pattern such as "
            "'*', or several of them"
        )
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, torch.nn.Module] = {}
    for one_pattern in patterns:
        parts = one_pattern.split(".")
        matches = {name: module for name, module in modules.items() if _matches(name.split("."), parts)}
        if not matches:
            reason = ": it contains no modules; pass the model that it is a part of"
            raise ValueError(
                f"no module of {type(model).__name__} matches {one_pattern!r}"
                f"{suggest(one_pattern, [*modules]) if modules else reason}"
            )
        chosen |= matches
    return chosen


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a name match the parts of a pattern."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def takes_name(fn: Callable[..., Any], kind: Kind) -> bool:
    """Return whether the function takes the module's name before the three arguments of a PyTorch hook.

    Raises:
        TypeError: the function has another signature, or is a coroutine function.
    """
    if inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"{handler_name(fn)} is a coroutine function: a module hook receives tensors and runs at once"
        )
    tensors = "inputs, outputs" if kind == "forward" else "grad_inputs, grad_outputs"
    with suppress(ValueError):  # a builtin function without a signature gets the three arguments
        signature = inspect.signature(fn)
        for count in (3, 4):
            with suppress(TypeError):
                signature.bind(*range(count))
                return count == 4
        raise TypeError(
            f"{handler_name(fn)}{signature} cannot be a {kind} hook: write it as (module, {tensors}) or "
            f"(name, module, {tensors})"
        )
    return False
