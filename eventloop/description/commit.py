"""Find the git commit of a program by reading the files of its repository, without running git."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def program_commit() -> str:
    """Return the hash of the commit that is checked out in the repository of the main script.

    Without a main script, as in a notebook, it is the repository of the current directory. Return "" outside
    of a repository, and if a file of the repository cannot be read.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    with suppress(OSError, UnicodeDecodeError):
        return commit_around(Path(main).resolve().parent if main else Path.cwd())
    return ""


def commit_around(directory: Path) -> str:
    """Return the hash of the commit that is checked out in the repository of a directory; "" without one.

    Args:
        directory: an absolute path in the repository.

    Raises:
        OSError, UnicodeDecodeError: a file of the repository cannot be read.
    """
    for folder in (directory, *directory.parents):
        if (git := folder / ".git").exists():
            return _head(git)
    return ""


def _head(git: Path) -> str:
    """Return the hash of the commit that `HEAD` refers to, given the path of `.git`; "" if it has none."""
    if git.is_file():  # in a second worktree or a submodule, `.git` is a file with the path of the folder
        git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"  # a second worktree has its branches in the folder that this file names
    common = git / shared.read_text("utf-8").strip() if shared.exists() else git
    for folder in (git, common):
        if (folder / name).is_file():
            return (folder / name).read_text("utf-8").strip()
    packed = common / "packed-refs"
    lines = packed.read_text("utf-8").splitlines() if packed.exists() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {name}")), "")
