"""Compare the files of a checkpoint with the sizes and hashes in its manifest.

Loading and `eventloop checkpoints --verify` use it. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path

from eventloop.checkpoint.manifest import FileEntry, Manifest, read_manifest
from eventloop.util.errors import CheckpointError

SAFETENSORS = ".safetensors"
_PUBLISHED = re.compile(r".-(?P<digits>[0-9a-f]{8})$")
_COUNTED = re.compile(r"00\d{6}|(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])")
"""Matches a number padded with zeros, or a date.

Other programs end names with such digits, which are not a hash.
"""


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
    """Return the first digits of the SHA-256 at the end of a published file's name, or "" if it has none.

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
        manifest: the manifest; None to read it from the directory.
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
    try:
        return open(path, "rb")
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
