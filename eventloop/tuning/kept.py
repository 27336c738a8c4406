"""Restore everything that a trial training changes, to the bit: `range_test` trains within `trial`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from eventloop.bus import Bus
from eventloop.checkpoint.weights import modes_and_buffers_kept
from eventloop.costs.step_clock import StepClock
from eventloop.data.rng import module_generators, set_module_generators
from eventloop.data.side_pass import apart
from eventloop.evaluation.evaluation import fields_kept
from eventloop.metrics import EventStorage
from eventloop.optim.optimizers import named_optimizers
from eventloop.state.rollback import keep


class TriedTrainer(Protocol):
    """The parts of a trainer that a trial training uses and changes."""

    model: torch.nn.Module
    optimizer: Any
    hooks: list[Any]
    bus: Bus
    clock: StepClock
    metrics: EventStorage
    train_loader: Iterable[Any] | None
    batch: Any
    outputs: Any
    within: Any
    loss_fn: Any


@contextmanager
def trial(trainer: TriedTrainer, loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Make a context in which a trainer may train; afterwards it is as before. Yield the loader to read.

    The trainer has another bus in the block, with the hooks that make the optimizer's step and no other
    handlers: nothing is logged, saved, written, averaged or scheduled.
    """
    steppers = [hook for hook in trainer.hooks if "optimizer" in getattr(hook, "runs_phases", ())]
    with ExitStack() as stack:
        # restored in the reverse order: the hooks' states have gradients of the parameters
        for hook in steppers:
            stack.callback(keep(hook))
        for optimizer in named_optimizers(trainer.optimizer).values():
            stack.callback(_keep_optimizer(optimizer))
        stack.callback(_keep_parameters(trainer))
        stack.callback(set_module_generators, trainer.model, module_generators(trainer.model))
        for module in (trainer.model, trainer.loss_fn):
            if isinstance(module, torch.nn.Module):
                stack.enter_context(modes_and_buffers_kept(module))
                stack.callback(_keep_extra_states(module))
        stack.enter_context(fields_kept(trainer))
        stack.callback(_keep_attributes(trainer, "bus", "clock", "within"))
        alone = stack.enter_context(apart(loader))
        trainer.bus, trainer.clock = Bus(), StepClock()
        stack.callback(trainer.bus.close)
        for hook in steppers:
            hook.attach(trainer.bus)
        yield alone


def _keep_attributes(trainer: TriedTrainer, *names: str) -> Callable[[], None]:
    values = {name: getattr(trainer, name) for name in names}

    def restore() -> None:
        for name, value in values.items():
            setattr(trainer, name, value)

    return restore


def _keep_parameters(trainer: TriedTrainer) -> Callable[[], None]:
    """Return a function that restores the values and gradients of all parameters, in place."""
    parameters = {id(each): each for each in trainer.model.parameters()}
    for optimizer in named_optimizers(trainer.optimizer).values():
        for group in optimizer.param_groups:
            parameters |= {id(each): each for each in group["params"]}
    kept = [
        (each, each.detach().clone(), each.grad, None if each.grad is None else each.grad.clone())
        for each in parameters.values()
    ]

    def restore() -> None:
        with torch.no_grad():
            for parameter, value, grad, grad_value in kept:
                parameter.copy_(value)
                if grad is not None and grad_value is not None:
                    grad.copy_(grad_value)
                parameter.grad = grad

    return restore


def _keep_extra_states(model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the extra states of modules, as their state_dict has them."""
    kept = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]

    def restore() -> None:
        for module, state in kept:
            module.set_extra_state(state)

    return restore


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer: attributes, state and param groups.

    `load_state_dict` would convert states to the type of their parameters. Tensors are filled in place,
    because compiled steps hold them.
    """
    attributes = dict(vars(optimizer))
    state = {parameter: _Kept(values) for parameter, values in optimizer.state.items()}
    groups = [
        _Kept({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state.clear()
        optimizer.state.update({parameter: kept.values() for parameter, kept in state.items()})
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **kept.values()})

    return restore


class _Kept:
    """The values of a mapping: tensors with a copy of their content, other values copied."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._tensors = {k: (v, v.detach().clone()) for k, v in values.items() if isinstance(v, torch.Tensor)}
        self._others = {k: copy.deepcopy(v) for k, v in values.items() if k not in self._tensors}
        self._order = [*values]

    def values(self) -> dict[str, Any]:
        """Return the mapping as it was, with the same tensors."""
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                tensor.copy_(value)
        return {k: self._tensors[k][0] if k in self._tensors else self._others[k] for k in self._order}
