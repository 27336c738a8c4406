"""What killed saves leave is told from what is being written, and removed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.checkpoint import save_checkpoint
from eventloop.temporary.leftovers import is_alive, leftovers, remove_dead, remove_unfinished, running_saves
from eventloop.temporary.names import name_of_ranks
from eventloop.temporary.process_identity import this_process
from tests.cli.saved_runs import checkpoints
from tests.support.trainers import build_trainer

HOUR = 3600.0
KINDS = ("zombie", "elsewhere", "recycled")


def zombie() -> int:
    """Return the id of a process that has ended, and that this process has not reaped."""
    if not _zombies:
        _zombies.append(subprocess.Popen(["true"]))
        os.waitid(os.P_PID, _zombies[0].pid, os.WEXITED | os.WNOWAIT)
    return _zombies[0].pid


_zombies: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="module", autouse=True)
def _reap() -> Iterator[None]:
    yield
    while _zombies:
        _zombies.pop().wait()


def write_half_a_save(directory: Path, kind: str, name: str = "iter_3", *, old_name: bool = False) -> Path:
    """Leave half a save of a process that has ended, of one elsewhere, or of one whose id another one has now."""
    here = this_process()
    pid, place, start = {
        "zombie": (zombie(), here.place, here.start),
        "elsewhere": (1, "0123456789ab", 5),
        "recycled": (os.getppid(), here.place, 5),
    }[kind]
    rest = "" if old_name else f"-{place}-{start}"
    left = directory / f".{name}.{pid}{rest}-1.tmp"
    left.mkdir()
    (left / "state.pth").write_bytes(b"half")
    return left


def grow_old(left: Path, seconds: float) -> None:
    """Set the times of a leftover back."""
    for path in (left / "state.pth", left):
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_leftover_goes_at_the_next_save(tmp_path: Path, kind: str) -> None:
    """Whoever saves removes it, and nothing of a living process; one from elsewhere once it is silent for an hour."""
    left, mine = write_half_a_save(tmp_path, kind), tmp_path / f".iter_9.{_token()}-99.tmp"
    mine.mkdir()
    if kind == "elsewhere":
        save_checkpoint({"state_dict": {}}, tmp_path / "iter_3")
        assert left.exists()
        grow_old(left, HOUR + 1)

    save_checkpoint({"state_dict": {}}, tmp_path / "iter_4")

    assert leftovers(tmp_path) == [mine]


def _token() -> str:
    place, pid, start = this_process()
    return f"{pid}-{place}-{start}"


@pytest.mark.parametrize("old_name", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_leftover_goes_when_a_training_begins(tmp_path: Path, kind: str, old_name: bool) -> None:
    """The owner of a directory knows that no other run lives there. A save elsewhere may have outlived its run by two
    minutes, and so may one of an earlier version whose process id some process has."""
    run = tmp_path / "run"
    build_trainer(run, max_epochs=1).train()
    left = write_half_a_save(run, kind, old_name=old_name)
    if kind == "elsewhere" or (kind == "recycled" and old_name):
        grow_old(left, 121)

    build_trainer(run, max_epochs=1).train()

    assert leftovers(run) == []


@pytest.mark.parametrize("old_name", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_leftover_is_pruned(
    tmp_path: Path, kind: str, old_name: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eventloop checkpoints --prune` lists it as of a killed save, and removes it."""
    run = tmp_path / "run"
    build_trainer(run, max_epochs=1).train()
    left = write_half_a_save(run, kind, old_name=old_name)
    if kind == "elsewhere" or (kind == "recycled" and old_name):
        grow_old(left, 121)

    assert checkpoints(run, "--prune", "1", "--yes") == 0

    assert f"leftover: {left.name}, 4 B, of a save that was killed" in capsys.readouterr().out
    assert leftovers(run) == []


def test_a_name_of_an_earlier_version(tmp_path: Path) -> None:
    """It has a process id alone: one that some process has now stays until nothing was written for an hour, and for two
    minutes where no other run lives."""
    left = tmp_path / f".iter_3.{os.getppid()}-1.tmp"
    left.mkdir()
    (left / "state.pth").touch()

    remove_dead(tmp_path)
    assert is_alive(left)
    assert is_alive(left, owned=True)
    grow_old(left, 121)
    assert is_alive(left)
    assert not is_alive(left, owned=True)

    grow_old(left, HOUR + 1)
    remove_dead(tmp_path)
    assert not left.exists()


def test_running_saves_are_those_of_other_processes(tmp_path: Path) -> None:
    """A run waits for none of its own, and for none whose process has ended."""
    here = this_process()
    parent = Path(f"/proc/{os.getppid()}/stat")
    if not parent.exists():
        pytest.skip("needs /proc")
    start = parent.read_text().rpartition(")")[2].split()[19]
    theirs = tmp_path / f".iter_3.{os.getppid()}-{here.place}-{start}-1.tmp"
    for path in (theirs, tmp_path / f".iter_4.{_token()}-1.tmp"):
        path.mkdir()
    for kind in KINDS:
        write_half_a_save(tmp_path, kind, f"iter_{kind}")

    assert running_saves(tmp_path) == [theirs]


def replaced_by_a_dead_process(directory: Path) -> Path:
    """Leave a checkpoint that a process has renamed in order to remove it, and has not removed before it ended."""
    here = this_process()
    left = directory / f".iter_3.{zombie()}-{here.place}-{here.start}-1.old"
    left.mkdir()
    (left / "state.pth").write_bytes(b"whole")
    return left


def test_a_rename_is_durable_before_the_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash could bring back a checkpoint under its own name, without the files that are removed by then."""
    left, fsync = replaced_by_a_dead_process(tmp_path), os.fsync
    was_whole: list[bool] = []

    def sync(descriptor: int) -> None:
        assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        was_whole.append((left / "state.pth").exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    remove_unfinished(tmp_path / "iter_3", zombie())
    assert left.exists()
    remove_dead(tmp_path)

    assert was_whole == [True]
    assert not left.exists()


def test_a_rename_that_cannot_be_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint stays under its temporary name, whole."""
    left = replaced_by_a_dead_process(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    remove_dead(tmp_path)

    assert [path.name for path in left.iterdir()] == ["state.pth"]


def test_a_file_that_vanishes_while_the_files_are_listed(tmp_path: Path) -> None:
    """A directory of several ranks in which one renames a file at this moment is being written, and stays."""
    work = tmp_path / name_of_ranks("epoch_3", "0123456789ab", 7)
    work.mkdir()
    (work / "vote_1.part").symlink_to("renamed meanwhile")  # it is listed, and is not there

    remove_dead(tmp_path)
    remove_dead(tmp_path, owned=True)

    assert work.is_dir()
