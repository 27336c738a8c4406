"""Read from a Lightning trainer what a run of ours needs: optimizers, lengths, losses, names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def loop_of(trainer: Any, stage: str) -> Any:
    """Return the loop of a Lightning trainer that makes the run of a stage, such as "fit"."""
    return getattr(trainer, f"{getattr(stage, 'value', stage)}_loop")


def optimizers_of(trainer: Any) -> Any:
    """Return the optimizer of a Lightning trainer, several by name, or None."""
    # not that of a module without one
    optimizers = [each for each in trainer.optimizers if each.param_groups]
    if len(optimizers) == 1:
        return optimizers[0]
    return {f"optimizer_{number}": each for number, each in enumerate(optimizers)} or None


def total_of(trainer: Any, max_epochs: int | None) -> int | None:
    """Return the number of batches of the run, as far as it is known."""
    steps, batches = trainer.max_steps, trainer.num_training_batches
    limits = []
    if max_epochs is not None and batches != float("inf"):
        limits.append(max_epochs * int(batches))
    if steps is not None and steps > 0 and trainer.accumulate_grad_batches == 1:
        limits.append(steps)
    return min(limits, default=0) or None


def whole_loss(trainer: Any, outputs: Any) -> Any:
    """Return the outputs of a batch with the loss of `training_step`, which Lightning has divided."""
    if isinstance(outputs, torch.Tensor):
        outputs = {"loss": outputs}
    batches = trainer.accumulate_grad_batches
    if batches == 1 or not trainer.lightning_module.automatic_optimization:
        return outputs
    if not isinstance(outputs, Mapping) or outputs.get("loss") is None:
        return outputs
    return {**outputs, "loss": outputs["loss"] * batches}


def logged_of(trainer: Any) -> frozenset[str]:
    """Return the names under which Lightning logs numbers of this batch or of the epoch, at its own steps."""
    metas = [each.meta for each in (trainer._results or {}).values() if each.meta.logger]
    return frozenset(meta.forked_name(on_step) for meta in metas for on_step in (True, False))
