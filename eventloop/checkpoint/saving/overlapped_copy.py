"""Copies of a trainer's state that are made beside its next forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from eventloop.optim.optimizers import each_optimizer, hookable


class HasOptimizer(Protocol):
    """A trainer with one optimizer, or several by name."""

    optimizer: Any


class Copying:
    """Knows what may be copied late, and sees to it that it is before it is changed.

    What an optimizer steps, and its own state, change in its step and nowhere else: between the end of one iteration
    and the step of the next they can be read by anybody. Everything else may change in a forward pass, as the
    running averages of batch norm layers do, and the parameters that no optimizer has, as a teacher's.

    The optimizer hook waits for the copy before it steps. In a hand-written loop a hook of the optimizer waits, which
    PyTorch calls before each step, but not in a compiled one, nor in a CUDA graph: what such a step changes is copied at
    once. Code that changes parameters in another way calls `join` first; `EMAHook` does before it swaps in the average.
    So does code that gives the trainer another optimizer while a copy is under way, for that one has the hook from the
    next copy on.
    """

    def __init__(self, trainer: HasOptimizer) -> None:
        self._trainer = trainer
        self._joins: list[Callable[[], None]] = []
        self._hooked: list[tuple[torch.optim.Optimizer, Any]] = []  # with what takes the hook off
        self.waited: set[int] = set()
        """The ids of the optimizers that called `before_step` since the last copy; it has nothing to do for these."""

    def may_come_later(self) -> set[int]:
        """Return the `data_ptr` of what only an optimizer's step changes, where that step waits for the copy."""
        pointers: set[int] = set()
        for optimizer in self._optimizers():
            if id(optimizer) not in self.waited:
                continue
            for group in optimizer.param_groups:
                pointers.update(_pointers(group["params"]))
            for state in optimizer.state.values():
                pointers.update(_pointers(state.values()))
        return pointers

    def begin(self, join: Callable[[], None]) -> None:
        """A copy was begun; `join` returns once what it copies may be changed."""
        self._joins.append(join)
        self.waited.clear()
        self.watch()

    def watch(self) -> None:
        """Put the hooks on the trainer's optimizers. Before the first step, so that a compiled one is compiled once."""
        optimizers = self._optimizers()
        if [*map(id, optimizers)] != [id(each) for each, _ in self._hooked]:  # a run may exchange them
            self._take_hooks_off()
            self._hooked = [(o, o.register_step_pre_hook(self.before_step)) for o in optimizers]

    def before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Wait for the copy under way, which the optimizer's step would change. Dynamo traces none of this."""
        if torch.compiler.is_compiling():  # a lock, or a call that is not traced, would break the graph
            return
        self.waited.add(id(optimizer))
        if self._joins:
            self.join()

    def join(self) -> None:
        """Return once the parameters and the optimizers' states may be changed."""
        joins, self._joins = self._joins, []
        for join in joins:
            join()

    def end(self) -> None:
        """No more copies are made; take the hooks off the optimizers. A step after this one asks nobody, so the copy
        that is under way is waited for."""
        self.join()
        self._take_hooks_off()

    def _take_hooks_off(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that call hooks: what only looks like an optimizer may not."""
        optimizers = map(hookable, each_optimizer(self._trainer.optimizer))
        return [optimizer for optimizer in optimizers if optimizer is not None]


def _pointers(values: Iterable[Any]) -> Iterator[int]:
    """Those of the tensors that lie in a row: sparse ones have no pointer, and are copied at once."""
    return (v.data_ptr() for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)
