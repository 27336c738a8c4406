"""Find the checkpoint that a path or a name denotes, and let every rank read that one.

If each rank searched by itself, a save that ends meanwhile would let them resume from different checkpoints.
So rank 0 searches, and sends the path and the SHA-256 of the manifest. `restoring` uses this module for
`Trainer.resume` and `Trainer.load_checkpoint`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from eventloop.checkpoint.commit import MANIFEST, PAYLOAD
from eventloop.checkpoint.directory import MOST_SCANS, SUFFIXES, find_checkpoints, scan
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
from eventloop.resume.setting_changes import Changed
from eventloop.state.exchange import (
    decided_by_rank_0,
    gather,
    has_other_ranks,
    raised_together,
    this_rank,
)
from eventloop.util.errors import CheckpointError

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.reader import Shards

_FEW = 5  # the most names of checkpoints in a message


ADVICE = (
    "a save may have replaced it meanwhile, or the hosts see different disks: expected a work_dir on a file "
    "system that all ranks share"
)


class OlderThan(NamedTuple):
    """Stands for the newest checkpoint of the run's lineage that has fewer iterations than `iteration`."""

    iteration: int


class WasRead(NamedTuple):
    """A checkpoint that was read and not loaded yet.

    Args:
        path: the checkpoint.
        checkpoint: its contents.
        newest: the last sequence number in the run's directories, before the checkpoint was read. A larger
            number there later means that another run has saved.
    """

    path: Path
    checkpoint: dict[str, Any]
    newest: int


class Resumed(NamedTuple):
    """The last resume, kept until the first pass after it, whose loader is compared.

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
    *,
    with_last: bool,
) -> Loaded:
    """Read the checkpoint that a path or a name denotes, in the directories as they are on this host.

    Args:
        path: "auto", "best", a path, the name of a checkpoint in one of `places`, or `OlderThan`.
        places: the directories in which the run saves checkpoints.
        watched: the metrics for "best"; the first of them that has a best checkpoint is used.
        check: called with the state of a checkpoint that "auto" or "best" would choose; another one is chosen
            if it raises CheckpointError. None for no check.
        read: reads the checkpoint at a path.
        with_last: whether the result needs the last sequence number in `places`, with which a later check
            finds out if another run has saved there. For it `places` are scanned also if `path` is a path.

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
    place, last = place_of(path, places), scan(*places).last if with_last else 0
    try:
        return read(place)._replace(path=place, last=last)
    except CheckpointError as error:
        if not place.is_dir():
            raise
        raise CheckpointError(f"{error}{what_else(place)}") from error


class _Chosen(NamedTuple):
    """The checkpoint that rank 0 has read, in the form in which it is sent to the other ranks."""

    path: Path
    sha256: str
    last: int
    host: str


def find_on_all_ranks(
    look: Callable[[Read], Loaded], live: Callable[[str], Any] = lambda name: None, *, again: bool
) -> Loaded:
    """Let rank 0 search for a checkpoint, and read exactly that one on every rank; a collective.

    An error of the search is raised on all ranks. So is an error of one rank that cannot read the checkpoint,
    or finds another manifest at its path. A checkpoint of several files, its shards, is checked as well: each
    rank compares some of the files with their hashes. If a file is damaged, rank 0 searches again.

    Args:
        look: searches for the checkpoint, and reads it with the function that it is called with. It is called
            on rank 0 alone.
        live: returns the tensor of this process that has a parameter's name, as for `read_checkpoint`.
        again: whether rank 0 searches again if the chosen checkpoint is damaged, or was replaced or removed
            before all ranks had read it, as a save that ends meanwhile may do. False for a path.

    Raises:
        CheckpointError: a rank cannot read that checkpoint; the error names the rank and its host.
        Exception: `look` has raised it.
    """
    damaged: dict[Path, str] = {}  # for each damaged checkpoint the error
    while True:
        loaded = _find_alike(partial(look, partial(_read_undamaged, damaged)), again=again)
        if (shards := loaded.shards) is None:
            return loaded
        damage = "; ".join(filter(None, _damage_by_rank(shards)))
        if not damage:
            with raised_together(f"reading the shards of {loaded.path}"):
                return loaded._replace(state=shards.fill(loaded.state, live), shards=None)
        if not again:
            raise CheckpointError(damage)
        damaged[loaded.path] = damage


def _damage_by_rank(shards: Shards) -> list[str]:
    """Let each rank check some of the files; return by rank the damage found, or "". A collective."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)
    with raised_together(f"reading {shards.directory}"):
        own = shards.damage(rank, ranks)
    return gather(own)


def _read_undamaged(damaged: Mapping[Path, str], path: Path) -> Loaded:
    """Read a checkpoint without its shards on rank 0; raise its error if a shard is known to be damaged.

    The states of all ranks are read, so that rank 0 finds out if one of these files is damaged, too.

    Args:
        damaged: the errors of damaged checkpoints, by path.
    """
    if path in damaged:
        raise CheckpointError(damaged[path])
    return read_small_part(path)


def _find_alike(look: Callable[[], Loaded], *, again: bool) -> Loaded:
    """Let rank 0 search for a checkpoint, and read exactly that one on every rank, without its shards."""
    if not has_other_ranks():
        return look()
    for searches in range(1, MOST_SCANS + 1):
        own: list[Loaded] = []  # the checkpoint that rank 0 has read; empty on other ranks

        def choose(own: list[Loaded] = own) -> _Chosen:
            own.append(look())
            return _Chosen(own[0].path, own[0].sha256, own[0].last, socket.gethostname())

        chosen = decided_by_rank_0(choose)
        try:
            with raised_together(f"reading {chosen.path}"):
                return own[0] if own else _read_chosen(chosen)
        except Exception:
            may_repeat = again and searches < MOST_SCANS
            if not decided_by_rank_0(lambda: may_repeat and not _is_still(chosen)):  # noqa: B023
                raise
    raise AssertionError("the last look returns or raises")


def _is_still(chosen: _Chosen) -> bool:
    """Return whether the chosen checkpoint is unchanged; True for a file, which has no manifest."""
    try:
        return not chosen.sha256 or read_identified(chosen.path)[1] == chosen.sha256
    except CheckpointError:
        return False


def _read_chosen(chosen: _Chosen) -> Loaded:
    """Read the checkpoint that rank 0 has chosen, on another rank."""
    path = chosen.path.absolute()
    try:
        loaded = read_small_part(chosen.path, rank=dist.get_rank())
        loaded = loaded._replace(path=chosen.path, last=chosen.last)
    except (OSError, CheckpointError) as error:
        # never FileNotFoundError: on it a script may start a new run, while the other ranks resume
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


# --- paths and names ---------------------------------------------------------------------------------------


def place_of(path: object, places: Sequence[Path]) -> Path:
    """Return the path of a checkpoint that is given by its path, or by its name in a directory of the run.

    Args:
        path: the path or the name. A suffix such as ".pth" is dropped if only the name without it exists.
        places: the directories in which the run saves checkpoints.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        TypeError, ValueError: `path` is not a path or a name.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'expected "auto", "best", or the path or name of a checkpoint, got {path!r}{_AUTO}')
    if not str(path):
        raise ValueError(f'expected "auto", "best", or the path or name of a checkpoint, got ""{_AUTO}')
    path = Path(path)
    names = [path.name, path.stem] if path.suffix in SUFFIXES else [path.name]
    if any((path.parent / name).exists() for name in names):
        return _one(path, places)
    folders = places if len(path.parts) == 1 else [path.parent]
    existing = [place / name for place in folders for name in names if (place / name).exists()]
    if existing:
        return _one(existing[0], places)
    known = [*dict.fromkeys(each.name for place in folders for each in reversed(find_checkpoints(place)))]
    if known:
        verb = "is" if len(known) == 1 else "are"
        hint = f": there {verb} {_newest(known)}{_AUTO if folders is places else ''}"
    else:
        hint = ", which holds no checkpoint" if folders is places else f": {path.parent} holds no checkpoint"
    looked = f", nor one of that name in {' or '.join(map(str, places))}" if folders is places else ""
    raise FileNotFoundError(f"no checkpoint at {path}{looked}{hint}")


def what_else(place: Path) -> str:
    """Return the end of an error message about an unreadable checkpoint, with what the user may try."""
    command = f"eventloop checkpoints {place.parent} --verify"
    return f'; "auto" takes the newest intact checkpoint, and `{command}` checks each'


_AUTO = ': "auto" takes the newest one'


def _one(path: Path, places: Sequence[Path]) -> Path:
    """Return `path`, or raise FileNotFoundError if it is a directory that is not a checkpoint."""
    if not path.is_dir() or any(os.path.lexists(path / name) for name in (MANIFEST, PAYLOAD)):
        return path
    known = [each.name for each in reversed(find_checkpoints(path))]
    if not known:
        raise FileNotFoundError(
            f"{path} is not a checkpoint, as it has no {MANIFEST}, and it holds no checkpoints"
        )
    auto = _AUTO if any(path.resolve() == place.resolve() for place in places) else ""
    raise FileNotFoundError(f"{path} is not a checkpoint, but a directory of them: {_newest(known)}{auto}")


def _newest(known: Sequence[str]) -> str:
    more = f" and {len(known) - _FEW} more" if len(known) > _FEW else ""
    return f"{', '.join(known[:_FEW])}{more}{', the newest first' if len(known) > 1 else ''}"
