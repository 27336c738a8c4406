"""Choose the checkpoint to load, and let every rank read that one.

A save may end between the looks of two ranks, which would then resume from different checkpoints. So rank 0
looks, and sends the path and the SHA-256 of the manifest. `TrainerState` uses this module for
`Trainer.resume` and `Trainer.load_checkpoint`.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from eventloop.checkpoint.directory import MOST_SCANS
from eventloop.checkpoint.manifest import read_identified
from eventloop.checkpoint.store import (
    Check,
    Loaded,
    Read,
    read_best,
    read_newest,
    read_older,
    read_small_part,
)
from eventloop.checkpoint.weights import LOADS_OWN, OWN
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.ranks import RankState
from eventloop.resume.resolve_path import place_of, what_else
from eventloop.resume.setting_changes import Change, Changed, Choice
from eventloop.state.exchange import (
    decided_by_rank_0,
    gather,
    has_other_ranks,
    raised_together,
    this_rank,
)
from eventloop.state.schema import refusing
from eventloop.state.sharded import is_dtensor
from eventloop.util.errors import CheckpointError

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.reader import Shards

ADVICE = (
    "a save may have replaced it meanwhile, or the hosts see different disks: expected a work_dir on a file "
    "system that all ranks share"
)


class OlderThan(NamedTuple):
    """The newest checkpoint of the run's lineage with fewer iterations than this one."""

    iteration: int


class WasRead(NamedTuple):
    """A checkpoint that was read and not loaded yet.

    Args:
        path: the checkpoint.
        checkpoint: its contents.
        newest: the last sequence number in the directories of the run before it was read.
    """

    path: Path
    checkpoint: dict[str, Any]
    newest: int


class Resumed(NamedTuple):
    """The checkpoint that was resumed from last, for the comparison with the loader of the next pass.

    Args:
        path: the checkpoint.
        meta: its `meta`.
        changed: the argument `changed` of `Trainer.resume`.
        loader: the loader that `resume` compared; None if the trainer had no loader yet.
    """

    path: Path
    meta: Mapping[str, Any]
    changed: Changed
    loader: Iterable[Any] | None


class Checked(NamedTuple):
    """A checkpoint that the trainer can resume from, arranged as its own parameters are.

    Args:
        checkpoint: the contents of the checkpoint.
        weights: the weights with which the run continues.
        changes: the changed settings.
        choice: which values count where the run could continue with either.
        rank_state: the state of this rank.
        lines: lines for the log.
    """

    checkpoint: Mapping[str, Any]
    weights: Mapping[str, Any]
    changes: list[Change]
    choice: Choice
    rank_state: RankState
    lines: list[str]


def weights_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights with which a resumed run continues."""
    weights: Mapping[str, Any] = checkpoint.get(OWN, checkpoint["state_dict"])
    return weights


def loaded_weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights that `load_checkpoint` loads."""
    weights: Mapping[str, Any] = checkpoint[OWN if checkpoint.get(LOADS_OWN) else "state_dict"]
    return weights


def find(
    path: str | Path | OlderThan,
    places: Sequence[Path],
    watched: Sequence[str],
    check: Check | None,
    read: Read,
) -> Loaded:
    """Read the checkpoint that a path or a name denotes, as this process sees the directories.

    Args:
        path: "auto", "best", a path, the name of a checkpoint in one of `places`, or `OlderThan`.
        places: the directories in which the run saves checkpoints.
        watched: the metrics of "best": the first of them for which there is a best checkpoint counts.
        check: an additional check of the states that "auto" and "best" choose from.
        read: reads one checkpoint.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it cannot be read.
        TypeError, ValueError: `path` is not a path or a name.
    """
    if isinstance(path, OlderThan):
        return read_older(places, path.iteration, check, read)
    if str(path) == "auto":
        return read_newest(places, check, read)
    if str(path) == "best":
        return read_best(places, check=check, prefer=watched, read=read)
    place = place_of(path, places)
    try:
        return read(place)._replace(path=place)
    except CheckpointError as error:
        if not place.is_dir():
            raise
        raise CheckpointError(f"{error}{what_else(place)}") from error


class _Chosen(NamedTuple):
    """The checkpoint that rank 0 has read, as it tells the other ranks."""

    path: Path
    sha256: str
    host: str


def find_on_all_ranks(
    look: Callable[[Read], Loaded], live: Callable[[str], Any] = lambda name: None, *, again: bool
) -> Loaded:
    """Let rank 0 look for a checkpoint, and read exactly that one on every rank; a collective.

    An error of `look` is raised on all ranks. All raise too if one rank cannot read the checkpoint, or finds
    another manifest at its path. Of a checkpoint with shards the ranks read the small part, and compare the
    files with their hashes, each rank its share. If a file is damaged, rank 0 looks for another checkpoint.

    Args:
        look: finds and reads the checkpoint with a function that it is given, on rank 0 alone.
        live: returns the tensor of this process that has a parameter's name, as for `read_checkpoint`.
        again: whether rank 0 looks again if the checkpoint that it chose was replaced or removed before all
            ranks had read it, as a save that ends meanwhile may do.

    Raises:
        CheckpointError: a rank cannot read that checkpoint; the error names the rank and its host.
        Exception: `look` has raised it.
    """
    damaged: dict[Path, str] = {}
    while True:
        loaded = _find_alike(partial(look, partial(_read_undamaged, damaged)), again=again)
        if (shards := loaded.shards) is None:
            return loaded
        if not (wrong := "; ".join(filter(None, _damage_by_rank(shards)))):
            with raised_together(f"reading the shards of {loaded.path}"):
                return loaded._replace(state=shards.fill(loaded.state, live), shards=None)
        if not again:
            raise CheckpointError(wrong)
        damaged[loaded.path] = wrong


def _damage_by_rank(shards: Shards) -> list[str]:
    """Return what each rank finds wrong with its share of the files; a collective."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)
    with raised_together(f"reading {shards.directory}"):
        own = shards.damage(rank, ranks)
    return gather(own)


def _read_undamaged(damaged: Mapping[Path, str], path: Path) -> Loaded:
    """Read the small part of a checkpoint, unless it is known to be damaged.

    Rank 0 reads that of all ranks, so that it finds another checkpoint if the file of one is damaged.
    """
    if path in damaged:
        raise CheckpointError(damaged[path])
    return read_small_part(path)


def _find_alike(look: Callable[[], Loaded], *, again: bool) -> Loaded:
    """Let rank 0 look for a checkpoint, and read exactly that one on every rank; a collective."""
    if not has_other_ranks():
        return look()
    for looks in range(1, MOST_SCANS + 1):
        own: list[Loaded] = []  # what rank 0 has read

        def choose(own: list[Loaded] = own) -> _Chosen:
            own.append(look())
            return _Chosen(own[0].path, own[0].sha256, socket.gethostname())

        chosen = decided_by_rank_0(choose)
        try:
            with raised_together(f"reading {chosen.path}"):
                return own[0] if own else _read_chosen(chosen)
        except Exception:
            may_repeat = again and looks < MOST_SCANS
            if not decided_by_rank_0(lambda: may_repeat and not _is_still(chosen)):  # noqa: B023
                raise
    raise AssertionError("the last look returns or raises")


def _is_still(chosen: _Chosen) -> bool:
    """Return whether the path still has the checkpoint that was chosen; true of a single file."""
    try:
        return not chosen.sha256 or read_identified(chosen.path)[1] == chosen.sha256
    except CheckpointError:
        return False


def _read_chosen(chosen: _Chosen) -> Loaded:
    """Read the checkpoint that rank 0 has chosen, on another rank."""
    path = chosen.path.absolute()
    try:
        loaded = read_small_part(chosen.path, rank=dist.get_rank())._replace(path=chosen.path)
    except (OSError, CheckpointError) as error:
        # never FileNotFoundError: a script that begins anew where there is no checkpoint would do so here
        raise CheckpointError(
            f"{this_rank()} cannot read {path}, which rank 0 on host {chosen.host} has read: {error}; "
            f"{ADVICE}"
        ) from error
    if loaded.sha256 != chosen.sha256:
        raise CheckpointError(
            f"{this_rank()} finds another checkpoint at {path} than rank 0 on host {chosen.host} has read: "
            f"expected a manifest with the SHA-256 {chosen.sha256:.8}..., got {loaded.sha256:.8}...; {ADVICE}"
        )
    return loaded


def check_same_weights(weights: Mapping[str, Any], source: Path) -> None:
    """Compare the weights that are about to be loaded on all ranks; a collective.

    All ranks have read the same bytes. A handler of `after_load_checkpoint` that acts on some ranks only, or
    broken memory, gives one of them other weights all the same, and ranks that train with
    DistributedDataParallel would stay different for good. The cost is one hash of the weights in host memory,
    as that of `state.pth` when it was read; with one rank nothing is computed.

    Raises:
        CheckpointError: the weights of a rank differ from rank 0's; the error names these ranks and their
            hosts.
        Exception: the weights of a rank cannot be hashed, as without memory; raised on all ranks.
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
    """Return a SHA-256 of the dense tensors, with their names, types and shapes, whatever their order.

    DTensors are left out: each rank has another part of them.
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


def check_unit(trainer: ResumableTrainer, meta: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of a run that counts something else: epochs or iterations, batches or updates."""
    with refusing(f"{path} has meta.settings without those of the run"):
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
