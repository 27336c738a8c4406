"""Create and check the folders for commands and answers, which only the run's user can read and write."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def create_private(directory: Path, user: int | None = None) -> None:
    """Create a directory that only one user can read and write, or make an existing directory so.

    Args:
        directory: the directory, whose parent exists.
        user: the numeric id of the user; None for the user of this process. Only root may pass another user.

    Raises:
        OSError: the directory cannot be created, or `make_private` raises an error.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        os.chmod(directory, 0o700)  # the umask may have cleared some of these bits
    make_private(directory, user)


def make_private(directory: Path, user: int | None = None) -> None:
    """Set the mode of a directory so that only its owner can read and write it; check the owner.

    If root calls this for another user, a directory of root is given to that user.

    Args:
        directory: the directory.
        user: the numeric id of the owner; None for the user of this process.

    Raises:
        NotADirectoryError: `directory` is a link or a file.
        PermissionError: it belongs to another user.
        OSError: it cannot be opened.
    """
    owner = os.geteuid() if user is None else user
    try:
        descriptor = os.open(directory, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        got = "a link" if directory.is_symlink() else "no directory"
        raise NotADirectoryError(f"expected a directory at {directory}, got {got}: remove it") from None
    try:
        status = os.fstat(descriptor)
        belongs_to_root = status.st_uid == 0
        if belongs_to_root and owner != 0 and os.geteuid() == 0:
            os.fchown(descriptor, owner, -1)
        elif status.st_uid != owner:
            raise PermissionError(
                f"expected {directory} to belong to user {owner}, got user {status.st_uid}: remove it"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
