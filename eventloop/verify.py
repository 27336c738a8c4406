"""Whether a checkpoint is what its manifest says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path

from eventloop.manifest import CheckpointError, FileEntry, Manifest, open_regular, read_manifest


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
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise CheckpointError(f"{path.parent} is incomplete, {path.name} cannot be read: {error}") from error


def _check(file: BufferedReader, path: Path, entry: FileEntry) -> None:
    size = file.seek(0, 2)
    if size != entry.bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, {entry.bytes} were saved")
    file.seek(0)
    try:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != entry.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of what was saved")
