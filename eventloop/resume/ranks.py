"""Hold the state of each rank in a checkpoint, and choose each rank's part of it on a resume.

Every rank draws its own random numbers: for dropout, and in the workers of its loader for augmentation. So
the checkpoint holds the random state and the loader position of every rank. Rank 0 gathers and writes them;
if a rank has ended, the checkpoint is saved with the state of rank 0 alone. Ranks whose model is sharded each
write their own, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from eventloop.checkpoint.weights import unwrap
from eventloop.data.loader_info import is_stream
from eventloop.data.loader_state import random_state, samplers_of
from eventloop.data.position import LoaderPosition
from eventloop.data.readers import has_own_state
from eventloop.data.rng import module_generators, rng_state, set_module_generators, set_rng_state
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import OF_RANKS, POSITION, Change
from eventloop.state.exchange import gather_on_rank_0
from eventloop.state.remembered import KEY
from eventloop.state.schema import refusing
from eventloop.state.sharded import is_dtensor
from eventloop.state.tensors import with_tensors


def present_position(trainer: ResumableTrainer) -> Callable[[], None]:
    """Return a function that restores the present counters, loader position and random generators."""
    model = unwrap(trainer.model)
    counters = trainer.iter, trainer.epoch, trainer.metrics.iter, trainer.metrics.epoch
    position, generators = trainer.position.snapshot(), module_generators(model)

    def restore() -> None:
        trainer.iter, trainer.epoch, trainer.metrics.iter, trainer.metrics.epoch = counters
        position()
        set_module_generators(model, generators)

    return restore


def own_state(checkpoint: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Return a rank's own state: random state, loader position, buffers, and what the program remembers."""
    return {
        **({KEY: checkpoint[KEY]} if KEY in checkpoint else {}),
        "rng": checkpoint["rng"],
        "position": checkpoint["meta"]["position"],
        "buffers": _own_buffers(model, checkpoint["state_dict"]),
    }


def add_ranks(checkpoint: dict[str, Any], model: torch.nn.Module) -> None:
    """Add the states of the other ranks to a checkpoint, on rank 0; a collective that waits for the GPU."""
    own = own_state(checkpoint, model)
    own |= {key: with_tensors(own[key], torch.Tensor.cpu) for key in ("buffers", KEY) if key in own}
    if (ranks := gather_on_rank_0(own)) is not None:
        checkpoint["ranks"] = [None, *ranks[1:]]


def _own_buffers(model: torch.nn.Module, saved: Container[str]) -> dict[str, torch.Tensor]:
    """Return the saved buffers in which the ranks differ; these are the live ones.

    The ranks differ if nothing broadcasts rank 0's buffers in each forward pass, as DistributedDataParallel
    does by default. FSDP2 and tensor parallelism never do; then buffers that are DTensors are in the shards.

    Args:
        model: the model, as the trainer has it.
        saved: the names in the model's `state_dict`.
    """
    model, inner = getattr(model, "_orig_mod", model), unwrap(model)  # inside torch.compile
    ddp = isinstance(model, DistributedDataParallel)
    if model.broadcast_buffers if ddp else not any(map(is_dtensor, inner.parameters())):
        return {}
    buffers = ((name, buffer) for name, buffer in inner.named_buffers() if name in saved)
    return {name: buffer.detach() for name, buffer in buffers if not is_dtensor(buffer)}


class RankState(NamedTuple):
    """The part of a checkpoint from which one rank resumes.

    Args:
        rng: the rank's random state; None to keep the current one.
        position: the rank's position in the loader.
        inexact: the reason why the resume is not exact, for the log; "" if it is exact.
        buffers: the buffers in which the ranks differ, by name.
        remembered: the states that the program keeps in its own variables, by name.
    """

    rng: Mapping[str, Any] | None
    position: Mapping[str, Any]
    inexact: str = ""
    buffers: Mapping[str, torch.Tensor] = {}
    remembered: Mapping[str, Any] = {}

    def load_buffers(self, model: torch.nn.Module) -> None:
        """Copy the buffers of this rank into those of the model with the same name and shape."""
        own = dict(unwrap(model).named_buffers())
        for name, buffer in self.buffers.items():
            if name in own and own[name].shape == buffer.shape:
                own[name].copy_(buffer)


def state_of_rank(
    checkpoint: Mapping[str, Any], rank: int, world_size: int, loader: Iterable[Any] | None
) -> RankState:
    """Return the part of a checkpoint from which a rank resumes.

    It is the part that the rank of the same number saved. A rank that the checkpoint does not have keeps its
    current random state.

    Args:
        rank, world_size: the number of this rank, and the number of ranks of this run.
        loader: the loader of this run, whose random state such a rank keeps.
    """
    meta, others = checkpoint["meta"], checkpoint.get("ranks")
    first = RankState(checkpoint["rng"], meta["position"], remembered=checkpoint.get(KEY, {}))
    saved = len(others) if isinstance(others, list) else meta["settings"]["run"].get("world_size")
    parts = dict(enumerate(others)) if isinstance(others, list) else others or {}
    if others is None and saved != 1 and world_size > 1:
        return first._replace(inexact=_of_rank_0(first.remembered))
    inexact = "" if saved in (None, world_size) else _of_other_ranks(saved, world_size)
    if rank == 0:
        own_part = others.get(0) if isinstance(others, Mapping) else None  # of ranks that save together
        inexact += _left_out(parts, world_size)
        return first._replace(inexact=inexact, buffers={} if own_part is None else own_part["buffers"])
    if (part := parts.get(rank)) is not None:
        return RankState(part["rng"], part["position"], inexact, part["buffers"], part.get(KEY, {}))
    own = {"opened_with": random_state(loader), "generators": {}, "loader": {}}
    return RankState(
        None, {**meta["position"], **own}, f"{inexact}; rank {rank} continues with its own random state"
    )


def _of_rank_0(remembered: Iterable[str]) -> str:
    also = f", and the remembered states {_quoted(remembered)}," if remembered else ""
    own = f"the random state and the loader position{also} of rank 0 alone"
    return f"it has {own}: every rank continues with them"


def _of_other_ranks(saved: int, world_size: int) -> str:
    return f"it was saved by {saved} ranks, and this run has {world_size}: random numbers differ from here on"


def _left_out(parts: Mapping[int, Mapping[str, Any] | None], world_size: int) -> str:
    """Return the end of a text that names the remembered states of ranks that this run does not have."""
    states = [
        f"{_quoted(part[KEY])} of rank {rank}"
        for rank, part in parts.items()
        if rank >= world_size and part is not None and part.get(KEY)
    ]
    return f"; no rank gets the remembered states {', '.join(states)}" if states else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def position_changes(
    meta: Mapping[str, Any], loader: Iterable[Any] | None, changes: Iterable[Change]
) -> list[Change]:
    """Return the change of a position that no other number of ranks can continue from, because it is lost.

    An IterableDataset, and a loader with a state of its own, have a position in the data of one rank.
    """
    batch_idx = meta["position"]["batch_idx"]
    if not (batch_idx and _has_other_ranks(changes) and _is_of_one_rank(loader)):
        return []
    was = f"batch {batch_idx} of a pass over one rank's part of a {type(loader).__name__}"
    return [Change(POSITION, was, "the beginning of the pass", "given")]


def load_place(
    trainer: ResumableTrainer,
    meta: Mapping[str, Any],
    rank_state: RankState,
    changes: Iterable[Change],
    path: Path,
) -> str:
    """Load the counters, the position and the random state, and return where the pass continues."""
    trainer.iter = trainer.metrics.iter = int(meta["iter"])
    trainer.epoch = trainer.metrics.epoch = int(meta["epoch"])
    before = rng_state()
    with refusing(f"{path} cannot be resumed from, its random state is invalid"):
        trainer.position.load_state_dict(rank_state.position)
        set_rng_state(before if rank_state.rng is None else rank_state.rng)
        if rank_state.rng is not None:
            set_module_generators(unwrap(trainer.model), rank_state.rng.get("modules", {}))
    return move_position(trainer.position, trainer.loader, changes)


def move_position(position: LoaderPosition, loader: Iterable[Any] | None, changes: Iterable[Change]) -> str:
    """Convert the position of a checkpoint to one in this run's loader, and return a text for the log."""
    by_name = {change.name: change for change in changes}
    other_ranks = _has_other_ranks(by_name.values())
    if loader is None:
        return ""
    if other_ranks:
        position.drop_states_of_ranks(begins_again=_is_of_one_rank(loader))
    length = by_name.get("loader_length")
    lengths = None if length is None or None in (length.saved, length.own) else (length.saved, length.own)
    place = position.move_to(loader, lengths, same_data="dataset_length" not in by_name)
    if not other_ranks:
        return place if "batch_size" in by_name or lengths is not None else ""
    samplers = {} if "sampler" in by_name else samplers_of(loader)
    divided = any(isinstance(each, DistributedSampler) for each in samplers.values())
    return place and f"{place}{'' if divided else _IF_DIVIDED}"


_IF_DIVIDED = ", if the ranks divide one order of the samples, as with a DistributedSampler"


def _has_other_ranks(changes: Iterable[Change]) -> bool:
    return any(change.name in OF_RANKS for change in changes)


def _is_of_one_rank(loader: Iterable[Any] | None) -> bool:
    return loader is not None and (is_stream(loader) or has_own_state(loader))
