"""Who owns a directory, and whether that run lives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from eventloop.ownership import read_owner
from eventloop.ownership.acquiring import acquire
from eventloop.ownership.owner import records_in
from eventloop.temporary.process_identity import this_process
from tests.checkpoints import NOBODY
from tests.ownership.conftest import Forge
from tests.ownership.trainings import KILL, alive
from tests.support.no_proc import no_proc

__all__ = ["no_proc"]


def test_a_directory_without_an_owner(tmp_path: Path) -> None:
    """One that never had a run, or does not exist."""
    assert read_owner(tmp_path) is None
    assert read_owner(tmp_path / "none") is None


def test_the_owner_is_described(run: Path) -> None:
    """Where it runs, since when, what it does, and that it lives; afterwards that it has ended."""
    held = acquire(run, "training")
    owner = read_owner(str(run))
    assert owner is not None
    assert (owner.pid, owner.host, owner.state, owner.lives, owner.ours) == (
        os.getpid(),
        os.uname().nodename,
        "training",
        True,
        True,
    )
    assert owner.since.startswith("20")

    held.change("ending")
    owner = read_owner(run)
    assert owner is not None
    assert (owner.state, owner.lives) == ("ending", True)

    held.release()
    assert read_owner(run) is None
    assert [*run.iterdir()] == []


def test_an_owner_dies_with_its_process(run: Path) -> None:
    """At once when it is killed, and before anybody has asked for its exit code."""
    with alive(run) as training:
        owner = read_owner(run)
        assert owner is not None
        assert (owner.pid, owner.lives, owner.ours) == (training.process.pid, True, False)

        training.send(KILL)
        training.process.wait()

        owner = read_owner(run)
        assert owner is not None
        assert (owner.state, owner.lives) == ("training", False)


@pytest.mark.parametrize(("age", "lives"), [(0.0, None), (20.0, None), (31.0, False), (-60.0, False)])
def test_an_owner_elsewhere_lives_by_its_heartbeat(
    run: Path, forge: Forge, age: float, lives: bool | None
) -> None:
    """After thirty seconds of silence it is dead; before, it may have died just now. A time in the future is no sign of
    life."""
    forge(age)

    owner = read_owner(run)
    assert owner is not None
    assert (owner.host, owner.lives) == ("elsewhere", lives)


@pytest.mark.parametrize("damage", [b"", b'{"host":', b"\xff\xfe", b'{"pid":"x"}'])
@pytest.mark.parametrize(("age", "lives"), [(0.0, None), (31.0, False)])
def test_a_damaged_record(run: Path, forge: Forge, damage: bytes, age: float, lives: bool | None) -> None:
    """It is as that of a run elsewhere, which is known by its heartbeat alone."""
    path = forge()
    path.write_bytes(damage)
    when = path.stat().st_mtime - age
    os.utime(path, (when, when))

    owner = read_owner(run)
    assert owner is not None
    assert (owner.host, owner.pid, owner.lives) == ("", 0, lives)


def test_a_copy_has_no_owner(run: Path, tmp_path: Path) -> None:
    """The copy of a live run's directory is free, one that was renamed is not."""
    held = acquire(run, "training")
    try:
        copy = Path(shutil.copytree(run, tmp_path / "copy"))
        owner = read_owner(copy)
        assert owner is not None
        assert owner.lives is False

        run.rename(tmp_path / "renamed")
        owner = read_owner(tmp_path / "renamed")
        assert owner is not None
        assert owner.lives is True
    finally:
        held.release()


def test_the_living_one_counts(run: Path, forge: Forge) -> None:
    """What killed runs have left beside it is no owner, nor a run that claims the directory at the moment."""
    forge(age=31.0, number=1)
    living = forge(age=2.0, number=2)
    forge(number=3, state="claiming")
    (run / ".owned").touch()

    owner = read_owner(run)
    assert owner is not None
    assert (owner.path, owner.lives) == (living, None)


def test_a_record_of_this_process_that_is_not_held(run: Path) -> None:
    """A run whose release failed does not keep later runs of its process away."""
    held = acquire(run, "training")
    (path,) = records_in(run)
    record = path.read_bytes()
    held.release()
    path.write_bytes(record)

    owner = read_owner(run)
    assert owner is not None
    assert (owner.ours, owner.lives) == (True, False)


@pytest.mark.parametrize(("age", "lives"), [(0.0, None), (31.0, False)])
def test_without_proc_a_heartbeat_decides(
    run: Path, forge: Forge, no_proc: None, age: float, lives: bool | None
) -> None:
    """A process id that exists may be another process's; one that does not exist is dead at once."""
    here = this_process().place
    path = forge(age, pid=os.getppid(), place=here, start=0)
    owner = read_owner(run)
    assert owner is not None
    assert owner.lives is lives

    path.unlink()
    forge(pid=NOBODY, place=here, start=0)
    owner = read_owner(run)
    assert owner is not None
    assert owner.lives is False
