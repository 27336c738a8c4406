"""Checkpoints on disk: a mapping of plain values and tensors, written so that a name is whole or absent.

Keys are MMEngine's: `meta` (counters), `state_dict` (the model), `optimizer`, `param_schedulers`, `hooks`
(by name) and `rng`. `torch.load(path, weights_only=True)` reads it: nothing in it needs code to be run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eventloop.catalogue import suggest

SUFFIX = ".pth"
_TEMPORARY = ".tmp"


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
    """The regular checkpoints of a directory, oldest first (by the number in the name, then by time)."""
    found = [
        p for p in Path(directory).glob(f"*{SUFFIX}") if p.is_file() and not p.name.startswith((".", "best_"))
    ]
    return sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))


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
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], torch.from_numpy(legacy[1].astype(np.int64)), *legacy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators into a state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
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
        self._copied = []
        taken: dict[str, Any] = _rebuild(state, "", self._copy)
        for device in {t.device for t in _tensors(state) if t.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        return taken

    def wait(self) -> None:
        """Wait until the copies are there; not for the training thread."""
        for event in self._copied:
            event.synchronize()

    def _copy(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def _rebuild(value: Any, path: str, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(path, value)
    if isinstance(value, Mapping):
        return {key: _rebuild(item, f"{path}/{key}", copy) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_rebuild(item, f"{path}/{i}", copy) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
