"""Test several CheckpointHooks of one trainer, each with its own directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import read_manifest
from eventloop.hooks import CheckpointHook

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Run = Callable[..., Trainer]


@pytest.fixture
def run(make_trainer: Make, tmp_path: Path) -> Run:
    """Return a function that builds a trainer of six epochs with two hooks, the second of which saves in an
    archive."""

    def make(archive: dict[str, Any], first: dict[str, Any] | None = None, **options: Any) -> Trainer:
        hooks = [
            CheckpointHook(**{"interval": 1, "save_last": False, **(first or {})}),
            CheckpointHook(**{"save_last": False, "out_dir": tmp_path / "archive", **archive}),
        ]
        return make_trainer(**{"max_epochs": 6, "hooks": hooks, **options})

    return make


def crashed(trainer: Trainer, *, epochs: int) -> list[str]:
    """Train, let an error end the run after so many epochs, and return the error's notes on resuming."""
    trainer.bus.subscribe(
        lambda event: 1 / 0, "before_train_epoch", start=epochs + trainer.epoch, name="fails"
    )
    with pytest.raises(ZeroDivisionError) as failed:
        trainer.train()
    return [note for note in failed.value.__notes__ if "resume" in note]


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("archive", "first", "newest"),
    [
        ({"interval": 2}, {}, "run/epoch_3"),
        ({"interval": 1}, {"interval": 2}, "archive/run/epoch_3"),
        ({"interval": 7, "by_epoch": False}, {"interval": 5}, "archive/run/iter_7"),
        ({"interval": 1, "save_optimizer": False}, {"interval": 2}, "run/epoch_2"),
    ],
)
def test_auto_takes_the_newest_of_all(
    run: Run, tmp_path: Path, archive: dict[str, Any], first: dict[str, Any], newest: str
) -> None:
    """`resume("auto")` takes the newest checkpoint of all hooks that can be resumed from, and an error names
    it in one note."""
    notes = crashed(run(archive, first), epochs=3)

    resumed = run(archive, first)
    assert resumed.resume("auto") == tmp_path / newest
    assert notes == [
        f"the newest checkpoint to resume from is {tmp_path / newest} (iteration {resumed.iter})"
    ]
    again = crashed(resumed, epochs=0)  # before its own first save it names the one of the run before
    assert again == notes


def test_the_order_is_that_of_saving(run: Run, tmp_path: Path) -> None:
    """Sequences count through all hooks, also in a resumed run with another hook."""
    crashed(run({"interval": 2}, hooks=[CheckpointHook(interval=1)]), epochs=2)
    second = run({"interval": 1})
    second.resume("auto")
    crashed(second, epochs=2)

    order = {
        read_manifest(path.parent).sequence: str(path.parent.relative_to(tmp_path))
        for path in tmp_path.rglob("manifest.json")
    }
    assert [order[key] for key in sorted(order)] == [
        "run/epoch_1",
        "run/epoch_2",
        "run/epoch_3",
        "archive/run/epoch_3",
        "run/epoch_4",
        "archive/run/epoch_4",
    ]
    assert sorted(order) == [1, 2, 3, 4, 5, 6]


def test_the_best_of_all(run: Run, scripted: Scripted, tmp_path: Path) -> None:
    """`resume("best")` finds the best checkpoint in the directory of the hook that saves it."""
    archive = {"interval": -1, "save_best": "acc"}
    crashed(run(archive, **scripted(0.25, 0.75, 0.5)), epochs=3)

    resumed = run({"interval": 2})
    assert resumed.resume("best") == tmp_path / "archive" / "run" / "best_acc_epoch_2"
    assert resumed.epoch == 2


def test_a_name_is_looked_for_in_all(run: Run, tmp_path: Path) -> None:
    """A name is searched in the directories of all hooks, the first hook's first; an error names all
    directories."""
    archive: dict[str, Any] = {"interval": 2, "by_epoch": False}
    crashed(run(archive), epochs=2)

    assert run(archive).resume("iter_4") == tmp_path / "archive" / "run" / "iter_4"
    shutil.copytree(tmp_path / "run" / "epoch_1", tmp_path / "archive" / "run" / "epoch_1")
    assert run(archive).resume("epoch_1") == tmp_path / "run" / "epoch_1"
    with pytest.raises(
        FileNotFoundError,
        match=r"no checkpoint at iter_44, nor .* in .*run or .*archive/run: there are epoch_2, epoch_1, iter_8",
    ):
        run(archive).resume("iter_44")


@pytest.mark.parametrize(
    ("chosen", "left", "then"),
    [
        ("run/epoch_1", ["run/epoch_2", "archive/run/epoch_2", "run/epoch_3"], "archive/run/epoch_2"),
        ("archive/run/epoch_2", ["run/epoch_3"], "run/epoch_3"),
    ],
)
def test_going_back_leaves_behind_what_is_newer_in_all(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen: str, left: list[str], then: str
) -> None:
    """After a step back `resume("auto")` goes on from there, and then from what the run saves."""
    archive = {"interval": 2}
    crashed(run(archive), epochs=3)
    second = run(archive)
    second.resume(tmp_path / chosen)
    crashed(second, epochs=0)

    third = run(archive)
    assert third.resume("auto") == tmp_path / chosen
    assert (
        f"a run went back before it saved {', '.join(str(tmp_path / each) for each in left)}," in caplog.text
    )
    crashed(third, epochs=1)
    assert run(archive).resume("auto") == tmp_path / then


def test_a_run_that_was_stopped_names_the_newest_of_all(run: Run, tmp_path: Path) -> None:
    """A stopped run names the newest checkpoint of all hooks."""
    trainer = run({"interval": 2}, {"save_last": True})
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_epoch", start=2)
    trainer.train()

    assert (
        trainer.where_to_resume
        == f"the newest checkpoint to resume from is {tmp_path / 'run' / 'epoch_3'} (iteration 12)"
    )
