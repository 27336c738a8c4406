"""`eventloop checkpoints` of what was published: files whose names have the beginning of their hashes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint.commit import PAYLOAD, remove_checkpoint
from eventloop.checkpoint.listing import Stock
from eventloop.checkpoint.verify import check_sizes
from tests.cli.conftest import train
from tests.cli.saved_runs import checkpoints, flip, names


@pytest.fixture(params=["pth", "safetensors"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a run has published, of its last checkpoint and of the best."""
    train(tmp_path / "run", published_keys="state_dict", published_format=request.param)
    return min((tmp_path / "run").glob(f"best*.{request.param}"))


def row(published: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Its line."""
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(published.name)]
    return line


def test_it_is_listed_and_verified(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the checkpoints; what its name says is what it has."""
    assert checkpoints(published.parent) == 0
    assert row(published, capsys).endswith("  a single file, named by its hash")

    assert checkpoints(published.parent, "--verify") == 0
    assert row(published, capsys).endswith("  a single file, named by its hash; whole")
    assert checkpoints(published.parent, "--verify", "--json") == 0
    told = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["epoch"], each["whole"]) for each in told if each["name"] == published.name] == [
        (None, True)
    ]
    assert [each["epoch"] is None for each in told] == sorted(
        (each["epoch"] is None for each in told), reverse=True
    )


def test_a_flipped_bit_is_found(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with exit code 1."""
    flip(published)

    assert checkpoints(published.parent, "--verify") == 1

    *lines, damaged = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("DAMAGED")] == [published.name]
    assert damaged.startswith(f"damaged: {published} is damaged: its SHA-256 begins with ")
    assert f", expected {published.stem[-8:]} from its name. If" in damaged


def test_it_is_never_pruned(published: Path) -> None:
    """Nor is a damaged one."""
    flip(published)

    checkpoints(published.parent, "--verify", "--prune", "1", "--yes")

    assert published.is_file()
    assert names(published.parent) == {"best_acc_epoch_2", "epoch_4"}


def test_where_there_is_nothing_else(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is what the directory holds."""
    for name in names(published.parent):
        remove_checkpoint(published.parent / name)

    assert checkpoints(published.parent, "--verify") == 0
    assert row(published, capsys).endswith("whole")


@pytest.mark.parametrize(
    "name", ["model-20240131.pth", "model-00012000.safetensors", "model-1a2b3c4d5.pth", "1a2b3c4d.pth"]
)
def test_other_numbers_are_no_hash(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A date, and a counter with zeros before it: others name their files so."""
    (run / name).write_bytes(b"weights")

    assert checkpoints(run, "--verify") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  a single file, without a manifest")


def test_one_that_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and the others are verified."""
    path = run / "epoch_4-1a2b3c4d.pth"
    path.touch()

    def fail(file: Any, name: str) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr("eventloop.checkpoint.listing.verify_checkpoint", lambda path: None)
    monkeypatch.setattr("hashlib.file_digest", fail)
    stock = Stock(run)
    stock.verify()

    assert stock.damaged() == [f"{path} cannot be read: input/output error"]
    assert stock.inventory().checkpoints[-1].whole


def test_one_that_is_removed_meanwhile(run: Path) -> None:
    """By its owner: it is not in the list then."""
    path = run / "epoch_4-1a2b3c4d.safetensors"
    path.touch()
    stock = Stock(run)
    path.unlink()

    stock.verify()

    assert path.name not in [item.name for item in stock.inventory().checkpoints]
    assert stock.damaged() == []


# --- sizes -------------------------------------------------------------------------------------------------


def test_a_short_one_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is known to be damaged is left, for somebody to look at; what counts are whole ones."""
    os.truncate(run / "epoch_1" / PAYLOAD, 100)
    os.truncate(run / "epoch_4" / PAYLOAD, 100)

    assert checkpoints(run, "--prune", "1", "--yes") == 1

    assert names(run) == {"epoch_1", "best_acc_epoch_2", "epoch_3", "epoch_4"}
    assert "Verified, and kept: best_acc_epoch_2, epoch_3\n" in capsys.readouterr().out


def test_what_a_run_removes_while_sizes_are_compared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forgotten, and no damage."""

    def late(path: Path, manifest: Any) -> None:
        if path.name == "epoch_1":
            remove_checkpoint(path)
        check_sizes(path, manifest)

    monkeypatch.setattr("eventloop.checkpoint.listing.check_sizes", late)

    told = Stock(run).inventory()

    assert [item.name for item in told.checkpoints] == ["best_acc_epoch_2", "epoch_2", "epoch_3", "epoch_4"]
    assert told.damaged == []
