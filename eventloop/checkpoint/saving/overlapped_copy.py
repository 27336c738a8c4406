"""Copy a part of a trainer's state during the next forward and backward pass.

The trainer owns one `Copying`; `CheckpointHook` starts copies, and the optimizer's step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from eventloop.data.trainer_parts import TrainerParts
from eventloop.optim.optimizers import each_optimizer, hookable
from eventloop.state.sharded import local_parts


class SavingTrainer(TrainerParts, Protocol):
    """The parts of a trainer that a save uses."""

    copying: Copying


class Copying:
    """Make the optimizer's next step wait for the running copies of a trainer's state.

    An optimizer's parameters and state change only in its step, so between the end of an iteration and the
    next step any thread can read them. Everything else may change in a forward pass, such as the running
    averages of batch norm layers, or parameters without an optimizer, such as a teacher's.

    `OptimizerHook` waits for the copy before it steps. In a hand-written loop a pre-hook of the optimizer's
    step waits. PyTorch does not call the pre-hook in a compiled step or in a CUDA graph, so values that such
    a step changes are copied at once. Code that changes parameters in another way calls `join` first, as
    `EMAHook` does before it swaps in the average. Code that gives the trainer another optimizer during a copy
    also calls `join`, because the new optimizer gets its pre-hook only with the next copy.

    Args:
        optimizer: returns the trainer's present optimizer, or several by name; a run may replace it.
    """

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._joins: list[Callable[[], None]] = []  # each waits for one running copy
        self._hooked: list[tuple[torch.optim.Optimizer, Any]] = []  # each with the handle of its hook
        self.waited: set[int] = set()
        """The `id` of each optimizer that has called `before_step` since the last copy, so its steps wait."""

    def may_come_later(self) -> set[int]:
        """Return the `data_ptr` of each tensor that changes only in optimizer steps which wait for copies."""
        waiting = [each for each in self._optimizers() if id(each) in self.waited]
        return _pointers(value for optimizer in waiting for value in _values_of(optimizer))

    def begin(self, join: Callable[[], None]) -> None:
        """Register a running copy, by a function that returns once the copied tensors may be changed."""
        self._joins.append(join)
        self.waited.clear()
        self.watch()

    def watch(self) -> None:
        """Register pre-hooks that make the steps of the trainer's optimizers wait for copies.

        Call it before the first step, so that a compiled step is compiled only once.
        """
        optimizers = self._optimizers()
        if [*map(id, optimizers)] != [id(each) for each, _ in self._hooked]:  # a run may replace optimizers
            self._remove_hooks()
            self._hooked = [(o, o.register_step_pre_hook(self.before_step)) for o in optimizers]

    def before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Wait for the running copy, whose tensors the optimizer's step would change.

        A step that is being compiled does not wait: a lock, or a call that is not traced, would break its
        graph.
        """
        if torch.compiler.is_compiling():
            return
        self.waited.add(id(optimizer))
        if self._joins:
            self.join()

    def join(self) -> None:
        """Wait until the parameters and the optimizers' states may be changed."""
        joins, self._joins = self._joins, []
        for join in joins:
            join()

    def end(self) -> None:
        """Wait for the running copy, and remove the pre-hooks; later steps do not wait any more."""
        self.join()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that support step hooks; an object that resembles an optimizer may not."""
        optimizers = map(hookable, each_optimizer(self._optimizer()))
        return [optimizer for optimizer in optimizers if optimizer is not None]


def _values_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the parameters of an optimizer and the values of their states."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from state.values()


def _pointers(values: Iterable[Any]) -> set[int]:
    """Return the pointers of dense tensors; sparse tensors have none, and are copied at once."""
    dense = (v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)
    return {part.data_ptr() for part in local_parts(dense)}
