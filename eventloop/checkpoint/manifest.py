"""What a checkpoint says of itself: `manifest.json`, written last, without which a directory is no checkpoint."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import msgspec

from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name

MANIFEST = "manifest.json"
SCHEMA = 1
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What a decoder raises of bytes that are none of its own, are nested too deep, or have a number of thousands of digits."""


class FileEntry(msgspec.Struct, frozen=True):
    """A file of the checkpoint."""

    bytes: int
    sha256: str


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in the payload: the keys that lead to it joined by dots, PyTorch's name of its type, its shape, in which -1
    is a size that the parts of a nested tensor differ in."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What the one who saves says of a checkpoint besides its contents.

    Attributes:
        sequence: greater than that of every checkpoint saved before it in its directory, or in those of the other hooks
            of its run; no clock is trusted.
        best: the metrics of which it was one of the best so far, and what is better: "greater" or "less".
        keep_best: how many of the best of each of those stay; -1 all.
        metrics: the scores of the last validation before it was saved; "nan", "inf" and "-inf" are texts.
        validated_at: the iteration that validation was made at; of a best one it is that of the checkpoint.
    """

    sequence: int = 0
    best: dict[str, Literal["greater", "less"]] = {}
    keep_best: int = 1
    metrics: dict[str, float | str] = {}
    validated_at: int | None = None

    def __post_init__(self) -> None:
        for metric in self.best:
            if metric not in self.metrics or math.isnan(float(self.metrics[metric])):
                raise ValueError(f"it is to be the best of {metric!r}, of which its metrics have no score")


class Manifest(Label, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        schema: the version of this layout.
        iter, epoch, batch_idx: where the run was; iter and epoch count what is completed.
        max_iters, max_epochs: what it was to reach.
        time, eventloop, torch: when it was saved, and by which versions.
        keys: the top-level keys of the payload.
        tensors: what is in it.
        files: every file of the directory but this one.
    """

    schema: int = SCHEMA
    iter: int = 0
    epoch: int = 0
    batch_idx: int = 0
    max_iters: int | None = None
    max_epochs: int | None = None
    time: str = ""
    eventloop: str = ""
    torch: str = ""
    keys: tuple[str, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    files: dict[str, FileEntry] = {}

    def __post_init__(self) -> None:
        Label.__post_init__(self)
        for name in self.files:
            if not is_plain_name(name):
                raise ValueError(f"files: expected names of files in the directory, got {name!r}")


class _Envelope(msgspec.Struct):
    """A manifest and the SHA-256 of its bytes, so that a flipped bit in a number is not taken for the number."""

    sha256: str
    manifest: msgspec.Raw


class _Versioned(msgspec.Struct):
    """What a manifest of every version has."""

    schema: Any = None


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`.

    Raises:
        CheckpointError: something in it, which a handler may have put into the state, is of a type that nobody could
            read again.
    """
    try:
        body = msgspec.json.encode(manifest)
        msgspec.json.decode(body, type=Manifest)
    except (*UNREADABLE, TypeError) as error:  # TypeError: JSON has nothing like it
        raise CheckpointError(
            f"the {MANIFEST} of this checkpoint could not be read again, so it is not saved: {error}; it is made of the "
            "state's names, its 'meta' and its label"
        ) from error
    return msgspec.json.encode(_Envelope(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def open_regular(path: Path) -> BufferedReader:
    """Open a file that is to be read to its end. A named pipe under its name would be waited for without end, and a
    device may have none.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    without_waiting = getattr(os, "O_NONBLOCK", 0)  # for a pipe; a regular file is read as ever
    descriptor = os.open(path, flags | without_waiting)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a directory `open` says so itself
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest; its other files are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a later version.
    """
    path = directory / MANIFEST
    try:
        with open_regular(path) as file:
            raw = file.read()
    except OSError as error:
        what = "it was not completed" if not path.exists() else str(error)
        raise CheckpointError(f"{directory} has no readable {MANIFEST}: {what}") from error
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if hashlib.sha256(envelope.manifest).hexdigest() != envelope.sha256:
        raise CheckpointError(f"{path} is damaged: it does not have the hash it names")
    if msgspec.json.encode(envelope) != raw:
        raise CheckpointError(f"{path} is damaged: it holds more than was saved")
    try:
        schema = msgspec.json.decode(envelope.manifest, type=_Versioned).schema
        if schema != SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema!r}, this version of eventloop reads {SCHEMA}: update eventloop"
            )
        return msgspec.json.decode(envelope.manifest, type=Manifest)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is no manifest: {error}") from error


_ATOMS = frozenset({str, int, float, bool, type(None)})


def score(value: float) -> float | str:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def tensor_table(value: Any, name: str = "") -> Iterator[TensorEntry]:
    """The tensors of a nested state, in order."""
    if type(value) in _ATOMS:
        return
    if hasattr(value, "is_nested"):  # a tensor; this module imports no torch
        shape = _sizes(value) if value.is_nested else tuple(value.shape)
        yield TensorEntry(name, str(value.dtype).removeprefix("torch."), shape)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensor_table(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensor_table(item, f"{name}.{index}")


def _sizes(nested: Any) -> tuple[int, ...]:
    """The shape of a nested tensor, -1 where its parts differ."""
    sizes = []
    for dim in range(nested.dim()):
        try:
            size = nested.size(dim)
        except RuntimeError:
            size = -1
        sizes.append(size if type(size) is int else -1)
    return tuple(sizes)
