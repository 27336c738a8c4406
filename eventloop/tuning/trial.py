"""Prepare a trainer for a trial training, and restore it afterwards, to the bit; `range_test` uses this."""

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


def begin_trial(undo: Undo, trainer: TrainerParts, loader: Iterable[Any]) -> Iterable[Any]:
    """Prepare a trainer for a trial training, and let `undo` restore everything that it changes.

    During the trial the trainer has another bus, with the hooks that make the optimizer's step and no other
    handlers, so nothing is logged, saved, written, averaged or scheduled.

    Returns:
        An iterable for a separate pass over the loader.
    """
    optimizer_hooks = [hook for hook in trainer.hooks if "optimizer" in getattr(hook, "runs_phases", ())]
    # `undo` runs its steps in reverse, so hooks, which hold gradients, are restored after the parameters
    for restore in [*map(restorer, optimizer_hooks), *trainer.remembered.restorers()]:
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
    separate_pass = apart(undo, loader)
    bus = Bus()
    undo.step(bus.close)
    trainer.bus, trainer.clock = bus, StepClock()
    for hook in optimizer_hooks:
        hook.attach(trainer.bus)
    return separate_pass


def _save_parameters(trainer: TrainerParts) -> Callable[[], None]:
    """Return a function that restores the values and gradients of all parameters, in place."""
    parameters = {id(each): each for each in trainer.model.parameters()}
    for optimizer in named_optimizers(trainer.optimizer).values():
        for group in optimizer.param_groups:
            parameters |= {id(each): each for each in group["params"]}
    saved = []
    for parameter in parameters.values():
        grad = parameter.grad
        saved.append((parameter, parameter.detach().clone(), grad, None if grad is None else grad.clone()))

    def restore() -> None:
        """Copy the values back, so that the parameters and gradients stay the same tensors."""
        with torch.no_grad():
            for parameter, value, grad, grad_value in saved:
                parameter.copy_(value)
                if grad is not None and grad_value is not None:
                    grad.copy_(grad_value)
                parameter.grad = grad

    return restore


def _save_extra_states(model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the states that modules return from `get_extra_state`."""
    saved = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]

    def restore() -> None:
        for module, state in saved:
            module.set_extra_state(state)

    return restore


def _save_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer: attributes, state and param groups.

    Tensors are restored in place, because compiled steps refer to them. `load_state_dict` would replace them,
    and convert states to the type of their parameters.
    """
    attributes = dict(vars(optimizer))
    state = {parameter: _SavedValues(values) for parameter, values in optimizer.state.items()}
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append((group, group["params"], _SavedValues(options)))

    def restore() -> None:
        """Restore the optimizer in place, so that schedulers keep its param groups."""
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state.clear()
        optimizer.state.update({parameter: saved.restored() for parameter, saved in state.items()})
        for group, parameters, options in groups:
            group.clear()
            group.update({"params": parameters, **options.restored()})

    return restore


class _SavedValues:
    """A copy of a dict, whose tensors can be restored in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._copies = {}
        for name, value in values.items():
            is_tensor = isinstance(value, torch.Tensor)
            self._copies[name] = value.detach().clone() if is_tensor else copy.deepcopy(value)
        self._tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def restored(self) -> dict[str, Any]:
        """Return the dict as it was, with the same tensors, whose values are restored."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._copies[name])
        return {**self._copies, **self._tensors}
