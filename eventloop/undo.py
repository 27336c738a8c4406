"""A trainer as it was, for when loading a checkpoint into it fails half-way."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

from eventloop.optimizers import load_optimizer_state, optimizer_state
from eventloop.rng import module_generators, rng_state, set_module_generators, set_rng_state
from eventloop.weights import unwrap

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

logger = logging.getLogger("eventloop")


class Undo:
    """A copy of all that `TrainerState.resume` changes: model, optimizer, schedulers, counters, hooks, settings, random
    state.

    A hook's own `load_state_dict` may fail after everything before it was loaded, and only then is it known that the
    checkpoint does not fit. Takes the memory of the state once more while a checkpoint is loaded.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._model = copy.deepcopy(unwrap(trainer.model).state_dict())
        self._optimizer = copy.deepcopy(optimizer_state(trainer.optimizer))
        self._schedulers = copy.deepcopy([scheduler.state_dict() for scheduler in trainer.schedulers])
        self._hooks = [(hook, copy.deepcopy(hook.state_dict())) for hook in trainer.hooks if hook.stateful]
        self._counters = trainer.iter, trainer.epoch
        self._position = trainer.position.state_dict("")
        self._settings = trainer.state.settings.undo()
        self._rng = rng_state()
        self._modules = module_generators(unwrap(trainer.model))

    def __call__(self) -> None:
        """Put everything back; a hook that cannot take its own state again is named."""
        trainer = self._trainer
        unwrap(trainer.model).load_state_dict(self._model)
        load_optimizer_state(trainer.optimizer, self._optimizer)
        for scheduler, state in zip(trainer.schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        for hook, state in self._hooks:
            try:
                hook.load_state_dict(state)
            except Exception:
                logger.exception("%s could not be put back to what it was before the checkpoint", hook.name)
        trainer.iter, trainer.epoch = trainer.metrics.iter, trainer.metrics.epoch = self._counters
        trainer.position.load_state_dict(self._position)
        self._settings()
        set_rng_state(self._rng)
        set_module_generators(unwrap(trainer.model), self._modules)
