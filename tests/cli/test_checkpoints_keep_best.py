"""`eventloop checkpoints` of a run that keeps the best few of a metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.manifest import read_manifest
from tests.cli.saved_runs import checkpoints, label_of, names

SCORES = (0.25, 0.75, 0.5, 0.75)


@pytest.fixture
def losses(run: Path) -> Path:
    """The run, and four that were saved as one of the best of another metric."""
    _save_all(run, [3, 3, 3, 3])
    return run


def _save_all(run: Path, numbers: list[int]) -> None:
    state, newest = load_checkpoint(run / "epoch_1"), read_manifest(run / "epoch_4")
    for at, (loss, keep_best) in enumerate(zip(SCORES, numbers, strict=True), 50):
        said: dict[str, Any] = {"best": {"loss": "less"}, "metrics": {"loss": loss}, "keep_best": keep_best}
        save_checkpoint(state, run / f"loss_{at}", label_of(newest, sequence=at, **said))


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([3, 3, 3, 3], {"loss_50", "loss_52", "loss_53"}),
        ([3, 3, 3, 1], {"loss_50", "loss_53"}),
        ([1, 1, 3, 4], {"loss_50", "loss_51", "loss_52", "loss_53"}),
        ([-1, -1, -1, -1], {"loss_50", "loss_51", "loss_52", "loss_53"}),
    ],
    ids=["three", "fewer", "more", "all"],
)
def test_prune_keeps_as_many_as_the_run(run: Path, numbers: list[int], kept: set[str]) -> None:
    """As the newest of them says, which is kept as the newest of all in any case; of equal ones the newest first."""
    _save_all(run, numbers)

    assert checkpoints(run, "--prune", "1", "--yes") == 0

    assert names(run) == {"best_acc_epoch_2", *kept}


def test_they_are_told_from_what_was_outdone(losses: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best, those that stay beside it, and what no longer is one of them."""
    checkpoints(losses)
    notes = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "  best loss 0.25" in notes["loss_50"]
    assert "one of the best loss 0.5" in notes["loss_52"]
    assert "was best loss 0.75" in notes["loss_51"]

    checkpoints(losses, "--json")
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert [name for name, item in items.items() if item["best_now"] == ["loss"]] == ["loss_50"]
    assert {name for name, item in items.items() if "loss" in item["best_kept"]} == {
        "loss_50", "loss_52", "loss_53",
    }  # fmt: skip
