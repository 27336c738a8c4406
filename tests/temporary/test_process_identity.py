"""A process is known by its place, its id and its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import time

import pytest

from eventloop.temporary.names import directory_time, process_of, temporary_path
from eventloop.temporary.process_identity import Process, has_number, lives, this_process
from tests.support.forking import forked
from tests.support.no_proc import no_proc

PRINTS = "from eventloop.temporary.process_identity import this_process; print(*this_process(), flush=True); input()"
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


__all__ = ["no_proc"]


def other() -> tuple[subprocess.Popen[str], Process]:
    """A living Python process, and the identity that it gives itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    place, pid, start = process.stdout.readline().split()
    return process, Process(place, int(pid), int(start))


def test_a_process_lives_until_it_has_ended() -> None:
    """Another process of this machine is known by the identity it gave itself; a zombie has ended."""
    process, identity = other()
    try:
        assert identity.pid == process.pid
        assert lives(identity) is True
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
    assert lives(identity) is False
    assert not has_number(process.pid)
    process.communicate()
    assert lives(identity) is False


@linux
def test_another_process_with_the_same_id_is_another_one() -> None:
    """A recycled id is told from the process that had it before by the start."""
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        here = this_process()
        assert lives(Process(here.place, sleeping.pid, here.start - 1)) is False
    finally:
        sleeping.kill()
        sleeping.wait()


def test_a_process_elsewhere_is_not_looked_up() -> None:
    """Whether it lives cannot be known here, whatever its id."""
    assert lives(Process("0123456789ab", *this_process()[1:])) is None


def test_a_forked_child_has_an_identity_of_its_own() -> None:
    """It is not that of its parent, which has computed its own before."""
    parent = this_process()
    child = forked(lambda: 0 if this_process() == parent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.usefixtures("no_proc")
def test_without_proc() -> None:
    """A process that has ended is known to have; whether one that exists is the same one is not."""
    here = this_process()
    sleeping = subprocess.Popen(["sleep", "60"])
    identity = Process(here.place, sleeping.pid, 0)
    assert here.start == 0
    assert lives(here) is True
    assert lives(identity) is None
    sleeping.kill()
    sleeping.wait()
    assert lives(identity) is False


def test_a_temporary_name_names_its_process(tmp_path: Path) -> None:
    """It is hidden, unused, and leads back to the process; other hidden names lead nowhere."""
    first = temporary_path(tmp_path / "epoch_1.pth", "tmp")
    first.touch()
    second = temporary_path(tmp_path / "epoch_1.pth", "old")

    assert first.name.startswith(".epoch_1.pth.")
    assert first != second
    for path in (first, second):
        named = process_of(path)
        assert named is not None
        assert (named.process, named.lives) == (this_process(), True)
    for name in (".epoch_1.pth", ".hidden.tmp", "epoch_1", ".a.12.tmp", ".a.x-1.tmp", ".owner-1"):
        assert process_of(tmp_path / name) is None


def test_a_name_of_an_earlier_version(tmp_path: Path) -> None:
    """It has the process id alone; with this process's own id it is of an earlier run in a container."""
    for pid, alive in ((os.getpid(), False), (2**22 + 1, False), (os.getppid(), None)):
        named = process_of(tmp_path / f".epoch_1.{pid}-3.tmp")
        assert named is not None
        assert (named.pid, named.process, named.lives) == (pid, None, alive)


def test_the_clock_of_a_directory(tmp_path: Path) -> None:
    """It is that of the files in it; without a directory to write in it is the local one."""
    mark = tmp_path / "mark"
    mark.touch()
    assert mark.stat().st_mtime <= directory_time(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mark"]

    before = time()
    assert before <= directory_time(tmp_path / "none")
