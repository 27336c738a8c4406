"""Test the evaluator on runs that have ended: its oracle is the validation within the training."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eventloop.checkpoint import CheckpointError
from eventloop.commands.messages import Applied, Command
from eventloop.commands.record import write_record
from eventloop.sidecar.building import build_trainer
from eventloop.sidecar.evaluator import Evaluator, owning_evaluations
from eventloop.util.errors import WorkDirInUseError
from eventloop.writers.jsonl import read_jsonl
from tests.sidecar.jobs import BUILD, EPOCHS, build, build_both
from tests.support.trainers import collect

torch.set_num_threads(1)
Metrics = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has validated within; each test has a copy."""
    trainer = build(tmp_path_factory.mktemp("finished") / "run")
    trainer.train()
    trainer.close()
    return trainer.work_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def validate(run: Path, **options: Any) -> tuple[Evaluator, list[str]]:
    """Evaluate a run that has ended; return the lines that the evaluator shows."""
    shown: list[str] = []
    evaluator = Evaluator(run, BUILD, show=shown.append, **options)
    evaluator.run()
    return evaluator, shown


def sent(run: Path) -> list[Command]:
    """The reports in the inbox, in the order in which a run receives them."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Command)
        for path in sorted((run / "inbox").glob("*.json"))
    ]


def within(run: Path) -> dict[int, Metrics]:
    """The metrics of the validations within the training, by iteration."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row.get("mode") == "val"]
    return {row["step"]: {key: row[key] for key in ("accuracy", "loss")} for row in rows}


def contents(run: Path) -> dict[str, str]:
    """The hash of each file of a run, except what the evaluator may write."""
    files = [
        path
        for path in run.rglob("*")
        if path.is_file() and path.relative_to(run).parts[0] not in ("inbox", "evaluator")
    ]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_metrics_are_those_of_a_validation_within(run: Path) -> None:
    """The metrics of each checkpoint, with an average and buffers, are to the bit those of the training's own."""
    validate(run)

    assert len(within(run)) == EPOCHS
    reported = {command.arguments["iter"]: command.arguments["metrics"] for command in sent(run)}
    assert reported == within(run)


def test_both_weights_are_validated(tmp_path: Path) -> None:
    """Of a run that validates an average beside the weights, the metrics of both are to the bit the training's own."""
    trainer = build_both(tmp_path / "run")
    seen = collect(trainer, "after_val_epoch")
    trainer.train()
    trainer.close()

    Evaluator(trainer.work_dir, "tests.sidecar.jobs:build_both", show=lambda line: None).run()

    assert [command.arguments["metrics"] for command in sent(trainer.work_dir)] == [e.metrics for e in seen]
    assert {*seen[-1].metrics} == {"accuracy", "loss", "ema/accuracy", "ema/loss"}
    assert seen[-1].metrics["loss"] != seen[-1].metrics["ema/loss"]


def test_each_checkpoint_is_validated_once_oldest_first(run: Path) -> None:
    """Each iteration is validated once, in order; another evaluator finds in the run's files what was done."""
    _, shown = validate(run)
    assert [line.partition(" ")[0] for line in shown] == [f"epoch_{n}" for n in range(1, EPOCHS + 1)]
    assert [command.arguments["epoch"] for command in sent(run)] == [*range(1, EPOCHS + 1)]

    again, shown = validate(run)
    assert (shown, len(again.known)) == ([], EPOCHS)
    assert len(sent(run)) == EPOCHS


def test_known_metrics_of_the_newest_one_are_those_of_the_record(run: Path) -> None:
    """The metrics of a checkpoint whose report a run has applied are shown from the run's record."""
    _, (shown,) = validate(run, choice=["newest"])
    (command,) = sent(run)
    shutil.rmtree(run / "inbox")
    applied = Applied(
        iter=20,
        epoch=5,
        id=command.id,
        command=command.command,
        words=[],
        arguments=command.arguments,
        source=command.source,
        time="2026-01-01T00:00:00+0000",
    )
    write_record(run / "commands.jsonl", [applied])

    again, known = validate(run, choice=["newest"])

    assert known == [shown.replace(":", ", validated before:", 1)]
    assert again.known == [command.arguments["name"]]


def test_the_run_is_left_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer that the function builds writes and removes nothing in the run's directory, nor in another."""
    monkeypatch.chdir(tmp_path)
    before = contents(run)
    validate(run)

    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("choice", "names"), [(["newest"], ["epoch_4"]), (["epoch_3", "epoch_1"], ["epoch_1", "epoch_3"])]
)
def test_chosen_checkpoints(run: Path, choice: list[str], names: list[str]) -> None:
    """The newest checkpoint, or those that are named, are validated."""
    _, shown = validate(run, choice=choice)

    assert [line.partition(" ")[0] for line in shown] == names


def test_the_best_checkpoint(run: Path) -> None:
    """The best one is that of the best score of the training."""
    _, shown = validate(run, choice=["best"])

    scores = within(run)
    best = max(scores, key=lambda step: scores[step]["accuracy"])
    assert [command.arguments["iter"] for command in sent(run)] == [best]
    assert shown[0].startswith("best_accuracy_epoch_")


def test_a_named_checkpoint_is_validated_again_and_reported_once(run: Path) -> None:
    """A checkpoint that is named is validated whenever it is named; its report is sent once."""
    for _ in range(2):
        _, shown = validate(run, choice=["epoch_2"])
        assert len(shown) == 1
    assert len(sent(run)) == 1


def test_an_unknown_name_is_refused(run: Path) -> None:
    """A name without a checkpoint is an error that lists those that exist."""
    with pytest.raises(
        CheckpointError, match=r"expected a checkpoint 'epoch_9' in .*, got .*epoch_1, .*epoch_4"
    ):
        validate(run, choice=["epoch_9"])


def test_a_damaged_checkpoint_is_left_out(run: Path) -> None:
    """A damaged checkpoint is shown as not validated, and the others are."""
    state = run / "epoch_2" / "state.pth"
    state.write_bytes(state.read_bytes()[:-1])
    evaluator, shown = validate(run)

    assert evaluator.failed == 1
    assert "epoch_2 (iteration 8) was not validated" in shown[1]
    assert "is damaged: it has" in shown[1]
    assert [command.arguments["epoch"] for command in sent(run)] == [1, 3, 4]


def test_checkpoints_that_a_run_left_behind_are_left_out(run: Path) -> None:
    """What an earlier run of the directory saved is not validated."""
    trainer = build(run, max_epochs=1)
    trainer.train()  # a new run, which leaves the checkpoints of the former behind
    trainer.close()
    _, shown = validate(run)

    assert [line.partition(" ")[0] for line in shown] == ["epoch_1"]


def test_one_evaluator_at_a_time(run: Path) -> None:
    """A second evaluator of a run is refused while one lives."""
    with (
        owning_evaluations(run),
        pytest.raises(WorkDirInUseError, match="one evaluator at a time validates the checkpoints of a run"),
        owning_evaluations(run),
    ):
        pass


def test_numbers_that_are_not_finite_arrive(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, which JSON cannot hold, is sent as a text, and the resumed run gets it as a number."""
    monkeypatch.setattr("tests.sidecar.jobs.fail", lambda trainer, batch: {"accuracy": math.nan})
    shown: list[str] = []
    Evaluator(
        run, "tests.sidecar.jobs:build_with_faulty_validation", show=shown.append, choice=["newest"]
    ).run()
    assert [command.arguments["metrics"] for command in sent(run)] == [{"accuracy": "nan"}]

    trainer = build(run, max_epochs=EPOCHS + 1)
    trainer.resume()
    seen: list[Any] = []
    trainer.bus.subscribe(seen.append, "checkpoint_evaluated")
    trainer.train()
    trainer.close()
    assert [math.isnan(event.metrics["accuracy"]) for event in seen] == [True]


# --- the function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("train", ValueError, "expected 'module:function' or 'path/to/file.py:function', got 'train'"),
        (
            "__main__:build",
            ValueError,
            "expected a module that another process can import, got '__main__:build'",
        ),
        (3, TypeError, "expected 'module:function', got 3"),
        (
            "no_such_module_here:build",
            ModuleNotFoundError,
            "expected a module 'no_such_module_here' in .*, got none",
        ),
        ("no/such.py:build", FileNotFoundError, r"expected a Python file at no/such\.py, got none"),
        (
            "tests.sidecar.jobs:missing",
            ValueError,
            "expected a function 'missing' in tests.sidecar.jobs, which has",
        ),
        ("tests.sidecar.jobs:build_nothing", TypeError, "to return a Trainer, got NoneType"),
        (
            "tests.sidecar.jobs:build_without_validation",
            ValueError,
            "a Trainer with a val_loader, got one without",
        ),
        (
            "tests.sidecar.jobs:build_and_train",
            RuntimeError,
            "builds the trainer and returns it, and got a training",
        ),
        ("tests.sidecar.jobs:build_wrongly", RuntimeError, "the data set is not there"),
    ],
)
def test_a_function_that_does_not_serve(text: Any, error: type[Exception], match: str) -> None:
    """A function that is not found, or builds no trainer that validates, is an error that says so."""
    with pytest.raises(error, match=match):
        build_trainer(text)


def test_a_function_in_a_file(tmp_path: Path) -> None:
    """A function may be given by the path of its file, beside which the file's own modules are found."""
    (tmp_path / "own_settings_of_the_job.py").write_text("EPOCHS = 7\n")
    (tmp_path / "job_in_a_file.py").write_text(
        "from own_settings_of_the_job import EPOCHS\n"
        "from tests.sidecar.jobs import build as other\n"
        "def build():\n    return other(max_epochs=EPOCHS)\n"
    )
    assert build_trainer(f"{tmp_path}/job_in_a_file.py:build").max_epochs == 7


def test_the_device_replaces_that_of_the_function() -> None:
    """The device that is given takes the place of the one that the function gives."""
    assert build_trainer(BUILD).device is None
    assert build_trainer(BUILD, "cpu").device == torch.device("cpu")
