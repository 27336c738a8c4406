"""Check that a trainer can continue from a checkpoint, before anything of it is loaded.

`restoring` calls `check_resume`, and `check_same_weights` just before the weights are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import OneCycleLR

from eventloop.checkpoint.weights import check_model_state, unwrap
from eventloop.optim.optimizer_states import check_groups
from eventloop.resume.apply import Applying
from eventloop.resume.by_name import ByName
from eventloop.resume.choice import weights_of
from eventloop.resume.loading import RankState, position_changes, state_of_rank
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import Change, Changed, Choice, choose
from eventloop.resume.settings import Settings, type_changes
from eventloop.state.exchange import gather, has_other_ranks, raised_together, this_rank
from eventloop.state.schema import check_layout, refusing
from eventloop.state.sharded import is_dtensor
from eventloop.util.errors import CheckpointError


class Checked(NamedTuple):
    """A checkpoint that the trainer can resume from, arranged as its own parameters are.

    Args:
        checkpoint: the contents of the checkpoint.
        weights: the weights with which the run continues.
        changes: the changed settings.
        choice: "keep" or "apply": whether changed settings of optimizers and schedulers have the checkpoint's
            or this trainer's values. "refuse" if none has changed.
        rank_state: the part of the checkpoint from which this rank continues.
        new_groups: the indices of the param groups that the checkpoint does not have, by the optimizer's
            name.
        lines: lines to log once the checkpoint is loaded.
    """

    checkpoint: Mapping[str, Any]
    weights: Mapping[str, Any]
    changes: list[Change]
    choice: Choice
    rank_state: RankState
    new_groups: Mapping[str, Sequence[int]]
    lines: list[str]


def check_resume(
    trainer: ResumableTrainer,
    settings: Settings,
    path: Path,
    checkpoint: Mapping[str, Any],
    changed: Changed,
) -> Checked:
    """Raise CheckpointError if a trainer cannot resume from a checkpoint; nothing changes.

    Args:
        settings: the settings with which the trainer was built.
        path: the path of the checkpoint.
        checkpoint: its contents, which stay unchanged.
        changed: the argument of `Trainer.resume`.
    """
    check_layout(checkpoint, path)
    _check_unit(trainer, checkpoint["meta"], path)
    model, weights = unwrap(trainer.model), weights_of(checkpoint)
    check_model_state(model, weights, strict=True, source=str(path))
    begun = settings.record_begin()
    by_name = ByName(trainer, checkpoint, begun.schedulers, path)
    by_name.arrange()
    checkpoint = by_name.checkpoint
    meta, states = checkpoint["meta"], checkpoint["param_schedulers"]
    check_groups(trainer.optimizer, checkpoint["optimizer"], path)
    _check_needed_hooks(trainer, meta, path)
    with refusing(f"{path} has meta.settings that cannot be compared with this trainer's"):
        changes = [*by_name.changes, *settings.compare(meta)]
    changes += type_changes(model, weights)
    changes += position_changes(meta, trainer.loader, changes)
    choice = choose(path, changed, changes, [*settings.compared, *by_name.names])
    states = Applying(trainer, begun).scheduler_states(states) if choice == "apply" else states
    _check_length(trainer, states, meta, path)
    rank_state = state_of_rank(checkpoint, trainer.rank, trainer.world_size, trainer.loader)
    return Checked(checkpoint, weights, changes, choice, rank_state, by_name.new_groups, by_name.lines)


def _check_unit(trainer: ResumableTrainer, meta: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of a run whose length, or whose iterations, are counted in another unit.

    The length is in epochs or iterations, and an iteration is a batch or an update of the weights.
    """
    counted = meta["settings"]["run"].get("unit", "batch")
    if counted != (own := trainer.counting.unit):
        raise CheckpointError(
            f"{path} counts iterations in the unit {counted!r}, this trainer in {own!r}, so neither its "
            f"counters nor its schedules fit: give the Trainer unit={counted!r}, or call "
            "load_checkpoint(path), which loads the weights alone"
        )
    saved = meta["max_epochs"] is not None
    if saved != trainer.by_epoch:
        units = ("epochs", "iterations") if saved else ("iterations", "epochs")
        raise CheckpointError(
            f"{path} is of a run measured in {units[0]}, this trainer counts {units[1]}: give the "
            f"Trainer {'max_epochs' if saved else 'max_iters'}, or call load_checkpoint(path), which "
            "loads the weights alone"
        )


def _check_needed_hooks(trainer: ResumableTrainer, meta: Mapping[str, Any], source: object) -> None:
    """Refuse a checkpoint if the trainer lacks a hook that wrote into it, such as one for averages."""
    own = {hook.name for hook in trainer.hooks}
    missing = [name for name in meta.get("needs_hooks", ()) if name not in own]
    if missing:
        raise CheckpointError(
            f"{source} cannot be resumed from without the hook {', '.join(missing)}, which wrote part of "
            "it: give the Trainer that hook under that name; load_checkpoint(path) loads the weights alone"
        )


def _check_length(
    trainer: ResumableTrainer, states: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], source: object
) -> None:
    """Refuse a run that was made longer than a OneCycleLR, which raises an error after its last step.

    Only a schedule that has counted the iterations or epochs of the run until now is refused.

    Args:
        states: the states with which the schedulers would continue.
        meta: the `meta` of the checkpoint, with the counters and the length of the former run.
        source: the path of the checkpoint, for the error.
    """
    for scheduler, state in zip(trainer.schedulers, states, strict=True):
        if type(scheduler) is not OneCycleLR:
            continue
        done = state["last_epoch"]
        unit = "iter" if done == meta["iter"] else "epoch" if done == meta["epoch"] else None
        former, own = (meta[f"max_{unit}s"], getattr(trainer, f"max_{unit}s")) if unit else (None, None)
        if former is None or own is None or own <= former or own <= (total := state["total_steps"]):
            continue
        raise CheckpointError(
            f"{source} cannot be resumed from, nothing was loaded: a OneCycleLR of total_steps={total} "
            f"raises after them, and this run has {own}; build it for all of them, and call "
            'resume(path, changed="apply")'
        )


def check_same_weights(weights: Mapping[str, Any], source: Path) -> None:
    """Compare the weights that are about to be loaded on all ranks; a collective.

    All ranks have read the same bytes, but a handler of `after_load_checkpoint` that acts on some ranks only,
    or damaged memory, may have changed the weights of one. DistributedDataParallel would never make them
    equal again. The cost is a hash of the weights in host memory, as much as the check of `state.pth` when it
    is read; with one rank nothing is computed.

    Raises:
        CheckpointError: the weights of a rank differ from rank 0's; the error names these ranks and their
            hosts.
        Exception: the weights of a rank cannot be hashed, for example for lack of memory; raised on all
            ranks.
    """
    if not has_other_ranks():
        return
    with raised_together("the comparison of the weights"):
        digest = _digest(weights)
    ranks = gather((this_rank(), digest))
    expected = ranks[0][1]
    if others := [(rank, digest) for rank, digest in ranks if digest != expected]:
        raise CheckpointError(
            f"{' and '.join(rank for rank, _ in others)} would load other weights of {source} than "
            f"{ranks[0][0]}: expected the SHA-256 {expected:.8}..., got {others[0][1]:.8}...; all have read "
            "the same bytes: a handler of after_load_checkpoint changes them on some ranks only, or memory "
            "is damaged there"
        )


def _digest(weights: Mapping[str, Any]) -> str:
    """Return a SHA-256 of the dense tensors with their names, types and shapes.

    It does not depend on their order. DTensors are left out, because each rank has another part of them.
    """
    digest = hashlib.sha256()
    for name in sorted(weights, key=str):
        value = weights[name]
        if not isinstance(value, torch.Tensor) or value.is_nested or value.is_quantized or is_dtensor(value):
            continue
        if value.layout is torch.strided:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
