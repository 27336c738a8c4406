"""Read optimizers, lengths, losses and names of logged numbers from a Lightning trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def loop_of(trainer: Any, stage: str) -> Any:
    """Return the loop that a Lightning trainer runs in a stage, such as its `fit_loop` for "fit"."""
    return getattr(trainer, f"{getattr(stage, 'value', stage)}_loop")


def optimizers_of(trainer: Any) -> Any:
    """Return the optimizer of a Lightning trainer, a dict of several by name, or None."""
    # Lightning gives a module that configures no optimizer one without parameter groups
    optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
    if len(optimizers) == 1:
        return optimizers[0]
    return {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)} or None


def total_of(trainer: Any, max_epochs: int | None) -> int | None:
    """Return the number of batches of the run, or None if it is unknown."""
    steps, batches = trainer.max_steps, trainer.num_training_batches
    limits = []
    if max_epochs is not None and batches != float("inf"):
        limits.append(max_epochs * int(batches))
    # max_steps counts optimizer steps, which are batches only if no gradients are accumulated
    if steps is not None and steps > 0 and trainer.accumulate_grad_batches == 1:
        limits.append(steps)
    return min(limits, default=0) or None


def whole_loss(trainer: Any, outputs: Any) -> Any:
    """Return the outputs of a batch with the loss as `training_step` returned it.

    Lightning divides the loss by the number of batches whose gradients are accumulated.
    """
    if isinstance(outputs, torch.Tensor):
        outputs = {"loss": outputs}
    batches = trainer.accumulate_grad_batches
    if batches == 1 or not trainer.lightning_module.automatic_optimization:
        return outputs
    if not isinstance(outputs, Mapping) or outputs.get("loss") is None:
        return outputs
    return {**outputs, "loss": outputs["loss"] * batches}


def logged_of(trainer: Any) -> frozenset[str]:
    """Return the names of the numbers that the module has logged by `self.log(..., logger=True)`."""
    metas = [result.meta for result in (trainer._results or {}).values() if result.meta.logger]
    return frozenset(meta.forked_name(on_step) for meta in metas for on_step in (True, False))
