"""Find the git commit of a program, by reading files; no process is started."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def program_commit() -> str:
    """Return the commit that is checked out around the main script, or around the current directory.

    It is "" outside of a git repository, and if it is not known.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    with suppress(OSError, UnicodeDecodeError):
        return commit_around(Path(main).resolve().parent if main else Path.cwd())
    return ""


def commit_around(directory: Path) -> str:
    """Return the commit that is checked out in the repository around an absolute directory, or "".

    Raises:
        OSError, UnicodeDecodeError: a file of the repository cannot be read.
    """
    for place in (directory, *directory.parents):
        if (git := place / ".git").exists():
            return _head(git)
    return ""


def _head(git: Path) -> str:
    if git.is_file():  # of a second worktree, or of a submodule
        git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"  # the branches of a second worktree are in the first one's
    common = git / shared.read_text("utf-8").strip() if shared.exists() else git
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text("utf-8").strip()
    packed = common / "packed-refs"
    lines = packed.read_text("utf-8").splitlines() if packed.exists() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {name}")), "")
