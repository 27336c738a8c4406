"""Checkpoints on disk: a directory each, which is there whole or is no checkpoint.

`state.pth` is the state as `torch.save` writes it: a mapping with MMEngine's keys `meta` (counters), `state_dict`
(the model), `optimizer`, `param_schedulers`, `hooks` (by name) and `rng`; plain `torch.load(path, weights_only=True)`
reads it. `manifest.json` says what it is and has the SHA-256 of every file; it is written last.

What holds at every moment, also after a power cut: a directory that has its name has all its bytes; none is
written over; none is removed before its successor is durable. The newest and the best are found by reading the
manifests that are there, so there is no pointer that could be wrong.
"""

from __future__ import annotations

import io
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eventloop._version import __version__
from eventloop.checkpoint.directory import (
    LOOKS,
    PAYLOAD,
    SUFFIXES,
    Found,
    aside,
    find_checkpoints,
    leftovers,
    remove_checkpoint,
    scan,
)
from eventloop.checkpoint.disk import DISK, Disk, Sink, make_directories, write_file
from eventloop.checkpoint.external_weights import as_checkpoint, read_safetensors
from eventloop.checkpoint.manifest import MANIFEST, Label, Manifest, encode_manifest, tensor_table
from eventloop.checkpoint.verify import SAFETENSORS, open_verified
from eventloop.state.sharded import NO_SHARDED_SAVES, refuse_sharded
from eventloop.state.tensors import tensors_of
from eventloop.util.errors import CheckpointError
from eventloop.util.suggest import suggest

__all__ = [
    "PAYLOAD",
    "SUFFIXES",
    "CheckpointError",
    "Found",
    "Serialized",
    "find_checkpoints",
    "latest_checkpoint",
    "leftovers",
    "load_best",
    "load_checkpoint",
    "load_newest",
    "remove_checkpoint",
    "save_checkpoint",
    "scan",
]

logger = logging.getLogger("eventloop")

under_way: set[str] = set()
"""The names that saves of this process are writing under."""
_NO_LABEL = Label()
_CHECKED_ANYWAY = "Validating sparse tensor invariants"
"""What torch 2.15 says, whoever reads a sparse tensor safely."""


class Serialized:
    """A state as the bytes `torch.save` makes of it, with what a manifest says of its tensors."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.contents = describe(state)
        memory = io.BytesIO()
        torch.save(dict(state), memory)
        # what the stream itself wrote into, not a copy; a view on it would be an error of the stream's, that Python
        # 3.13 prints, where the two are collected as garbage, as after a save that failed
        self.bytes = memory.getvalue()


def describe(state: Mapping[str, Any]) -> Manifest:
    """What can be told of a state by looking at it.

    Raises:
        TypeError: a tensor in it is sharded over ranks.
    """
    tensors = tuple(tensor_table(state))
    for entry, tensor in zip(tensors, tensors_of(state), strict=False):
        refuse_sharded(f"the checkpoint's {entry.name}", tensor, NO_SHARDED_SAVES)
    meta = state.get("meta", {})
    position = meta.get("position", {})
    return Manifest(
        iter=meta.get("iter", 0), epoch=meta.get("epoch", 0), batch_idx=position.get("batch_idx", 0),
        max_iters=meta.get("max_iters"), max_epochs=meta.get("max_epochs"),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), eventloop=__version__, torch=str(torch.__version__),
        keys=tuple(map(str, state)), tensors=tensors,
    )  # fmt: skip


def save_checkpoint(
    state: Mapping[str, Any] | Serialized,
    path: str | Path,
    label: Label = _NO_LABEL,
    *,
    disk: Disk = DISK,
    given_up: threading.Event | None = None,
) -> int:
    """Write a checkpoint durably and return the size of its payload in bytes.

    Everything is written into a new directory of another name and synced, the manifest last; then the directory
    takes the name `path`, and that is synced. A crash before leaves what was there, a crash after leaves the new
    one. Where `path` is taken, the former holder of the name is there until the new one is durable beside it.
    After an error nothing of the new one is left, and another try begins with new files: a system that failed to
    sync a file has forgotten which of its bytes are not on the disk.

    Args:
        label: what the manifest is to say besides what the state says of itself.
        disk: for tests.
        given_up: ends the save when it is set.

    Raises:
        OSError: the disk is full, the directory cannot be written, ...
        TypeError: a tensor of the state is sharded over ranks.
        SaveGivenUp: `given_up` was set.
    """
    path = Path(path)
    make_directories(path.parent, disk)
    work = aside(path, "tmp")
    with _told(work.name):
        disk.make_directory(work)
        try:
            size = _fill(work, state, label, disk, given_up)
            _take_name(work, path, disk)
        except BaseException:
            with suppress(OSError):  # what is left of it has no name that anybody looks for
                disk.remove(work)
            raise
        return size


@contextmanager
def _told(name: str) -> Iterator[None]:
    under_way.add(name)
    try:
        yield
    finally:
        under_way.discard(name)


def _fill(
    work: Path,
    state: Mapping[str, Any] | Serialized,
    label: Label,
    disk: Disk,
    given_up: threading.Event | None,
) -> int:
    contents = state.contents if isinstance(state, Serialized) else describe(state)
    payload = write_file(work / PAYLOAD, partial(_write_state, state), disk=disk, given_up=given_up)
    manifest = _manifest(contents, label, payload)
    write_file(work / MANIFEST, lambda sink: sink.write(manifest), disk=disk, given_up=given_up)
    disk.sync_directory(work)
    return payload.bytes


def _write_state(state: Mapping[str, Any] | Serialized, sink: Sink) -> None:
    if isinstance(state, Serialized):
        sink.write(state.bytes)
        return
    try:  # through an opened file: torch.save to a path holds the interpreter longer
        torch.save(dict(state), sink)  # type: ignore[arg-type]
    except RuntimeError:
        if sink.failure is not None:  # torch says only that its file is too short
            raise sink.failure from None
        raise


def _manifest(contents: Manifest, label: Label, payload: Any) -> bytes:
    fields = {name: getattr(contents, name) for name in contents.__struct_fields__}
    said = {name: getattr(label, name) for name in label.__struct_fields__}
    return encode_manifest(Manifest(**{**fields, **said, "files": {PAYLOAD: payload}}))


def _take_name(work: Path, path: Path, disk: Disk) -> None:
    name = path
    if path.exists():
        name = next(p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}-{n}")).exists())
    try:
        disk.rename(work, name)
        disk.sync_directory(path.parent)
        if name != path:
            _take_over(name, path, disk)
    except BaseException:
        moved = not work.exists()  # else what has the name is not ours
        if moved and (name == path or path.exists()):
            with suppress(OSError):
                remove_checkpoint(name, disk)
        raise


def _take_over(beside: Path, path: Path, disk: Disk) -> None:
    """Give what is durable `beside` a name that is taken; after an error its former holder has it again."""
    former = aside(path, "old")
    try:
        with suppress(FileNotFoundError):  # somebody has removed it meanwhile
            disk.rename(path, former)
        disk.rename(beside, path)
        disk.sync_directory(path.parent)
        disk.remove(former)
    except OSError as error:
        if beside.exists():
            if former.exists() and not path.exists():
                disk.rename(former, path)
            raise
        logger.warning("%s is saved, but what had the name before could not be removed: %s", path, error)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint, executing nothing from it. The hash of every file is checked first.

    Args:
        path: the directory; or a single file, of which no hash is checked: a published one, or another program's. Bare
            weights, in a file of torch's or of safetensors, are a checkpoint with a `state_dict` alone.
        map_location: as of `torch.load`; for safetensors a device.

    Raises:
        FileNotFoundError: there is nothing of that name (with the checkpoints that are there).
        CheckpointError: it is no checkpoint, incomplete, damaged, or of a later version.
        ImportError: it is of safetensors, which is not installed.
    """
    path = Path(path)
    if path.suffix in SUFFIXES and not path.exists() and path.with_suffix("").is_dir():
        path = path.with_suffix("")  # what MMEngine would have called a file
    if not path.exists():
        there = [p.name for p in find_checkpoints(path.parent)]
        hint = suggest(path.name, there) if there else f": {path.parent} holds no checkpoint"
        raise FileNotFoundError(f"no checkpoint at {path}{hint}")
    if path.suffix == SAFETENSORS and not path.is_dir():
        return as_checkpoint(read_safetensors(path, map_location), path)
    with open_verified(path, PAYLOAD) if path.is_dir() else open(path, "rb") as file:
        return _read_state(file, path, map_location)


def _read_state(file: BinaryIO, path: Path, map_location: Any) -> dict[str, Any]:
    try:
        # warnings are passed on afterwards: a program may make errors of them, and such a one is no damage
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            state = torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    state = as_checkpoint(state, path)
    for each in noted:
        if not str(each.message).startswith(_CHECKED_ANYWAY):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return state


Check = Callable[[dict[str, Any], str], object]
"""Raises a CheckpointError for a state, of the name that is given, which cannot be used."""


def load_newest(
    directory: str | Path | Sequence[str | Path], check: Check | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint that is whole and passes a check, and its state; log those that cannot be used.

    Args:
        directory: where to look; or all that the hooks of a run save in.
        check: what a state must pass besides.

    Raises:
        FileNotFoundError: there is none.
    """
    found, path, state = _first_whole(_places(directory), lambda found: found.paths[::-1], check)
    if left := found.left_behind(path):
        logger.warning(
            "%s is the newest on the line that was last gone on with; left behind are %s",
            path,
            ", ".join(left),
        )
    return path, state


def load_best(
    directory: str | Path | Sequence[str | Path],
    metric: str | None = None,
    check: Check | None = None,
    prefer: Sequence[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """The best checkpoint that is whole, as `load_newest`.

    Args:
        metric: of several that were watched; by default the first of `prefer` that was, else the first one of the
            newest best checkpoint.

    Raises:
        FileNotFoundError: there is none that was saved as the best of that metric.
    """
    places = _places(directory)

    def ranked(found: Found) -> list[Path]:
        known = found.watched()
        preferred = next((each for each in prefer if each in known), known[0] if known else None)
        chosen = preferred if metric is None else metric
        if chosen is None or chosen not in known:
            what = f"of {chosen!r}{suggest(chosen, known)}" if chosen and known else "at all"
            raise FileNotFoundError(
                f"{_holding(places)} no best checkpoint {what}: CheckpointHook(save_best=...) saves one"
            )
        return found.ranking(chosen)

    return _first_whole(places, ranked, check)[1:]


def _places(directory: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [directory] if isinstance(directory, str | Path) else list(directory)


def _holding(places: Sequence[str | Path]) -> str:
    return f"{' and '.join(map(str, places))} {'holds' if len(places) == 1 else 'hold'}"


def _first_whole(
    places: Sequence[str | Path], order: Callable[[Found], Sequence[Path]], check: Check | None
) -> tuple[Found, Path, dict[str, Any]]:
    """What is there, and the first of it that can be used, with its state. A run that goes on meanwhile may remove what
    was found, for something newer that is durable: then it is looked again."""
    for look in range(1, LOOKS + 1):
        found = scan(*places)
        passed, gone = list(found.damaged), False
        for path in order(found):
            try:
                state = load_checkpoint(path)
                if check is not None:
                    check(state, found.name_of(path))
            except (CheckpointError, OSError) as error:
                if gone := look < LOOKS and found.was_replaced(path):
                    break
                passed.append(str(error))
                continue
            for reason in passed:
                logger.warning("passed over for %s: %s", path, reason)
            return found, path, state
        if not gone:
            break
    reasons = "".join(f"; {reason}" for reason in passed)
    raise FileNotFoundError(f"{_holding(places)} no checkpoint to resume from{reasons}")


def latest_checkpoint(directory: str | Path, check: Check | None = None) -> Path:
    """The path of `load_newest`.

    Raises:
        FileNotFoundError: there is none.
    """
    return load_newest(directory, check)[0]
