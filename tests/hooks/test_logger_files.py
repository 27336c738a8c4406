"""LoggerHook and the files of a run: the metrics of tests in the log, and which files are copied at the end."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.hooks import LoggerHook
from eventloop.training.trainer import Trainer
from eventloop.writers import JSONLWriter, read_jsonl

Make = Callable[..., Trainer]


def test_each_test_is_a_line_of_the_log(make_trainer: Make, scripted: Callable[..., dict[str, Any]]) -> None:
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


def test_default_suffixes(make_trainer: Make, tmp_path: Path) -> None:
    """Without `out_suffix` the files that end in .json, .jsonl, .log, .csv, .yaml and .py are copied, and nothing else."""
    copied = {"a.json", "a.jsonl", "a.log", "a.csv", "a.yaml", "a.py"}
    (tmp_path / "run" / "folder.json").mkdir(parents=True)
    for name in [*copied, "a.yml", "a.txt", "a.json.gz", "a.evl", "json", "ayaml"]:
        (tmp_path / "run" / name).write_text(name)
    trainer = make_trainer(
        hooks=[LoggerHook(out_dir=tmp_path / "out")], default_hooks={"costs": None, "trace": None}
    )

    trainer.train()

    assert files(tmp_path / "out" / "run") == {name: name for name in copied}


def files(folder: Path) -> dict[str, str]:
    """The files in a folder and its folders, and what they say."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_hooks_write_at_the_very_end_is_copied_whole(
    make_trainer: Make, scripted: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The record of costs and the trace, which are complete only when everything was delivered, are in the copy as
    they are in the original; so it is after a second run."""
    options = scripted(0.5)
    testing = {"val_step": options["val_step"], "test_loader": options["val_loader"]}
    trainer = make_trainer(
        hooks=[LoggerHook(1, out_dir=tmp_path / "out")], writers=[JSONLWriter()],
        default_hooks={"trace": {"windows": [(1, 3)]}}, **testing,
    )  # fmt: skip

    for run in (trainer.train, trainer.test):
        run()

        own = {
            name: text for name, text in files(trainer.work_dir).items() if name.endswith((".json", ".jsonl"))
        }
        assert files(tmp_path / "out" / "run") == own
        assert own.keys() == {"costs.json", "traces/iterations_1-2.json", "metrics.jsonl"}


def test_logs_in_folders_are_copied(make_trainer: Make, tmp_path: Path) -> None:
    """To the same places; what belongs to checkpoints, to hidden folders and to the copies themselves is not."""
    trainer = make_trainer(
        hooks=[LoggerHook(1, out_dir=tmp_path / "run" / "out", out_suffix=(".jsonl", ".json"))],
        writers=[JSONLWriter("logs/deep/metrics.jsonl")],
        default_hooks={"checkpoint": {"interval": 1}, "costs": None, "trace": None},
    )  # fmt: skip
    (trainer.work_dir / ".hidden").mkdir(parents=True)
    (trainer.work_dir / ".hidden" / "a.json").touch()

    trainer.train()
    trainer.train()

    assert files(tmp_path / "run" / "out").keys() == {"run/logs/deep/metrics.jsonl"}


def test_a_run_that_fails_leaves_the_copy_alone(make_trainer: Make, tmp_path: Path) -> None:
    """After an error nothing is copied."""

    def fail(trainer: Trainer, batch: Any) -> Any:
        raise ZeroDivisionError

    trainer = make_trainer(hooks=[LoggerHook(1, out_dir=tmp_path / "out")], train_step=fail)

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert not (tmp_path / "out").exists()


def test_logs_are_copied_while_signals_are_still_taken(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes meanwhile, such as a scheduler's second one, does not end the program in the middle."""
    handlers: list[object] = []
    monkeypatch.setattr(
        shutil, "copy2", lambda path, place: handlers.append(signal.getsignal(signal.SIGTERM))
    )
    trainer = make_trainer(default_hooks={"logger": {"out_dir": tmp_path / "out"}}, writers=[JSONLWriter()])
    before = signal.getsignal(signal.SIGTERM)

    trainer.train()

    assert handlers
    assert before not in handlers
    assert signal.getsignal(signal.SIGTERM) == before


def test_logs_of_a_loop_that_is_left_are_copied(make_trainer: Make, tmp_path: Path) -> None:
    """A hand-written loop that ends by `break` has delivered everything too."""
    trainer = make_trainer(
        hooks=[LoggerHook(1, out_dir=tmp_path / "out")], writers=[JSONLWriter()], max_epochs=3,
        default_hooks={"costs": None, "trace": None},
    )  # fmt: skip

    for _ in trainer.epochs():
        break

    assert files(tmp_path / "out" / "run").keys() == {"metrics.jsonl"}


def test_logs_are_not_copied_when_the_end_is_interrupted(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while everything is being delivered: nobody is waited for any more."""
    trainer = make_trainer(hooks=[LoggerHook(1, out_dir=tmp_path / "out")], writers=[JSONLWriter()])

    def interrupt() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.bus, "flush", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert not (tmp_path / "out").exists()


def test_logs_that_cannot_be_copied_are_named(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has ended well all the same, and the originals are where they were."""
    (tmp_path / "out").write_text("a file, where the folder should be")
    trainer = make_trainer(
        hooks=[LoggerHook(1, out_dir=tmp_path / "out")], writers=[JSONLWriter()],
        default_hooks={"costs": None, "trace": None},
    )  # fmt: skip

    trainer.train()

    (record,) = [record for record in caplog.records if "could not be copied" in record.message]
    assert re.search(r"could not be copied to .*out/run: .*metrics\.jsonl \(.*\)", record.message)
