"""Fill the tensors of a program from a checkpoint that several ranks have written, without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from eventloop.checkpoint.manifest import check_sizes, read_manifest
from eventloop.checkpoint.sharded.reader import Entry, Shards
from eventloop.util.errors import CheckpointError
from eventloop.util.suggest import near


def load_sharded(path: str | Path, tensors: Mapping[str, torch.Tensor], *, verify: bool = True) -> list[str]:
    """Fill tensors in place from a checkpoint that several ranks have written; return the keys left out.

    Each process reads what its tensors need, which for a DTensor is this rank's part. The mesh and placements
    may differ from those of the ranks that have written it. No process waits for another one, and no code
    from a file is executed. Nothing is changed unless all tensors fit and the files are intact.

        from eventloop.checkpoint import load_sharded

        weights = {f"state_dict.{name}": tensor for name, tensor in model.state_dict().items()}
        left_out = load_sharded("runs/large/epoch_3", weights)
        assert not [key for key in left_out if key.startswith("state_dict.")]

    Args:
        path: the checkpoint's directory.
        tensors: plain tensors and DTensors by key: `state_dict.<name>`, `ema_state_dict.<name>`, or
            `optimizer.<parameter>.<state>`, such as `optimizer.head.weight.exp_avg`.
        verify: first compare every file that has a part of these tensors with its hash. With False only
            sizes are compared; it is for programs of many ranks, one of which calls `verify_checkpoint`.

    Returns:
        The keys of the checkpoint's tensors that `tensors` lacks.

    Raises:
        CheckpointError: the path is not a checkpoint of several ranks, it is damaged, it lacks keys, or
            tensors have other shapes or types; the message lists all such keys and tensors.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest.ranks is msgspec.UNSET:
        raise CheckpointError(
            f"{path}: expected a checkpoint that several ranks have written, got one of a single process: "
            "load_checkpoint reads it"
        )
    shards = Shards.of(path, manifest)
    reasons = [_why_not(key, tensor, shards.entries) for key, tensor in tensors.items()]
    if misfits := [reason for reason in reasons if reason]:
        lines = "\n  ".join(misfits)
        raise CheckpointError(f"{path} does not fit the tensors; nothing was loaded:\n  {lines}")
    check_sizes(path, manifest)
    chunks = [chunk for key in tensors for chunk in shards.entries[key].chunks]
    files = {file for _, _, file, _, _ in chunks}
    if verify and (damage := shards.damage_in(sorted(files))):
        raise CheckpointError(damage)
    shards.read(dict(tensors))
    return [key for key in shards.entries if key not in tensors]


def _why_not(key: str, tensor: object, entries: Mapping[str, Entry]) -> str:
    """Return why a tensor cannot be filled; "" if it can."""
    if (entry := entries.get(key)) is None:
        return f"{key}: not in the checkpoint{near(key, entries)}"
    if not isinstance(tensor, torch.Tensor):
        return f"{key}: expected a tensor, got a {type(tensor).__name__}"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"{key}: expected a dense tensor with memory, got one of {tensor.layout} on {tensor.device}"
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return f"{key}: expected a DTensor that is sharded or replicated, got one of {tensor.placements}"
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.type:
        saved, own = f"{entry.shape} of {entry.type}", f"{tuple(tensor.shape)} of {tensor.dtype}"
        return f"{key}: the checkpoint has {saved}, the tensor is {own}"
    return ""
