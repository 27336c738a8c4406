"""Write and read checkpoints; each is a directory that is either complete or not a checkpoint.

`state.pth` is the state as `torch.save` writes it: a mapping with MMEngine's keys `meta` (counters),
`state_dict` (the model), `optimizer`, `param_schedulers`, `hooks` (by name) and `rng`; plain
`torch.load(path, weights_only=True)` reads it. `manifest.json` describes the state and has the SHA-256 of
every file; it is written last. A checkpoint that several ranks have written also has shards (`sharded`),
files with the chunks of tensors. `Trainer.resume` reads checkpoints with this module. The saver does not use
it: it encodes with the module `serialize` and writes with `commit`.

Invariants at every moment, also after a power cut: a checkpoint that has its final name has all its bytes; no
checkpoint is overwritten; no checkpoint is removed before its successor is durable. The newest and the best
are found by reading the manifests, so there is no pointer file that could be wrong.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import torch

from eventloop.checkpoint.commit import PAYLOAD, commit
from eventloop.checkpoint.directory import MOST_SCANS, SUFFIXES, Found, find_checkpoints, scan
from eventloop.checkpoint.disk import DISK, Disk
from eventloop.checkpoint.external_weights import as_checkpoint, read_safetensors, whole_objects
from eventloop.checkpoint.manifest import SAFETENSORS, Label, Manifest, open_verified, read_identified
from eventloop.checkpoint.serialize import serialize
from eventloop.util.errors import CheckpointError
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.reader import Shards

logger = logging.getLogger("eventloop")

_NO_LABEL = Label()


def save_checkpoint(
    state: Mapping[str, Any], path: str | Path, label: Label = _NO_LABEL, *, disk: Disk = DISK
) -> int:
    """Write a checkpoint durably and return the size of its payload in bytes.

    `eventloop.checkpoint.commit` describes the order of the operations. If `path` exists, the former
    checkpoint stays until the new one is durable under another name.

    Args:
        state: the state.
        path: the checkpoint's path.
        label: the fields of the manifest that cannot be read from the state, such as its sequence number.
        disk: the file operations, which tests replace.

    Raises:
        OSError: the disk is full, the directory cannot be written, or another error of the file system.
        TypeError: a tensor of the state is sharded over ranks.
        CheckpointError: the manifest could not be read again.
    """
    (outcome,) = commit([serialize(state, Path(path), label)], disk)
    for warning in outcome.warnings:
        logger.warning("%s", warning)
    if outcome.error is not None:
        raise outcome.error
    return outcome.bytes


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint without executing code from it; check the hash of every file first.

    Args:
        path: a checkpoint's directory, or a single file that was published or written by another program;
            single files are read without checking a hash. A file that has only weights, of torch or
            safetensors, is returned as a checkpoint with only a `state_dict`.
        map_location: the device to load tensors to, as in `torch.load`; for safetensors only a device.

    Raises:
        FileNotFoundError: the path does not exist; the message names checkpoints of its folder.
        CheckpointError: the path is not a checkpoint, is incomplete, is damaged, or has a later version.
        TypeError: `map_location` is not a device, for safetensors.
        ImportError: the file needs safetensors, which is not installed.
    """
    return read_checkpoint(path, map_location).state


class Loaded(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        path: its path.
        state: its state.
        sha256: the SHA-256 of its manifest, which identifies all its bytes; "" for a single file.
        shards: the shards that are not read yet, if several ranks have written it.
        last: the last sequence number in the directories that were scanned to find it; 0 without a scan.
    """

    path: Path
    state: dict[str, Any]
    sha256: str = ""
    shards: Shards | None = None
    last: int = 0


def read_checkpoint(
    path: str | Path,
    map_location: Any = "cpu",
    live: Callable[[str], torch.Tensor | None] = lambda name: None,
) -> Loaded:
    """Read a checkpoint as `load_checkpoint` does, and return it with its path and its manifest's hash.

    Args:
        path, map_location: as in `load_checkpoint`.
        live: returns this process's tensor with the name of a parameter, or None. If that is a DTensor, only
            this rank's part of it is read from the shards.
    """
    loaded = read_small_part(path, map_location)
    if loaded.shards is None:
        return loaded
    if damage := loaded.shards.damage():
        raise CheckpointError(damage)
    is_device = isinstance(map_location, str | torch.device)
    state = loaded.shards.fill(loaded.state, live, device=map_location if is_device else "cpu")
    return loaded._replace(state=state, shards=None)


def read_small_part(path: str | Path, map_location: Any = "cpu", rank: int | None = None) -> Loaded:
    """Read all of a checkpoint but its shards, which hold the chunks of large tensors.

    A checkpoint that one process has written has no shards, and is read completely.

    Args:
        path, map_location: as in `load_checkpoint`.
        rank: the rank whose own random state and loader position are read; None reads those of all ranks.
    """
    path = Path(path)
    if path.suffix in SUFFIXES and not path.exists() and path.with_suffix("").is_dir():
        path = path.with_suffix("")  # "epoch_3.pth", as MMEngine names it, also finds the directory "epoch_3"
    if not path.exists():
        existing = [checkpoint.name for checkpoint in find_checkpoints(path.parent)]
        hint = suggest(path.name, existing) if existing else f": {path.parent} holds no checkpoint"
        raise FileNotFoundError(f"no checkpoint at {path}{hint}")
    if path.suffix == SAFETENSORS and not path.is_dir():
        return Loaded(path, as_checkpoint(read_safetensors(path, map_location), path))
    if path.is_dir():
        manifest, sha256 = read_identified(path)
        if manifest.ranks is not msgspec.UNSET:
            return _read_sharded(path, manifest, sha256, map_location, rank)
        with open_verified(path, PAYLOAD, manifest) as file:
            return Loaded(path, _read_state(file, path, map_location), sha256)
    with open(path, "rb") as file:
        return Loaded(path, _read_state(file, path, map_location))


def _read_sharded(path: Path, manifest: Manifest, sha256: str, map_location: Any, rank: int | None) -> Loaded:
    """Read a sharded checkpoint's small files, and of the ranks' own states only those of `rank`."""
    from eventloop.checkpoint.sharded.reader import Shards  # it imports torch.distributed.checkpoint

    shards = Shards.of(path, manifest)
    payload = _read_state(shards.small_file(PAYLOAD), path, map_location)
    own_states = {owner: _load(file, path, map_location) for owner, file in shards.own_files(rank).items()}
    return Loaded(path, {**payload, "ranks": own_states}, sha256, shards)


def _read_state(file: BinaryIO, path: Path, map_location: Any) -> dict[str, Any]:
    return as_checkpoint(_load(file, path, map_location), path)


def _load(file: BinaryIO, path: Path, map_location: Any) -> Any:
    """Read what `torch.save` has written, without executing code; raise CheckpointError for other files."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.15 warns of each sparse tensor
            state = torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        if reason := whole_objects(error) or _other_file(file):
            raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from None
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    return _with_own_bytes(state)


def _other_file(file: BinaryIO) -> str:
    """Return an error text for a file that `torch.save` has not written, such as a text file; else ""."""
    file.seek(0)
    begin = file.read(16)
    # torch.save writes a zip archive; before PyTorch 1.6 it wrote a pickle
    if begin.startswith((b"PK", b"\x80\x02")):
        return ""
    return f"expected a file that torch.save has written, got one that begins with {begin!r}"


def _with_own_bytes(value: Any) -> Any:
    """Give each vector of uint8 in a state a storage of its own, because several share one in a file.

    Such vectors are states of random generators. `set_state` of a `torch.Generator` reads a state from the
    start of the storage, wherever the vector begins, and ends the process if other bytes are there.
    """
    if isinstance(value, torch.Tensor):
        is_vector = value.dtype == torch.uint8 and value.ndim == 1
        return value.clone() if is_vector and value.numel() != value.untyped_storage().nbytes() else value
    if type(value) is tuple:
        return tuple([_with_own_bytes(item) if isinstance(item, _NESTED) else item for item in value])
    if type(value) in (dict, list):
        for key, item in value.items() if type(value) is dict else enumerate(value):
            if isinstance(item, _NESTED):
                value[key] = _with_own_bytes(item)
    return value


_NESTED = (torch.Tensor, dict, list, tuple)
"""The types of values in a state that are, or may contain, tensors."""


Check = Callable[[dict[str, Any], str], object]
"""The type of a function (state, name) that raises CheckpointError if the state cannot be used."""
Read = Callable[[Path], Loaded]
"""The type of a function that reads a checkpoint, or raises CheckpointError or OSError."""


def load_newest(
    directory: str | Path | Sequence[str | Path], check: Check | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return the newest intact checkpoint and its state; log newer ones that cannot be used.

    Args:
        directory: the directory to scan, or all directories that the hooks of a run save in.
        check: an additional check, which raises CheckpointError for a state that cannot be used.

    Raises:
        FileNotFoundError: no checkpoint can be used.
    """
    return read_newest(directory, check)[:2]


def read_newest(
    directory: str | Path | Sequence[str | Path], check: Check | None = None, read: Read | None = None
) -> Loaded:
    """Read the newest intact checkpoint as `load_newest` does, with its manifest's hash.

    Args:
        directory, check: as in `load_newest`.
        read: the function that reads a checkpoint; None means `read_checkpoint`.

    Raises:
        FileNotFoundError: no checkpoint can be used.
    """
    found, loaded = _first_whole(_directories(directory), lambda found: found.paths[::-1], check, read)
    if abandoned := found.abandoned_after(loaded.path):
        logger.warning(
            "%s is the newest checkpoint of the current lineage; a run went back before it saved %s, "
            "which are passed over",
            loaded.path,
            ", ".join(abandoned),
        )
    return loaded


def read_older(
    directory: str | Path | Sequence[str | Path], iteration: int, check: Check | None, read: Read
) -> Loaded:
    """Read the newest intact checkpoint of the current lineage that has fewer iterations than `iteration`.

    Args:
        directory, check, read: as in `read_newest`.
        iteration: a number of completed iterations.

    Raises:
        FileNotFoundError: no such checkpoint can be used.
    """

    def choose(found: Found) -> list[Path]:
        on_line = [path for path in found.newest_first() if path not in found.abandoned]
        return [path for path in on_line if found.manifests[path].iter < iteration]

    return _first_whole(_directories(directory), choose, check, read)[1]


def load_best(
    directory: str | Path | Sequence[str | Path],
    metric: str | None = None,
    check: Check | None = None,
    prefer: Sequence[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """Return the best intact checkpoint of a metric, and its state; log better ones that cannot be used.

    Args:
        directory: the directory to scan, or all directories that the hooks of a run save in.
        metric: the metric; by default the first of `prefer` that has a best checkpoint, else the first metric
            of the newest checkpoint that was saved as a best one.
        check: an additional check, which raises CheckpointError for a state that cannot be used.
        prefer: metrics to choose from if no `metric` is given.

    Raises:
        FileNotFoundError: no checkpoint was saved as the best of that metric, or none of them can be used.
    """
    return read_best(directory, metric, check, prefer)[:2]


def read_best(
    directory: str | Path | Sequence[str | Path],
    metric: str | None = None,
    check: Check | None = None,
    prefer: Sequence[str] = (),
    read: Read | None = None,
) -> Loaded:
    """Read the best intact checkpoint as `load_best` does, with its manifest's hash.

    Args:
        directory, metric, check, prefer: as in `load_best`.
        read: the function that reads a checkpoint; None means `read_checkpoint`.

    Raises:
        FileNotFoundError: as `load_best`.
    """
    directories = _directories(directory)

    def ranked(found: Found) -> list[Path]:
        """Return the best checkpoints of the chosen metric, the best first, by default of the first one."""
        with_best = found.watched()
        default = with_best[0] if with_best else None
        preferred = next((each for each in prefer if each in with_best), default)
        chosen = preferred if metric is None else metric
        if chosen is None or chosen not in with_best:
            what = f"of {chosen!r}{suggest(chosen, with_best)}" if chosen and with_best else "at all"
            raise FileNotFoundError(
                f"{_holding(directories)} no best checkpoint {what}: CheckpointHook(save_best=...) saves one"
            )
        return found.ranking(chosen)

    found, loaded = _first_whole(directories, ranked, check, read)
    if loaded.path in found.foreign:
        logger.warning(
            "%s is of an earlier run: the newest run has no best checkpoint that can be used", loaded.path
        )
    return loaded


def _directories(directory: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [directory] if isinstance(directory, str | Path) else list(directory)


def _holding(directories: Sequence[str | Path]) -> str:
    """Return the begin of a sentence about directories: "a holds" or "a and b hold"."""
    return f"{' and '.join(map(str, directories))} {'holds' if len(directories) == 1 else 'hold'}"


def _first_whole(
    directories: Sequence[str | Path],
    order: Callable[[Found], Sequence[Path]],
    check: Check | None,
    read: Read | None,
) -> tuple[Found, Loaded]:
    """Scan directories; return the scan, and the first usable checkpoint in the given order.

    The directories are scanned again if a run replaced a checkpoint after the scan.

    Args:
        directories: the directories.
        order: returns the checkpoints of a scan that may be used, the preferred one first.
        check: an additional check, as in `load_newest`.
        read: the function that reads a checkpoint; None means `read_checkpoint`.

    Raises:
        FileNotFoundError: no checkpoint can be used.
    """
    for scan_number in range(1, MOST_SCANS + 1):
        found = scan(*directories)
        passed, gone = list(found.damaged), False
        for path in order(found):
            try:
                loaded = (read or read_checkpoint)(path)
                if check is not None:
                    check(loaded.state, found.name_of(path))
            except (CheckpointError, OSError) as error:
                if gone := scan_number < MOST_SCANS and found.was_replaced(path):
                    break
                passed.append(str(error))
                continue
            for reason in passed:
                logger.warning("passed over for %s: %s", path, reason)
            return found, loaded._replace(last=found.last)
        if not gone:
            break
    reasons = "".join(f"; {reason}" for reason in passed)
    raise FileNotFoundError(f"{_holding(directories)} no checkpoint to resume from{reasons}")


def latest_checkpoint(directory: str | Path, check: Check | None = None) -> Path:
    """Return the path of the newest intact checkpoint, which `load_newest` would load.

    Ranks that call it may get different answers while a save ends; `Trainer.resume` makes them agree.

    Raises:
        FileNotFoundError: no checkpoint can be used.
    """
    return load_newest(directory, check)[0]
