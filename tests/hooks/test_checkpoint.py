"""Test when CheckpointHook saves, under which names, and which checkpoints it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import find_checkpoints, load_checkpoint, verify_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.events import CheckpointSaved
from eventloop.hooks import CheckpointHook, Hook
from eventloop.temporary.leftovers import leftovers
from tests.support.saving import Writes

Make = Callable[..., Trainer]
Files = Callable[..., list[str]]


class StopAt(Hook):
    """A hook that requests a stop in one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Request the stop in its iteration."""
        if event.iter == self.iteration:
            trainer.stop("enough")


def epochs(*numbers: int) -> list[str]:
    """Return the names of the checkpoints of epochs."""
    return [f"epoch_{number}" for number in numbers]


def iters(*numbers: int) -> list[str]:
    """Return the names of the checkpoints of iterations."""
    return [f"iter_{number}" for number in numbers]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"interval": 1}, epochs(1, 2, 3, 4, 5, 6, 7)),
        ({"interval": 3}, epochs(3, 6, 7)),
        ({"interval": 3, "save_last": False}, epochs(3, 6)),
        ({"interval": 2, "save_begin": 3}, epochs(3, 5, 7)),
        ({"interval": 2, "save_begin": 4, "save_last": False}, epochs(4, 6)),
        ({"interval": 9}, epochs(7)),
        ({}, epochs(7)),
        ({"save_last": False}, []),
        ({"interval": 5, "by_epoch": False}, iters(5, 10, 14)),
        ({"interval": 7, "by_epoch": False}, iters(7, 14)),
    ],
)
def test_files_of_a_run_of_epochs(
    make_trainer: Make, files: Files, options: dict[str, Any], expected: list[str]
) -> None:
    """In a run of seven epochs of two iterations, the interval, `save_begin` and `save_last` decide what is
    saved."""
    make_trainer(batches=2, max_epochs=7, hooks=[CheckpointHook(**options)]).train()

    assert files() == expected


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"interval": 3}, iters(3, 6, 7)),
        ({"interval": 3, "save_last": False}, iters(3, 6)),
        ({"interval": 2, "save_begin": 3}, iters(3, 5, 7)),
        ({"interval": -1}, iters(7)),
    ],
)
def test_files_of_a_run_of_iterations(
    make_trainer: Make, files: Files, options: dict[str, Any], expected: list[str]
) -> None:
    """In a run measured in iterations the interval counts iterations by default."""
    make_trainer(batches=2, max_iters=7, hooks=[CheckpointHook(**options)]).train()

    assert files() == expected


@pytest.mark.parametrize(
    ("iteration", "save_last", "expected"),
    [(5, True, ["iter_6", *epochs(1)]), (7, True, epochs(1, 2)), (5, False, epochs(1))],
    ids=["mid-epoch", "end", "no last"],
)
def test_stopped_run_saves_where_it_is(
    make_trainer: Make, files: Files, iteration: int, save_last: bool, expected: list[str]
) -> None:
    """A run stopped in mid-epoch saves under its iteration, and one stopped at an epoch's end under the
    epoch."""
    make_trainer(max_epochs=9, hooks=[CheckpointHook(1, save_last=save_last), StopAt(iteration)]).train()

    assert files() == expected


@pytest.mark.parametrize(("event", "start"), [("before_train_iter", 6), ("after_train_epoch", 1)])
def test_nothing_is_saved_after_an_error(make_trainer: Make, files: Files, event: str, start: int) -> None:
    """A run that crashes saves and publishes nothing more, also if the failing handler runs before the hook
    in an event."""
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, published_keys="state_dict")])
    trainer.bus.subscribe(lambda event: 1 / 0, event, start=start, name="fails")

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert files() == epochs(1)


def test_save_under_way_is_finished_after_an_error(
    make_trainer: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is running when the run crashes is finished and reported."""
    crashed = threading.Event()

    def slow(path: Path) -> None:
        assert crashed.wait(20)

    class Crash(Hook):
        priority = "LOWEST"

        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            crashed.set()
            raise ZeroDivisionError("on purpose")

    Writes.of_hooks(monkeypatch, slow)
    trainer = make_trainer(max_iters=9, hooks=[CheckpointHook(interval=1), Crash()])

    with trainer.bus.capture("checkpoint_saved") as saved, pytest.raises(ZeroDivisionError):
        trainer.train()

    assert files() == iters(1)
    assert len(saved) == 1


def test_state_is_that_of_the_moment(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkpoint has the weights of its iteration, although training goes on while it is written."""
    later = threading.Event()
    weights: list[torch.Tensor] = []

    def watch(trainer: Trainer, event: Any) -> None:
        weights.append(trainer.model.state_dict()["weight"].clone())
        if event.iter == 3:
            later.set()

    Writes.of_hooks(monkeypatch, lambda path: later.wait(20))
    trainer = make_trainer(max_iters=5, hooks=[CheckpointHook(interval=9, save_begin=1, save_last=False)])
    trainer.bus.subscribe(watch, "after_train_iter", priority="LOWEST")
    trainer.train()

    saved = load_checkpoint(tmp_path / "run" / "iter_1")["state_dict"]["weight"]
    assert torch.equal(saved, weights[0])
    assert not torch.equal(saved, weights[3])


def test_saved_is_announced_once_the_file_is_there(
    make_trainer: Make, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`checkpoint_saved` has path, bytes and seconds, and comes when the checkpoint is complete."""
    seen: list[tuple[bool, float]] = []

    def check(event: CheckpointSaved) -> None:
        entry = verify_checkpoint(Path(event.path)).files[PAYLOAD]
        seen.append((entry.bytes == event.bytes, event.seconds))

    Writes.of_hooks(monkeypatch, lambda path: clock.advance(2.0))
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=3)])
    trainer.bus.subscribe(check, "checkpoint_saved")
    trainer.train()

    assert seen == [(True, 2.0)]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("interval", "keep", "expected"),
    [(1, 1, epochs(5)), (1, 2, epochs(4, 5)), (1, 9, epochs(1, 2, 3, 4, 5)), (2, 2, epochs(4, 5))],
)
def test_only_the_newest_are_kept(
    make_trainer: Make, files: Files, interval: int, keep: int, expected: list[str]
) -> None:
    """`max_keep_ckpts` keeps the newest checkpoints, including the last one off the interval."""
    make_trainer(max_epochs=5, hooks=[CheckpointHook(interval, max_keep_ckpts=keep)]).train()

    assert files() == expected


def test_older_is_removed_only_after_its_successor_is_durable(
    make_trainer: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced checkpoint exists until its successor is durable."""
    before_write: list[list[str]] = []

    def before(path: Path) -> None:
        before_write.append([name for name in files() if not name.startswith(".")])

    Writes.of_hooks(monkeypatch, before)
    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)]).train()

    assert before_write == [[], epochs(1), epochs(2)]
    assert files() == epochs(3)


def test_another_runs_checkpoints_are_noticed(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """A run that starts from the beginning among another run's checkpoints logs a warning; a resumed one does
    not."""
    make_trainer(max_epochs=1, hooks=[CheckpointHook(interval=1)]).train()
    assert "holds checkpoints of another run" not in caplog.text

    resumed = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)])
    resumed.resume()
    resumed.train()
    assert "holds checkpoints of another run" not in caplog.text

    make_trainer(max_epochs=1, hooks=[CheckpointHook(interval=1)]).train()
    assert "holds checkpoints of another run, the newest is epoch_2" in caplog.text


def test_what_killed_saves_have_left_is_removed(make_trainer: Make, tmp_path: Path) -> None:
    """A run that begins removes temporary files of killed saves, and none of a living process."""
    run = tmp_path / "run"
    run.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living = run / f".epoch_8.{os.getppid()}-1.tmp"
    for path in (run / f".epoch_7.{ended.pid}-1.tmp", run / f".epoch_7.{os.getpid()}-99.old", living):
        path.mkdir()

    make_trainer(max_epochs=1, hooks=[CheckpointHook(interval=1)]).train()

    assert leftovers(run) == [living]


@pytest.mark.parametrize("removed", [False, True])
def test_a_change_of_directory(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """A change of the working directory does not change where a run saves and removes checkpoints."""
    monkeypatch.chdir(tmp_path)
    hooks = [CheckpointHook(interval=1, max_keep_ckpts=1, out_dir=out_dir) for out_dir in (None, "out")]
    options: dict[str, Any] = {"costs": None, "trace": None}
    trainer = make_trainer(max_epochs=3, work_dir="run", hooks=hooks, default_hooks=options)
    saved: list[str] = []

    @trainer.bus.on("checkpoint_saved")
    def record(event: CheckpointSaved) -> None:
        saved.append(event.path)

    @trainer.bus.on("after_train_epoch", priority=95)
    def change_directory(event: Any) -> None:
        if event.epoch == 1:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            if removed:
                (tmp_path / "elsewhere").rmdir()

    trainer.train()
    monkeypatch.chdir(tmp_path)

    for place in ("run", "out/run"):
        assert [path.name for path in find_checkpoints(tmp_path / place)] == ["epoch_3"]
    assert {*saved} == {
        path
        for place in ("run", "out/run")
        for path in (f"{place}/epoch_1", f"{place}/epoch_2", f"{tmp_path}/{place}/epoch_3")
    }


@pytest.mark.parametrize("loads", [False, True])
def test_a_run_that_is_done_is_not_saved_again(make_trainer: Make, tmp_path: Path, loads: bool) -> None:
    """A complete run that is resumed saves nothing, unless other weights were loaded."""
    first = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)], work_dir=tmp_path / "run")
    first.train()
    again = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)], work_dir=tmp_path / "run")
    again.resume()
    if loads:
        again.load_checkpoint(tmp_path / "run" / "epoch_1")
    with again.bus.capture(CheckpointSaved) as saved:
        again.train()

    assert [Path(event.path).name for event in saved if isinstance(event, CheckpointSaved)] == (
        epochs(2) if loads else []
    )


def test_a_training_without_an_optimizer_is_told_of(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged if the trainer has no optimizer whose state it could save."""
    trainer = make_trainer(
        optimizer=None, hooks=[CheckpointHook(interval=1)], default_hooks={"optimizer": None}
    )

    trainer.train()

    assert "no optimizer, so checkpoints hold no optimizer's state" in caplog.text
