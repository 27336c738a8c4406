"""Restore everything that a trial training changes, to the bit: `range_test` trains after `trial`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from eventloop.bus import Bus
from eventloop.checkpoint.weights import save_modes_and_buffers
from eventloop.costs.step_clock import StepClock
from eventloop.data.rng import module_generators, set_module_generators
from eventloop.data.side_pass import apart
from eventloop.data.trainer_parts import TrainerParts
from eventloop.evaluation.evaluation import save_fields
from eventloop.optim.optimizers import named_optimizers
from eventloop.state.rollback import restorer
from eventloop.state.undo import Undo


def trial(undo: Undo, trainer: TrainerParts, loader: Iterable[Any]) -> Iterable[Any]:
    """Prepare a trainer for a trial training, which `undo` undoes; return the loader to read.

    The trainer has another bus meanwhile, with the hooks that make the optimizer's step and no other
    handlers: nothing is logged, saved, written, averaged or scheduled.
    """
    steppers = [hook for hook in trainer.hooks if "optimizer" in getattr(hook, "runs_phases", ())]
    # restored in the reverse order: the hooks' states have gradients of the parameters
    for restore in [*map(restorer, steppers), *trainer.remembered.restorers()]:
        undo.step(restore)
    for optimizer in named_optimizers(trainer.optimizer).values():
        undo.step(_save_optimizer(optimizer))
    undo.step(_save_parameters(trainer))
    undo.step(set_module_generators, trainer.model, module_generators(trainer.model))
    for module in (trainer.model, trainer.loss_fn):
        if isinstance(module, torch.nn.Module):
            save_modes_and_buffers(undo, module)
            undo.step(_save_extra_states(module))
    save_fields(undo, trainer)
    undo.attributes(trainer, "bus", "clock", "within")
    undo.attributes(trainer.counting, "batches", "before")
    alone = apart(undo, loader)
    bus = Bus()
    undo.step(bus.close)
    trainer.bus, trainer.clock = bus, StepClock()
    for hook in steppers:
        hook.attach(trainer.bus)
    return alone


def _save_parameters(trainer: TrainerParts) -> Callable[[], None]:
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


def _save_extra_states(model: torch.nn.Module) -> Callable[[], None]:
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


def _save_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer: attributes, state and param groups.

    `load_state_dict` would convert states to the type of their parameters. Tensors are filled in place,
    because compiled steps hold them.
    """
    attributes = dict(vars(optimizer))
    state = {parameter: _Kept(values) for parameter, values in optimizer.state.items()}
    groups = [
        (group, group["params"], _Kept({key: value for key, value in group.items() if key != "params"}))
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state.clear()
        optimizer.state.update({parameter: kept.values() for parameter, kept in state.items()})
        for group, parameters, kept in groups:
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
