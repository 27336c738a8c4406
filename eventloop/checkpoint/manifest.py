"""Write and read `manifest.json`, which describes a checkpoint, and compare the files with its hashes.

A manifest is written last: a directory without it is not a checkpoint.
Its own bytes are hashed too, so a flipped bit is found. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import msgspec

from eventloop.checkpoint.commit import MANIFEST, sealed
from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name

SCHEMA, SHARDED_SCHEMA = 1, 2
"""The versions of a manifest's layout: of a checkpoint of one process, and of one of several ranks."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors that a decoder raises for bytes of another format, for deep nesting or a too long number."""

SAFETENSORS = ".safetensors"
_PUBLISHED = re.compile(r".-(?P<digits>[0-9a-f]{8})$")
_COUNTED = re.compile(r"00\d{6}|(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])")
"""Matches eight digits that are a number padded with zeros, or a date.

Other programs end names of files with such digits, so they do not count as a hash.
"""


class FileEntry(msgspec.Struct, frozen=True):
    """The size and the SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


class TensorEntry(msgspec.Struct, frozen=True):
    """The description of one tensor in the payload.

    Attributes:
        name: the keys that lead to it in the state, joined by dots.
        dtype: PyTorch's name of its type, without "torch.".
        shape: its sizes; empty for a nested tensor, whose parts may have different sizes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a manifest that `CheckpointHook` sets; all others are read from the state.

    Attributes:
        sequence: a number that grows with each checkpoint of the run's hooks, so that the order of saving is
            known without trusting a clock.
        best: the metrics for which the checkpoint is one of the best so far, each with its rule: "greater" or
            "less".
        keep_best: the number of best checkpoints of each of these metrics that are kept; -1 keeps all.
        metrics: the scores of the last validation before the save; scores that are not finite are the strings
            "nan", "inf" and "-inf".
        validated_at: the iteration of that validation; None before the first. For a best checkpoint it is
            the iteration of the checkpoint.
    """

    sequence: int = 0
    best: dict[str, Literal["greater", "less"]] = {}
    keep_best: int = 1
    metrics: dict[str, float | str] = {}
    validated_at: int | None = None

    def __post_init__(self) -> None:
        for metric in self.best:
            if metric not in self.metrics or math.isnan(float(self.metrics[metric])):
                raise ValueError(f"best names {metric!r}, expected a score of it in metrics, got none")


class Manifest(Label, frozen=True, kw_only=True):
    """The contents of `manifest.json`: a label and the description of the state and of its files.

    Attributes:
        schema: the version of this layout.
        ranks: the number of ranks that have written the checkpoint together; unset if one process has.
        save: the name of the temporary directory that the ranks wrote to, which identifies the save; unset if
            `ranks` is.
        iter, epoch, batch_idx: completed iterations, completed epochs, and completed batches of the current
            epoch.
        max_iters, max_epochs: the planned length of the run.
        time, eventloop, torch: the time of the save, and the versions that wrote it.
        keys: the top-level keys of the payload.
        tensors: the tensors of the payload, in order.
        files: every file of the directory except the manifest, by name.
    """

    schema: int = SCHEMA
    ranks: int | msgspec.UnsetType = msgspec.UNSET
    save: str | msgspec.UnsetType = msgspec.UNSET
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
        """Refuse contradictory ranks, and names of files that would lead out of the directory."""
        Label.__post_init__(self)
        if (self.schema == SHARDED_SCHEMA) != (self.ranks is not msgspec.UNSET):
            raise ValueError(f"ranks: expected a number in schema {SHARDED_SCHEMA} alone, got {self.ranks!r}")
        for name in self.files:
            if not is_plain_name(name) and name != ".metadata":
                raise ValueError(f"files: expected names of files in the directory, got {name!r}")


class _Versioned(msgspec.Struct):
    """Decode only the version of the format of a file that begins with its own hash (`commit.sealed`)."""

    schema: Any = None


def encode_body(manifest: Manifest) -> bytes:
    """Return a manifest without files as JSON, checked by decoding it; `commit.seal` adds the files."""
    try:
        body = msgspec.json.encode(manifest)
        msgspec.json.decode(body, type=Manifest)
    except (*UNREADABLE, TypeError) as error:  # TypeError: a value of a type that JSON does not have
        raise CheckpointError(
            f"the {MANIFEST} of this checkpoint could not be read again, so the checkpoint is not saved: "
            f"{error}; it consists of the state's names, its 'meta' and the label: check the handlers' values"
        ) from error
    return body


def unseal(raw: bytes, path: Path, field: str, *schemas: int) -> bytes:
    """Check the hash and the schema of a file that `commit.sealed` has made; return the JSON in it.

    Args:
        raw: the bytes of the file.
        path: the file's path, for the messages.
        field: the name under which the file has its contents, which are JSON, besides their hash.
        schemas: the versions that are accepted in the field `schema` of the contents.

    Raises:
        CheckpointError: the file is damaged, or its schema is not one of `schemas`.
    """
    try:
        body = bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[field])
        if sealed(field, body) != raw:
            raise CheckpointError(f"{path} is damaged: its contents do not match the hash in it")
        version = msgspec.json.decode(body, type=_Versioned).schema
    except (*UNREADABLE, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if version not in schemas:
        known = " and ".join(map(str, schemas))
        raise CheckpointError(
            f"{path} has schema {version!r}, this version of eventloop reads {known}: update eventloop"
        )
    return body


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint's directory without checking the other files.

    Raises:
        CheckpointError: the manifest is missing, is damaged, or has a later version.
    """
    return read_identified(directory)[0]


def read_identified(directory: Path) -> tuple[Manifest, str]:
    """Read a manifest as `read_manifest` does, and return it with the SHA-256 of its bytes.

    The manifest has the hashes of all other files, so its own hash identifies all bytes of the checkpoint.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = "it was not completed" if not path.exists() else str(error)
        raise CheckpointError(f"{directory} has no readable {MANIFEST}: {reason}") from error
    body = unseal(raw, path, "manifest", SCHEMA, SHARDED_SCHEMA)
    try:
        return msgspec.json.decode(body, type=Manifest), hashlib.sha256(raw).hexdigest()
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from error


_ATOMS = frozenset({str, int, float, bool, type(None)})
"""The types of most values of a state, which contain no tensor."""


def score(value: float) -> float | str:
    """Return a number in a form that JSON has: NaN and infinities become strings, such as "nan"."""
    return value if math.isfinite(value) else str(value)


def tensor_table(state: Any) -> list[TensorEntry]:
    """Return the description of each tensor in a nested state, in order."""
    entries: list[TensorEntry] = []
    _describe_in({"": state}, "", entries)
    return entries


def _describe_in(values: Mapping[Any, Any], prefix: str, entries: list[TensorEntry]) -> None:
    """Add the description of each tensor in nested values to `entries`; names begin with `prefix`."""
    for key, value in values.items():
        if type(value) in _ATOMS:  # first, as most values are of these types
            continue
        name = f"{prefix}{key}"
        if hasattr(value, "is_nested"):  # a tensor; this module imports no torch
            shape = () if value.is_nested else tuple(value.shape)
            entries.append(TensorEntry(name, str(value.dtype).removeprefix("torch."), shape))
        elif isinstance(value, Mapping | list | tuple):
            inner = value if isinstance(value, Mapping) else dict(enumerate(value))
            _describe_in(inner, f"{name}." if name else "", entries)


# --- comparing files with the manifest ---------------------------------------------------------------------


def verify_checkpoint(directory: Path) -> Manifest:
    """Read every file of a checkpoint, compare it with the manifest, and return the manifest.

    Raises:
        CheckpointError: a file is missing or differs from what was saved; the message names it.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        check_file(directory / name, entry)
    return manifest


def check_file(path: Path, entry: FileEntry) -> None:
    """Read one file of a checkpoint, and compare it with the manifest's entry.

    Raises:
        CheckpointError: the file is missing, or differs from what was saved.
    """
    with _open(path) as file:
        _check(file, path, entry)


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Compare the sizes of a checkpoint's files with the manifest without reading them.

    Raises:
        CheckpointError: a file is missing, or has another size.
    """
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _incomplete(path, error) from error
        _check_size(size, path, entry)


def published_digits(name: str) -> str:
    """Return the eight digits of a SHA-256 at the end of a published file's name, or "".

    torch.hub names its files in the same way.
    """
    match = _PUBLISHED.search(Path(name).stem)
    return match["digits"] if match and not _COUNTED.fullmatch(match["digits"]) else ""


def verify_published(path: Path) -> bool:
    """Compare a published file with the hash in its name; return False if the name has none.

    Raises:
        FileNotFoundError: the file does not exist any more.
        CheckpointError: the file cannot be read, or its SHA-256 differs from the one in its name.
    """
    if not (digits := published_digits(path.name)):
        return False
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest.startswith(digits):
        return True
    raise CheckpointError(
        f"{path} is damaged: its SHA-256 begins with {digest[:8]}, expected {digits} from its name. "
        f"If {digits} is not a hash, because the file was not published by eventloop, rename the file"
    )


@contextmanager
def open_verified(directory: Path, name: str, manifest: Manifest | None = None) -> Iterator[BufferedReader]:
    """Open one file of a checkpoint after comparing all its files with the manifest.

    All files stay open from the comparison to the end of the block. So the caller reads the same bytes that
    were compared, even if the checkpoint is renamed or removed in the meantime.

    Args:
        directory: the checkpoint.
        name: the name of the file to open.
        manifest: the manifest; None to read it from the directory.

    Raises:
        CheckpointError: a file is missing or differs from what was saved, or the manifest does not list
            `name`.
    """
    manifest = read_manifest(directory) if manifest is None else manifest
    if name not in manifest.files:
        raise CheckpointError(
            f"{directory} has no {name}: its manifest lists {', '.join(manifest.files) or 'no file'}"
        )
    with ExitStack() as stack:
        opened = {each: stack.enter_context(_open(directory / each)) for each in manifest.files}
        for each, entry in manifest.files.items():
            _check(opened[each], directory / each, entry)
        opened[name].seek(0)
        yield opened[name]


def _open(path: Path) -> BufferedReader:
    """Open a file of a checkpoint; raise CheckpointError if it cannot be opened."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise _incomplete(path, error) from error


def _incomplete(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path.parent} is incomplete, {path.name} cannot be read: {error}")


def _check(file: BufferedReader, path: Path, entry: FileEntry) -> None:
    """Raise CheckpointError if a file's size or hash is not that of the manifest."""
    _check_size(file.seek(0, 2), path, entry)
    file.seek(0)
    try:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != entry.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of what was saved")


def _check_size(size: int, path: Path, entry: FileEntry) -> None:
    if size != entry.bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, {entry.bytes} were saved")
