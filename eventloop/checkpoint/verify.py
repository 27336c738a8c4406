"""Whether a checkpoint is what its manifest says."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path

from eventloop.checkpoint.manifest import FileEntry, Manifest, open_regular, read_manifest
from eventloop.util.errors import CheckpointError

SAFETENSORS = ".safetensors"
_PUBLISHED = re.compile(r".-(?P<digits>[0-9a-f]{8})$")
_COUNTED = re.compile(r"00\d{6}|(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])")
"""A number padded with zeros, or a date: what others have at the end of their names."""


def verify_checkpoint(directory: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest, which is returned.

    Raises:
        CheckpointError: a file is missing, or is not the one that was saved; it is named.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        with _open(directory / name) as file:
            _check(file, directory / name, entry)
    return manifest


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Compare the sizes of a checkpoint's files with the manifest; none is read.

    Raises:
        CheckpointError: as `verify_checkpoint`.
    """
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            status = os.stat(path)
        except OSError as error:
            raise _incomplete(path, error) from error
        if stat.S_ISREG(status.st_mode):
            _check_size(status.st_size, path, entry)
        else:
            _open(path).close()  # which says what is wrong with it


def published_digits(name: str) -> str:
    """The first digits of its SHA-256 that a published file has at the end of its name, as torch.hub's have; "" where
    there are none."""
    match = _PUBLISHED.search(Path(name).stem)
    return match["digits"] if match and not _COUNTED.fullmatch(match["digits"]) else ""


def verify_published(path: Path) -> bool:
    """Read a published file and compare it with its name; False where that has no digits.

    Raises:
        FileNotFoundError: it is there no more.
        CheckpointError: it cannot be read, or its SHA-256 is not that of its name.
    """
    if not (digits := published_digits(path.name)):
        return False
    try:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest.startswith(digits):
        return True
    raise CheckpointError(
        f"{path} is damaged: its SHA-256 begins with {digest[:8]}, by its name with {digits}. If it was not published by "
        "eventloop, and its name ends in something else, rename it"
    )


@contextmanager
def open_verified(directory: Path, name: str) -> Iterator[BufferedReader]:
    """One file of a checkpoint, opened, all of them having been compared with the manifest: what is read then is
    what was compared, whatever becomes of the name meanwhile.

    Raises:
        CheckpointError: as `verify_checkpoint`.
    """
    manifest = read_manifest(directory)
    if name not in manifest.files:
        raise CheckpointError(
            f"{directory} has no {name}: its manifest names {', '.join(manifest.files) or 'no file'}"
        )
    with ExitStack() as stack:
        opened = {each: stack.enter_context(_open(directory / each)) for each in manifest.files}
        for each, entry in manifest.files.items():
            _check(opened[each], directory / each, entry)
        opened[name].seek(0)
        yield opened[name]


def _open(path: Path) -> BufferedReader:
    try:
        return open_regular(path)
    except OSError as error:
        raise _incomplete(path, error) from error


def _incomplete(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path.parent} is incomplete, {path.name} cannot be read: {error}")


def _check(file: BufferedReader, path: Path, entry: FileEntry) -> None:
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
