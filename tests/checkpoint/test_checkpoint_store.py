"""Test saving and loading: a checkpoint is complete or absent, and durable before its predecessor goes."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import (
    CheckpointError,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from eventloop.checkpoint.commit import PAYLOAD, commit, remove_checkpoint
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.serialize import serialize
from eventloop.temporary.leftovers import leftovers
from tests.checkpoints import NOBODY
from tests.support.recording_disk import RecordingDisk

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OLD, NEW = {"state_dict": {"w": torch.zeros(3)}}, {"state_dict": {"w": torch.ones(3)}}
OPERATIONS_OF_A_NEW_NAME = [
    "make .a.tmp",
    "create .a.tmp/state.pth",
    "write .a.tmp/state.pth",
    "create .a.tmp/manifest.json",
    "write .a.tmp/manifest.json",
    "sync .a.tmp/manifest.json",
    "sync .a.tmp/state.pth",
    "sync directory .a.tmp",  # at the same time
    "rename .a.tmp -> a",
    "sync directory .",
]
OPERATIONS_OF_A_TAKEN_NAME = [
    *OPERATIONS_OF_A_NEW_NAME[:-2],
    "rename .a.tmp -> a-1",
    "sync directory .",
    "rename a -> .a.old",
    "rename a-1 -> a",
    "sync directory .",
    "remove .a.old",
]


def in_order(calls: list[str]) -> list[str]:
    """Return the calls with those of the simultaneous syncs sorted."""
    syncs = [call for call in calls if call.startswith("sync") and ".a.tmp" in call]
    first = calls.index(syncs[0])
    assert calls[first : first + len(syncs)] == syncs
    return [*calls[:first], *sorted(syncs), *calls[first + len(syncs) :]]


def weights(path: Path) -> list[float]:
    return [*load_checkpoint(path)["state_dict"]["w"].tolist()]


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- saving ------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    """A saved checkpoint is read again, by plain torch and under the name of MMEngine's file too; the
    returned size is the payload's."""
    size = save_checkpoint(NEW, f"{tmp_path}/epoch_1")

    assert weights(tmp_path / "epoch_1") == weights(tmp_path / "epoch_1.pth") == [1.0] * 3
    payload = tmp_path / "epoch_1" / PAYLOAD
    assert torch.equal(torch.load(payload, weights_only=True)["state_dict"]["w"], torch.ones(3))
    assert size == payload.stat().st_size
    assert listing(tmp_path) == ["epoch_1"]
    assert listing(tmp_path / "epoch_1") == ["manifest.json", "state.pth"]


def test_durable_before_it_has_its_name(tmp_path: Path) -> None:
    """The files and their directory are synced before the directory is renamed, and its parent is synced
    after that."""
    disk = RecordingDisk(tmp_path)
    save_checkpoint(NEW, tmp_path / "a", disk=disk)

    assert in_order(disk.calls) == OPERATIONS_OF_A_NEW_NAME


def test_directories_above_are_durable_too(tmp_path: Path) -> None:
    """A new parent directory is synced in its own parent before anything is written into it."""
    disk = RecordingDisk(tmp_path)
    save_checkpoint(NEW, tmp_path / "runs" / "x" / "a", disk=disk)

    assert disk.calls[:5] == [
        "make runs",
        "sync directory .",
        "make runs/x",
        "sync directory runs",
        "make runs/x/.a.tmp",
    ]


@pytest.mark.parametrize("is_file", [False, True])
def test_a_taken_name(tmp_path: Path, is_file: bool) -> None:
    """A former checkpoint or file of the name stays until the new one is durable under another name, and is
    removed last."""
    if is_file:
        (tmp_path / "a").touch()
    else:
        save_checkpoint(OLD, tmp_path / "a")
    disk = RecordingDisk(tmp_path)

    save_checkpoint(NEW, tmp_path / "a", disk=disk)

    assert in_order(disk.calls) == OPERATIONS_OF_A_TAKEN_NAME
    assert weights(tmp_path / "a") == [1.0] * 3
    assert listing(tmp_path) == ["a"]


def test_a_name_whose_holder_goes_meanwhile(tmp_path: Path) -> None:
    """If another program removes the former checkpoint, the new one gets the name, and no other path is
    left."""
    save_checkpoint(OLD, tmp_path / "a")
    disk = RecordingDisk(tmp_path)
    disk.before = lambda call: shutil.rmtree(tmp_path / "a") if call == "rename a -> .a.old" else None

    save_checkpoint(NEW, tmp_path / "a", disk=disk)

    assert weights(tmp_path / "a") == [1.0] * 3
    assert listing(tmp_path) == ["a"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_whole_one_is_found_at_every_moment(tmp_path: Path, taken: bool) -> None:
    """Before each operation of a save a complete checkpoint is found: the older one, or the new one."""
    save_checkpoint(OLD, tmp_path / ("a" if taken else "older"))
    disk = RecordingDisk(tmp_path)
    found: list[list[float]] = []

    def check_paths(call: str) -> None:
        paths = find_checkpoints(tmp_path)
        for path in paths:
            verify_checkpoint(path)
        found.append([weights(path)[0] for path in paths])

    disk.before = check_paths
    save_checkpoint(NEW, tmp_path / "a", disk=disk)

    assert all(found)
    assert found[0] == [0.0]


# --- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(OPERATIONS_OF_A_NEW_NAME)))
def test_after_a_failure_nothing_is_left(tmp_path: Path, number: int) -> None:
    """Whichever operation fails, its error is raised, and the directory is as it was before the save."""
    save_checkpoint(OLD, tmp_path / "older")

    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(NEW, tmp_path / "a", disk=RecordingDisk(tmp_path, number))

    assert listing(tmp_path) == ["older"]
    save_checkpoint(NEW, tmp_path / "a")
    assert weights(tmp_path / "a") == [1.0] * 3


@pytest.mark.parametrize("number", range(len(OPERATIONS_OF_A_TAKEN_NAME) - 2))
def test_after_a_failure_under_a_taken_name_the_former_one_has_it(tmp_path: Path, number: int) -> None:
    """Whichever operation fails before the exchange, its error is raised, and the former checkpoint keeps its
    name."""
    save_checkpoint(OLD, tmp_path / "a")

    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(NEW, tmp_path / "a", disk=RecordingDisk(tmp_path, number))

    assert weights(tmp_path / "a") == [0.0] * 3
    assert listing(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [-2, -1])
def test_a_former_one_that_cannot_be_removed(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """If the former checkpoint cannot be removed, the save succeeds, the log has a warning, and a scan
    ignores the rest."""
    save_checkpoint(OLD, tmp_path / "a")

    disk = RecordingDisk(tmp_path, len(OPERATIONS_OF_A_TAKEN_NAME) + number)
    save_checkpoint(NEW, tmp_path / "a", disk=disk)

    assert f"{tmp_path / 'a'} is saved, but the former checkpoint of that name could not be" in caplog.text
    assert weights(tmp_path / "a") == [1.0] * 3
    assert find_checkpoints(tmp_path) == [tmp_path / "a"]


class Unpicklable:
    """An object that raises while it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    """An error of a value that cannot be pickled is raised unchanged."""
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        save_checkpoint({**NEW, "bad": Unpicklable()}, tmp_path / "a")

    assert listing(tmp_path) == []


def test_given_up(tmp_path: Path) -> None:
    """Setting `given_up` ends a save between two pieces of a file, and all its files are removed."""
    given_up = threading.Event()
    disk = RecordingDisk(tmp_path)
    disk.before = lambda call: given_up.set() if call.startswith("write") else None
    large = {"state_dict": {"w": torch.zeros(5 << 20)}}

    with pytest.raises(SaveGivenUp, match="the save was given up"):
        raise commit([serialize(large, tmp_path / "a")], disk, given_up)[0].error or AssertionError

    assert disk.calls[-1] == "remove .a.tmp"
    assert listing(tmp_path) == []


def test_a_group_is_synced_together(tmp_path: Path) -> None:
    """All checkpoints of a group are written before the first sync, renamed in order, and their names synced
    once."""
    disk = RecordingDisk(tmp_path)
    commit([serialize(NEW, tmp_path / name) for name in "ab"], disk)

    left_out = ("create", "sync directory .a", "sync directory .b")
    kinds = [call.split()[0] for call in disk.calls if not call.startswith(left_out)]
    assert kinds == ["make", "write", "write"] * 2 + ["sync"] * 4 + ["rename"] * 2 + ["sync"]
    renames = [call for call in disk.calls if call.startswith("rename")]
    assert renames == ["rename .a.tmp -> a", "rename .b.tmp -> b"]
    assert [weights(tmp_path / name) for name in "ab"] == [[1.0] * 3] * 2


@pytest.mark.parametrize("number", range(len(OPERATIONS_OF_A_NEW_NAME) * 2 - 1))
def test_a_failure_in_a_group(tmp_path: Path, number: int) -> None:
    """Whichever operation fails, each save of a group is complete, or has an error and left no file."""
    disk = RecordingDisk(tmp_path, number)
    outcomes = commit([serialize(NEW, tmp_path / name) for name in "ab"], disk)

    durable = [name for name, outcome in zip("ab", outcomes, strict=True) if outcome.error is None]
    assert len(durable) < 2
    assert listing(tmp_path) == durable
    for name in durable:
        verify_checkpoint(tmp_path / name)


# --- leftovers ---------------------------------------------------------------------------------------------


def test_the_remains_of_a_killed_save(tmp_path: Path) -> None:
    """Temporary directories of killed saves are not found as checkpoints, are listed by `leftovers`, do not
    block a save whose process has the same id, and are removed by it."""
    other = tmp_path / f".b.{NOBODY}-1.old"
    save_checkpoint(OLD, tmp_path / "b")
    (tmp_path / "b").rename(other)
    mine = [tmp_path / f".a.{os.getpid()}-{number}.tmp" for number in range(20)]
    for path in mine:
        path.mkdir()
    (mine[0] / PAYLOAD).write_bytes(b"half")
    (tmp_path / ".hidden").mkdir()
    assert sorted(leftovers(tmp_path)) == sorted([*mine, other])
    assert leftovers(tmp_path, NOBODY) == [other]

    save_checkpoint(NEW, tmp_path / "a")

    assert find_checkpoints(tmp_path) == [tmp_path / "a"]
    assert leftovers(tmp_path) == []
    assert (tmp_path / ".hidden").is_dir()


def test_removing(tmp_path: Path) -> None:
    """A checkpoint loses its name before its files are removed; a single file is removed at once."""
    save_checkpoint(NEW, tmp_path / "a")
    (tmp_path / "b.pth").touch()
    disk = RecordingDisk(tmp_path)

    remove_checkpoint(tmp_path / "a", disk)
    remove_checkpoint(tmp_path / "b.pth", disk)

    assert disk.calls == ["rename a -> .a.old", "sync directory .", "remove .a.old", "remove b.pth"]
    assert listing(tmp_path) == []


# --- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt"])
def test_a_single_file_is_loaded(tmp_path: Path, suffix: str) -> None:
    """A single file, such as another program's checkpoint, is loaded and found without a manifest."""
    torch.save(NEW, tmp_path / f"theirs{suffix}")

    assert weights(tmp_path / f"theirs{suffix}") == [1.0] * 3
    assert find_checkpoints(tmp_path) == [tmp_path / f"theirs{suffix}"]


def test_no_such_checkpoint(tmp_path: Path) -> None:
    """The error has the path that does not exist, and a similar name or the fact that the folder has no
    checkpoint."""
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*/epoch_1\.pth: .* holds no checkpoint"):
        load_checkpoint(tmp_path / "epoch_1.pth")

    save_checkpoint(NEW, tmp_path / "epoch_1")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*/epoch_11: did you mean 'epoch_1'"):
        load_checkpoint(tmp_path / "epoch_11")


@pytest.mark.parametrize("contents", [b"# a text\n", b"{}", b""])
def test_another_file_is_no_checkpoint(tmp_path: Path, contents: bytes) -> None:
    """The error says what was expected, and how the file begins."""
    (tmp_path / "other").write_bytes(contents)

    expected = f"other cannot be read .*expected a file that torch.save .*got one .* with {re.escape(repr(contents))}"
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint(tmp_path / "other")


class Hostile:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def plain_pickle(state: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(state))


@pytest.mark.parametrize(
    ("write", "name"),
    [(torch.save, "bad.pth"), (plain_pickle, "bad.pth"), (save_checkpoint, "bad")],
    ids=["torch", "pickle", "directory"],
)
def test_nothing_is_executed(tmp_path: Path, write: Any, name: str) -> None:
    """A pickle that would run code is refused, also in a checkpoint with a correct manifest."""
    write({"state_dict": Hostile(tmp_path / "executed")}, tmp_path / name)

    with pytest.raises(CheckpointError, match=f"{name} cannot be read as a checkpoint: "):
        load_checkpoint(tmp_path / name)
    assert not (tmp_path / "executed").exists()
