"""`eventloop checkpoints` of what was published: files whose names have the beginning of their hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint.commit import remove_checkpoint
from eventloop.checkpoint.listing import Stock
from tests.cli.conftest import train
from tests.cli.saved_runs import checkpoints, flip, names
from tests.support.internals import substitute


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
    """Before the checkpoints, also where there are none; what its name says is what it has."""
    assert checkpoints(published.parent) == 0
    assert row(published, capsys).endswith("  a single file, named by its hash")

    assert checkpoints(published.parent, "--verify", "--json") == 0
    told = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["epoch"] for each in told if each["name"] == published.name] == [None]
    assert all(each["whole"] for each in told)
    single = [each["epoch"] is None for each in told]
    assert single == sorted(single, reverse=True)
    for name in names(published.parent):
        remove_checkpoint(published.parent / name)
    assert checkpoints(published.parent, "--verify") == 0
    assert row(published, capsys).endswith("  a single file, named by its hash; whole")


def test_a_flipped_bit_is_found(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with exit code 1; the damaged file is never pruned."""
    flip(published)

    assert checkpoints(published.parent, "--verify", "--prune", "1", "--yes") == 1

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("DAMAGED")] == [published.name]
    (damaged,) = (line for line in lines if line.startswith("damaged: "))
    assert damaged.startswith(f"damaged: {published} is damaged: its SHA-256 begins with ")
    assert f", expected {published.stem[-8:]} from its name. If" in damaged
    assert published.is_file()
    assert names(published.parent) == {"best_acc_epoch_2", "epoch_4"}


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "name", ["epoch_4.pth", "model-20240131.pth", "model-00012000.safetensors", "1a2b3c4d.pth"]
)
def test_other_names_have_no_hash(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A date, and a counter with zeros before it: others name their files so. There is nothing to compare such a file
    with, and it is never pruned."""
    (run / name).write_bytes(b"weights")

    assert checkpoints(run, "--verify", "--prune", "1", "--yes") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  a single file, without a manifest")
    assert (run / name).is_file()


def test_one_that_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and the others are verified; one that its owner removes meanwhile is not in the list."""
    path, gone = run / "epoch_4-1a2b3c4d.pth", run / "epoch_4-1a2b3c4d.safetensors"
    path.touch()
    gone.touch()

    def fail(file: Any, name: str) -> None:
        raise OSError("input/output error")

    substitute(monkeypatch, "listing.verify_checkpoint", lambda path: None)
    monkeypatch.setattr("hashlib.file_digest", fail)
    stock = Stock(run)
    gone.unlink()
    stock.verify()

    assert stock.damaged() == [f"{path} cannot be read: input/output error"]
    assert stock.inventory().checkpoints[-1].whole
    assert gone.name not in [item.name for item in stock.inventory().checkpoints]
