"""The commit of a program, against `git rev-parse HEAD`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from eventloop.description.commit import commit_around


def git(place: Path, *arguments: str) -> str:
    """The output of a git command."""
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *name, *arguments], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_git(tmp_path: Path) -> None:
    """In a folder of a branch, of a packed branch, of a second worktree and of a checked out commit; "" before the first
    commit and outside."""
    assert commit_around(tmp_path) == ""
    work, other = tmp_path / "work", tmp_path / "other"
    (work / "folder").mkdir(parents=True)
    git(work, "init", "-q")
    assert commit_around(work) == ""
    git(work, "commit", "-q", "--allow-empty", "-m", "one")
    first = git(work, "rev-parse", "HEAD")
    assert commit_around(work / "folder") == first

    git(work, "worktree", "add", "-q", str(other), "-b", "second")
    git(work, "pack-refs", "--all")
    assert [commit_around(work), commit_around(other)] == [first, first]
    git(other, "commit", "-q", "--allow-empty", "-m", "two")
    second = git(other, "rev-parse", "HEAD")
    assert [commit_around(work), commit_around(other)] == [first, second]

    git(work, "checkout", "-q", "--detach", second)
    assert commit_around(work) == second
