"""`Trainer(fast_dev_run=True)`: a short run that proves a script, and leaves nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.events import Event
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, Hook
from eventloop.writers import ConsoleWriter, CSVWriter, JSONLWriter, TensorBoardWriter, Writer
from tests.support.trainers import MakeTrainer, batches, build_trainer, names, record


def counts(trainer: Trainer) -> dict[str, int]:
    """Train and test, and count the iterations of each mode and the epochs."""
    rows = record(trainer)
    trainer.train()
    trainer.test()
    found = names(rows)
    return {
        event: found.count(f"after_{event}")
        for event in ("train_iter", "val_iter", "test_iter", "val", "train")
    }


@pytest.mark.representative(2)
@pytest.mark.parametrize("unit", ["max_epochs", "max_iters"])
@pytest.mark.parametrize(("fast_dev_run", "expected"), [(True, 1), (1, 1), (3, 3), (50, 5)])
def test_a_short_run(make_trainer: MakeTrainer, unit: str, fast_dev_run: Any, expected: int) -> None:
    """It trains, validates once and tests on so many batches, whatever lengths, limits and intervals are given."""
    trainer = make_trainer(
        train_loader=batches(5),
        val_loader=batches(5),
        test_loader=batches(5),
        limit_batches=2,
        val_begin=3,
        val_interval=2,
        fast_dev_run=fast_dev_run,
        **{unit: 8},
    )

    found = counts(trainer)

    iterations = 50 if fast_dev_run == 50 and unit == "max_iters" else expected
    assert found == {
        "train_iter": iterations,
        "val_iter": expected,
        "test_iter": expected,
        "val": 1,
        "train": 1,
    }


@pytest.mark.parametrize("fast_dev_run", [False, 0])
def test_a_normal_run(make_trainer: MakeTrainer, tmp_path: Path, fast_dev_run: Any) -> None:
    """False and 0 are a normal run."""
    trainer = make_trainer(fast_dev_run=fast_dev_run)

    assert (trainer.fast_dev_run, trainer.max_epochs) == (0, 2)
    assert trainer.work_dir == tmp_path / "run"


@pytest.mark.parametrize(
    ("fast_dev_run", "error", "message"),
    [
        ("yes", TypeError, r"fast_dev_run must be True, False or a number of batches \(an int\), got 'yes'"),
        (1.5, TypeError, r"fast_dev_run must be True, False or a number of batches \(an int\), got 1.5"),
        (-1, ValueError, "fast_dev_run must be at least 0, got -1"),
    ],
)
def test_bad_numbers(
    make_trainer: MakeTrainer, fast_dev_run: Any, error: type[Exception], message: str
) -> None:
    """Anything but a bool and a number of batches is refused."""
    with pytest.raises(error, match=message):
        make_trainer(fast_dev_run=fast_dev_run)


class Shouting(Writer):
    """A writer of the user's, such as for a service."""

    def __init__(self) -> None:
        self.received: list[Event] = []

    def write(self, event: Event) -> None:
        self.received.append(event)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint, no writer's file and no directory remain, neither in the work dir nor anywhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    mine = Shouting()
    trainer = build_trainer(
        tmp_path / "run",
        val_loader=batches(2),
        fast_dev_run=True,
        hooks=[CheckpointHook(interval=1, save_best="loss", out_dir=tmp_path / "elsewhere")],
        writers=[JSONLWriter(), CSVWriter(), TensorBoardWriter(log_dir=tmp_path / "tb"), mine],
    )

    trainer.train()
    assert trainer.work_dir.parent == tmp_path / "temporary"
    trainer.close()
    del trainer
    gc.collect()

    assert [path for path in tmp_path.rglob("*") if path.name != "temporary"] == []
    assert mine.received == []


def test_the_console_stays(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    """A console writer shows the run, which is what a person looks at."""
    trainer = make_trainer(val_loader=batches(2), fast_dev_run=True, writers=[ConsoleWriter(progress=False)])

    trainer.train()

    assert "Epoch(val)" in capsys.readouterr().out


def test_early_stopping_stays_out(make_trainer: MakeTrainer) -> None:
    """A threshold that the first score beats does not end the run; the hook is still checked and found."""
    hook = EarlyStoppingHook("loss", stopping_threshold=1e9)
    trainer = make_trainer(val_loader=batches(2), fast_dev_run=True, hooks=[hook])

    trainer.train()

    assert trainer.stop_reason is None
    assert hook in trainer.hooks
    with pytest.raises(ValueError, match="needs the metric 'los', which the validation does not report"):
        make_trainer(val_loader=batches(2), fast_dev_run=True, hooks=[EarlyStoppingHook("los", rule="less")])


def test_hooks_and_schedules_are_built_for_the_whole_run(make_trainer: MakeTrainer) -> None:
    """A window that begins in a later epoch, and the end that it takes from the run, are those of the whole run."""
    seen: list[tuple[int | None, int | None]] = []

    class Looks(Hook):
        def check(self, trainer: Trainer) -> None:
            seen.append((trainer.max_epochs, trainer.max_iters))

    trainer = make_trainer(
        train_loader=batches(5),
        max_epochs=8,
        fast_dev_run=True,
        hooks=[Looks()],
        schedulers=[{"type": "CosineAnnealingLR", "begin": 5}, {"type": "LinearLR", "end": 5}],
    )

    trainer.train()

    assert seen == [(8, 40)]
    assert (trainer.max_epochs, trainer.max_iters, trainer.schedulers[0].end) == (1, 1, 8)


def test_a_script_that_loads_its_best_checkpoint(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """`load_checkpoint("best")` after the training finds none, says so, and the script goes on."""
    trainer = make_trainer(val_loader=batches(2), test_loader=batches(2), fast_dev_run=True)
    trainer.train()

    trainer.load_checkpoint("best")

    assert "fast_dev_run saves no checkpoint: load_checkpoint('best') loads nothing" in caplog.text
    assert set(trainer.test()) == {"loss", "accuracy"}


def test_a_sanity_validation_is_short(make_trainer: MakeTrainer) -> None:
    """`sanity_val` runs at most as many batches as the dev run."""
    steps: list[Any] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        steps.append(batch)
        return {"score": 1.0}

    trainer = make_trainer(val_loader=batches(5), sanity_val=4, fast_dev_run=2, val_step=val_step)
    trainer.train()

    assert len(steps) == 2 + 2
