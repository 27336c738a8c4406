"""Checkpoints on disk: a mapping of plain values and tensors, written so that a name is whole or absent.

Keys are MMEngine's: `meta` (counters), `state_dict` (the model), `optimizer`, `param_schedulers`, `hooks`
(by name) and `rng`. `torch.load(path, weights_only=True)` reads it: nothing in it needs code to be run.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from eventloop.catalogue import suggest

SUFFIX = ".pth"
SUFFIXES = (SUFFIX, ".pt", ".ckpt")
"""What the name of a file must end in to be found as a checkpoint."""
_TEMPORARY = ".tmp"
_IN_MEMORY_LIMIT = 32 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


def save_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> int:
    """Write a checkpoint durably and return its size in bytes.

    The bytes go to a new name beside `path`, are synced, and take the name only then: a crash leaves what was
    at `path` before, or the whole new file. An error leaves the old file and no half of a new one.

    Raises:
        OSError: the disk is full, the directory cannot be written, ...
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with open(
            temporary, "xb"
        ) as file:  # an opened file: torch.save to a path holds the interpreter longer
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


def _serialize(checkpoint: Mapping[str, Any], file: BinaryIO) -> int:
    """Write what `torch.save` makes; returns its size.

    torch writes in hundreds of small pieces, between which this thread and the training thread keep taking the
    interpreter from each other: 5 ms for a state of 1 MB, 2 ms when it is made in memory and written at once. A
    large state is written directly: its one big copy would hold the interpreter longer.
    """
    if _size(checkpoint) > _IN_MEMORY_LIMIT:
        torch.save(dict(checkpoint), file)
        return file.tell()
    memory = io.BytesIO()
    torch.save(dict(checkpoint), memory)
    return file.write(memory.getbuffer())


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_size(item) for item in value.values())
    return sum(_size(item) for item in value) if isinstance(value, list | tuple) else 0


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


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest checkpoint that can be read.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in reversed(find_checkpoints(directory)):
        try:
            load_checkpoint(path)
        except CheckpointError:
            continue
        return path
    raise FileNotFoundError(f"{directory} holds no readable checkpoint to resume from")


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


# --- random state ------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's global generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    state: dict[str, Any] = {  # tensors, because hundreds of Python ints take long to copy and to pickle
        "python": [version, torch.tensor(words), gauss],
        "numpy": [legacy[0], torch.from_numpy(legacy[1].astype(np.int64)), *legacy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators into a state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# --- snapshots ---------------------------------------------------------------------------------------------


class Snapshot:
    """A copy of nested state on the host, into buffers that are reused from one snapshot to the next.

    A fresh buffer costs seven times a reused one. From CUDA the copies go to pinned memory on the current
    stream: `take` returns at once, the state may be changed by later kernels, and `wait` is for the thread that
    writes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state`; the result is overwritten by the next `take`."""
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        taken: dict[str, Any] = self._rebuild(state, "", sources, copies)
        torch._foreach_copy_(copies, sources, non_blocking=True)
        self._copied = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        return taken

    def wait(self) -> None:
        """Wait until the copies are there; not for the training thread."""
        for event in self._copied:
            event.synchronize()

    def _rebuild(self, value: Any, path: str, sources: list[torch.Tensor], copies: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            sources.append(value.detach())
            copies.append(self._buffer(path, value))
            return copies[-1]
        if isinstance(value, Mapping):
            return {key: self._rebuild(item, f"{path}/{key}", sources, copies) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._rebuild(item, f"{path}/{i}", sources, copies) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _buffer(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer
