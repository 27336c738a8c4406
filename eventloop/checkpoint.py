"""Checkpoints on disk: a mapping of plain values and tensors, written so that a name is whole or absent.

Keys are MMEngine's: `meta` (counters), `state_dict` (the model), `optimizer`, `param_schedulers`, `hooks`
(by name) and `rng`. `torch.load(path, weights_only=True)` reads it: nothing in it needs code to be run.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eventloop.catalogue import suggest

SUFFIX = ".pth"
SUFFIXES = (SUFFIX, ".pt", ".ckpt")
"""What the name of a file must end in to be found as a checkpoint."""
_TEMPORARY = ".tmp"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


class Serialized:
    """A checkpoint as the bytes `torch.save` makes of it."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        memory = io.BytesIO()
        torch.save(dict(checkpoint), memory)
        self._bytes = memory.getbuffer()

    def write(self, file: BinaryIO) -> None:
        """Write them, in one piece."""
        file.write(self._bytes)


def save_checkpoint(checkpoint: Mapping[str, Any] | Serialized, path: Path) -> int:
    """Write a checkpoint durably and return its size in bytes.

    The bytes go to a new name beside `path`, are synced, and take the name only then: a crash leaves what was
    at `path` before, or the whole new file. An error leaves the old file and no half of a new one.

    Raises:
        OSError: the disk is full, the directory cannot be written, ...
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with open(temporary, "wb") as file:  # over what a killed process of the same number may have left
            if isinstance(checkpoint, Serialized):
                checkpoint.write(file)
            else:  # to an opened file: torch.save to a path holds the interpreter longer
                torch.save(dict(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return size


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint, executing nothing from it.

    Raises:
        FileNotFoundError: there is no such file (with the checkpoints that are there).
        CheckpointError: it is no checkpoint, or torn.
    """
    path = Path(path)
    if not path.is_file():
        there = [p.name for p in find_checkpoints(path.parent)]
        hint = suggest(path.name, there) if there else f": {path.parent} holds no checkpoint"
        raise FileNotFoundError(f"no checkpoint at {path}{hint}")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of eventloop: expected a mapping with a 'state_dict'")
    return checkpoint


def find_checkpoints(directory: str | Path) -> list[Path]:
    """The regular checkpoints of a directory, oldest first (by time, then by the number in the name)."""
    found = [
        p
        for p in Path(directory).glob("*")
        if p.suffix in SUFFIXES and p.is_file() and not p.name.startswith((".", "best_"))
    ]
    return sorted(found, key=lambda p: (p.stat().st_mtime_ns, len(p.name), p.name))


def latest_checkpoint(directory: str | Path, needed: Collection[str] = ()) -> Path:
    """The newest checkpoint that can be read and has the keys that are `needed`; a published one has few.

    Raises:
        FileNotFoundError: there is none.
    """
    lacking = ""
    for path in reversed(find_checkpoints(directory)):
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError:
            continue
        missing = [key for key in needed if key not in checkpoint]
        if not missing:
            return path
        lacking = lacking or f"; {path.name} has no {', '.join(missing)}"
    raise FileNotFoundError(f"{directory} holds no checkpoint to resume from{lacking}")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside what distributes or compiles it, so that its checkpoint fits either."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def check_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Check that weights fit a model; return the lines about names that exist on one side only.

    Raises:
        CheckpointError: shapes differ, or with `strict` names are missing or unexpected: every one is named,
            with both shapes.
    """
    own = model.state_dict()
    wrong = [
        f"{name}: the checkpoint has {_shape(state[name])}, the model {_shape(own[name])}"
        for name in own
        if name in state and _shape(state[name]) != _shape(own[name])
    ]
    strangers = [
        f"{name}: {_shape(own[name])} in the model, not in the checkpoint"
        for name in own
        if name not in state
    ]
    strangers += [
        f"{name}: {_shape(state[name])} in the checkpoint, not in the model"
        for name in state
        if name not in own
    ]
    if wrong or (strict and strangers):
        lines = "\n  ".join(wrong + (strangers if strict else []))
        raise CheckpointError(f"{source} is of another model; nothing was loaded:\n  {lines}")
    return strangers


def load_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Load weights after `check_model_state`; a refused model is left as it was."""
    strangers = check_model_state(model, state, strict=strict, source=source)
    model.load_state_dict(state, strict=False)
    return strangers


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
