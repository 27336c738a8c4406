"""Create and check the folders for commands and answers, which are open to the run's user alone."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def create_private(directory: Path, user: int | None = None) -> None:
    """Create a directory that only one user can read and write, whatever the umask; it may exist.

    Args:
        directory: the directory, whose parent exists.
        user: the numeric id of the user; None for that of this process. Only root may name another one.

    Raises:
        OSError: it cannot be created, or `make_private` refuses it.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        os.chmod(directory, 0o700)  # a umask may have taken bits of the owner
    make_private(directory, user)


def make_private(directory: Path, user: int | None = None) -> None:
    """Close a directory to all but one user; root gives one of its own to that user.

    Raises:
        NotADirectoryError: it is a link or a file.
        PermissionError: it belongs to another user.
        OSError: it cannot be opened.
    """
    own = os.geteuid() if user is None else user
    try:
        descriptor = os.open(directory, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        got = "a link" if directory.is_symlink() else "no directory"
        raise NotADirectoryError(f"expected a directory at {directory}, got {got}: remove it") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid == 0 != own and os.geteuid() == 0:
            os.fchown(descriptor, own, -1)
        elif status.st_uid != own:
            raise PermissionError(
                f"expected {directory} to belong to user {own}, got user {status.st_uid}: remove it"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
