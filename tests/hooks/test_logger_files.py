"""LoggerHook and the files of a run: the metrics of tests in the log, and which files are copied at the end."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import LoggerHook
from eventloop.writers import JSONLWriter, read_jsonl
from tests.hooks.conftest import Make, Scripted

NO_OTHER_FILES = {"costs": None, "trace": None}


def files(folder: Path) -> dict[str, str]:
    """The files in a folder and its folders, and what they say; a thread writes `run.json`, perhaps after a copy."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture
def copying(make_trainer: Make, tmp_path: Path) -> Callable[..., Trainer]:
    """Build trainers whose logs are copied to the folder `out`."""

    def make(**options: Any) -> Trainer:
        hook = LoggerHook(1, out_dir=tmp_path / "out")
        return make_trainer(
            **{"hooks": [hook], "writers": [JSONLWriter()], "default_hooks": NO_OTHER_FILES, **options}
        )

    return make


def test_each_test_is_a_line_of_the_log(make_trainer: Make, scripted: Scripted) -> None:
    """The metrics of every `test()` are in the log, at the iteration they were made at; a later one replaces none."""
    options = scripted({"acc": 0.25, "box/AP": 0.5}, {"acc": 0.75, "box/AP": 1.0})
    trainer = make_trainer(
        val_step=options["val_step"], test_loader=options["val_loader"], writers=[JSONLWriter()]
    )

    trainer.test()
    trainer.train()
    trainer.test()
    trainer.close()

    rows = [row for row in read_jsonl(trainer.work_dir / "metrics.jsonl") if row.get("mode") == "test"]
    tests = [row for row in rows if "event" not in row]
    assert tests == [
        {"mode": "test", "step": 0, "iter": 0, "epoch": 0, "acc": 0.25, "box/AP": 0.5},
        {"mode": "test", "step": 4, "iter": 4, "epoch": 1, "acc": 0.75, "box/AP": 1.0},
    ]


def test_default_suffixes(copying: Make, tmp_path: Path) -> None:
    """Without `out_suffix` the files that end in .json, .jsonl, .log, .csv, .yaml and .py are copied, and nothing else."""
    copied = {"a.json", "a.jsonl", "a.log", "a.csv", "a.yaml", "a.py"}
    (tmp_path / "run" / "folder.json").mkdir(parents=True)
    for name in [*copied, "a.yml", "a.txt", "a.json.gz", "a.evl", "json", "ayaml"]:
        (tmp_path / "run" / name).write_text(name)

    copying(writers=[]).train()

    assert files(tmp_path / "out" / "run") == {name: name for name in copied}


def test_what_hooks_write_at_the_very_end_is_copied_whole(
    copying: Make, scripted: Scripted, tmp_path: Path
) -> None:
    """The record of costs and the trace, which are complete only when everything was delivered, are copied as they are;
    so it is after a second run."""
    options = scripted(0.5)
    trainer = copying(
        default_hooks={"trace": {"windows": [(1, 3)]}},
        val_step=options["val_step"],
        test_loader=options["val_loader"],
    )

    for run in (trainer.train, trainer.test):
        run()

        own = {
            name: text
            for name, text in files(trainer.work_dir).items()
            if name.endswith((".json", ".jsonl")) and name != "heartbeat.json"
        }
        assert files(tmp_path / "out" / "run") == own
        assert own.keys() == {"costs.json", "traces/iterations_1-2.json", "metrics.jsonl"}


def test_logs_in_folders_are_copied(make_trainer: Make, tmp_path: Path) -> None:
    """To the same places; what belongs to checkpoints, to hidden folders and to the copies themselves is not."""
    trainer = make_trainer(
        hooks=[LoggerHook(1, out_dir=tmp_path / "run" / "out", out_suffix=(".jsonl", ".json"))],
        writers=[JSONLWriter("logs/deep/metrics.jsonl")],
        default_hooks={"checkpoint": {"interval": 1}, "costs": None, "trace": None},
    )
    (trainer.work_dir / ".hidden").mkdir(parents=True)
    (trainer.work_dir / ".hidden" / "a.json").touch()

    trainer.train()
    trainer.train()

    assert files(tmp_path / "run" / "out").keys() == {"run/logs/deep/metrics.jsonl"}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_the_copy_alone(
    copying: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """After an error of a step, and after a Ctrl-C while events are delivered at the end, nothing is copied."""

    def fail(*arguments: Any) -> Any:
        raise error

    trainer = copying(train_step=fail) if error is ZeroDivisionError else copying()
    if error is KeyboardInterrupt:
        monkeypatch.setattr(trainer.bus, "flush", fail)

    with pytest.raises(error):
        trainer.train()

    assert not (tmp_path / "out").exists()


def test_logs_are_copied_while_signals_are_still_taken(
    copying: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes meanwhile, such as a scheduler's second one, does not end the program in the middle."""
    handlers: list[object] = []
    monkeypatch.setattr(
        shutil, "copy2", lambda path, place: handlers.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.getsignal(signal.SIGTERM)

    copying().train()

    assert handlers
    assert before not in handlers
    assert signal.getsignal(signal.SIGTERM) == before


def test_logs_of_a_loop_that_is_left_are_copied(copying: Make, tmp_path: Path) -> None:
    """A hand-written loop that ends by `break` has delivered everything too."""
    for _ in copying(max_epochs=3).epochs():
        break

    assert files(tmp_path / "out" / "run").keys() == {"metrics.jsonl"}


def test_logs_that_cannot_be_copied_are_named(
    copying: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has ended well all the same."""
    (tmp_path / "out").write_text("a file, where the folder should be")

    copying().train()

    (record,) = [record for record in caplog.records if "could not be copied" in record.message]
    assert re.search(r"could not be copied to .*out/run: .*metrics\.jsonl \(.*\)", record.message)
