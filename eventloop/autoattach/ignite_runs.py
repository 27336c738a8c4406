"""Attach a bridge to each ignite engine at its first run."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    import torch

    from eventloop.autoattach.attacher import Attacher

EVALUATES = "supervised_evaluation_step"
"""The prefix of the `__qualname__` of process functions of ignite's `create_supervised_evaluator`."""


class Parts(NamedTuple):
    """Hold the model and the optimizers that a process function of ignite trains; None if not found."""

    model: torch.nn.Module | None
    optimizer: Any


class IgniteRuns:
    """Attach bridges to ignite engines, and distinguish engines that train from those that evaluate.

    An engine that runs outside of another engine's run trains. An engine that runs within it evaluates, in
    the mode "val". An engine of `create_supervised_evaluator` never trains.
    """

    def __init__(self, attacher: Attacher) -> None:
        self._attacher = attacher
        self._bridges: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # attached here, by training engine
        self._evaluators: WeakSet[Any] = WeakSet()  # engines added to one of these bridges
        self._thread = threading.local()  # has the engines that run in a thread, as `running`

    def wrap_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Engine.run` to attach a bridge before an engine's first run."""

        @wraps(run)
        def attach_and_run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            """Run an engine, by its bridge if it has one; a first run may attach one before it."""
            if not hasattr(self._thread, "running"):
                self._thread.running = []
            running: list[Any] = self._thread.running
            if engine not in self._bridges:
                self._attach(engine, running)
            bound = run.__get__(engine)
            bridge = self._bridges.get(engine)
            running.append(engine)
            try:
                return (bound if bridge is None else bridge.wrap_run(bound))(*args, **kwargs)
            finally:
                running.pop()

        return attach_and_run

    def _attach(self, engine: Any, running: list[Any]) -> None:
        """Give an engine that trains a new bridge; add an evaluator to the bridge of the engine around it."""
        bridges = self._attacher.bridge("ignite", "ignite")
        if bridges is None:
            return
        if bridges.bridge_of(engine) is not None:
            self._attacher.bridged.add("ignite")
            return
        if running:
            if len(running) == 1 and running[0] in self._bridges and engine not in self._evaluators:
                bridges.bridge_of(running[0]).add_evaluator("val", engine)
                self._evaluators.add(engine)
            return
        step = engine._process_function
        if engine in self._evaluators or getattr(step, "__qualname__", "").startswith(EVALUATES):
            return
        model, optimizer = trained_parts(step)
        bridge = bridges.bridge_to(
            engine, model=model, optimizer=optimizer, hidden=True, **self._attacher.arguments()
        )
        self._attacher.follow(bridge.attachment)
        self._bridges[engine] = bridge


def trained_parts(function: Callable[..., Any]) -> Parts:
    """Return the optimizers that a function uses, and the module that has all of their parameters.

    They are searched among the variables that the function refers to, its bound arguments, and the attributes
    of its object.
    """
    import torch

    variables = dict(_variables(function))
    optimizers = {
        name: value for name, value in variables.items() if isinstance(value, torch.optim.Optimizer)
    }
    if not optimizers:
        return Parts(None, None)
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [value for value in variables.values() if isinstance(value, torch.nn.Module)]
    owners = [module for module in modules if optimized <= {id(p) for p in module.parameters()}]
    model = owners[0] if owners else None
    if len({id(optimizer) for optimizer in optimizers.values()}) == 1:
        return Parts(model, next(iter(optimizers.values())))
    return Parts(model, optimizers)


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's variables, bound arguments and object attributes."""
    if isinstance(function, partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _variables(function.func)
    elif inspect.ismethod(function):
        yield from getattr(function.__self__, "__dict__", {}).items()
        yield from _variables(function.__func__)
    elif inspect.isfunction(function):
        closure = inspect.getclosurevars(inspect.unwrap(function))
        yield from closure.globals.items()
        yield from closure.nonlocals.items()
