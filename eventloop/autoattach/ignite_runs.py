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
"""The prefix of the names of evaluators' process functions, which `create_supervised_evaluator` makes."""


class Parts(NamedTuple):
    """The model and the optimizers that a process function trains, as far as they can be found."""

    model: torch.nn.Module | None
    optimizer: Any


class IgniteRuns:
    """Attach bridges to engines, and find out from the nesting of their runs whether they train or evaluate.

    An engine that runs outside of another engine's run trains. An engine that runs within it evaluates, in
    the mode "val". An engine of `create_supervised_evaluator` never trains.
    """

    def __init__(self, attacher: Attacher) -> None:
        self._attacher = attacher
        self._trainers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # bridges that this object attached
        self._evaluators: WeakSet[Any] = WeakSet()  # engines added to one of these bridges
        self._thread = threading.local()  # engines may run in several threads

    def attaching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Engine.run` to attach a bridge before an engine's first run."""

        @wraps(run)
        def attaching(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self._thread, "running"):
                self._thread.running = []
            running: list[Any] = self._thread.running
            if engine not in self._trainers:
                self._attach(engine, running)
            bound = run.__get__(engine)
            bridge = self._trainers.get(engine)
            running.append(engine)
            try:
                return (bound if bridge is None else bridge.riding(bound))(*args, **kwargs)
            finally:
                running.pop()

        return attaching

    def _attach(self, engine: Any, running: list[Any]) -> None:
        """Attach a training engine to a new bridge; add an evaluator to the current one."""
        bridges = self._attacher.bridge("ignite", "ignite")
        if bridges is None:
            return
        if bridges.bridge_of(engine) is not None:
            self._attacher.bridged.add("ignite")
            return
        if running:
            if len(running) == 1 and running[0] in self._trainers and engine not in self._evaluators:
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
        self._trainers[engine] = bridge


def trained_parts(function: Callable[..., Any]) -> Parts:
    """Return the optimizers that a function uses, and the module with their parameters.

    They are searched among the variables that the function refers to, and the attributes of its object.
    """
    import torch

    used = dict(_variables(function))
    optimizers = {name: each for name, each in used.items() if isinstance(each, torch.optim.Optimizer)}
    if not optimizers:
        return Parts(None, None)
    stepped = {id(p) for each in optimizers.values() for group in each.param_groups for p in group["params"]}
    modules = [each for each in used.values() if isinstance(each, torch.nn.Module)]
    owners = [each for each in modules if stepped <= {id(p) for p in each.parameters()}]
    one = next(iter(optimizers.values())) if len({id(each) for each in optimizers.values()}) == 1 else None
    return Parts(owners[0] if owners else None, one if one is not None else optimizers)


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's variables, bound arguments and object attributes."""
    if isinstance(function, partial):
        yield from ((f"argument {number}", each) for number, each in enumerate(function.args))
        yield from function.keywords.items()
        yield from _variables(function.func)
    elif inspect.ismethod(function):
        yield from getattr(function.__self__, "__dict__", {}).items()
        yield from _variables(function.__func__)
    elif inspect.isfunction(function):
        found = inspect.getclosurevars(inspect.unwrap(function))
        yield from found.globals.items()
        yield from found.nonlocals.items()
