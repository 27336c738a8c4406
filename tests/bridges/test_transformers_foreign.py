"""Callbacks of Transformers in this engine's trainer: each has the effect that it has in its own."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

import transformers
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
)

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.transformers import EventLoopCallback
from eventloop.hooks import CheckpointHook, GradientCumulativeOptimizerHook
from tests.support.class_tables import classes_named
from tests.support.trainers import MakeTrainer, batches
from tests.support.transformers_host import host, rows

Seen = list[tuple[Any, ...]]


class Notes(TrainerCallback):
    """A callback that notes each call with the counters."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def _record(self, name: str, state: Any) -> None:
        self.seen.append((name, state.global_step, round(state.epoch or 0, 3), state.max_steps))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("train_begin", state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("epoch_begin", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("step_begin", state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it, without the epoch, which Transformers moves only at an update."""
        self.seen.append(("substep_end", state.global_step))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it, without the epoch."""
        self.seen.append(("pre_optimizer_step", state.global_step))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it, without the epoch."""
        self.seen.append(("optimizer_step", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("step_end", state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("prediction_step", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Note it, with the metric."""
        self.seen.append(("evaluate", state.global_step, "eval_loss" in metrics))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("epoch_end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self._record("train_end", state)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_calls_are_those_of_the_host(make_trainer: MakeTrainer, tmp_path: Path, accumulation: int) -> None:
    """A callback gets the calls of Transformers' own trainer, in their order, with their counters."""
    theirs: Seen = []
    ours: Seen = []
    host(
        tmp_path,
        Notes(theirs),
        eval_strategy="epoch",
        eval_dataset=rows(4),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
    ).train()

    make_trainer(
        train_loader=batches(4),
        val_loader=batches(1),
        max_epochs=2,
        hooks=[Foreign(Notes(ours)), GradientCumulativeOptimizerHook(cumulative_iters=accumulation)],
    ).train()

    assert ours == theirs


def test_iterations_of_several_batches_are_refused(make_trainer: MakeTrainer) -> None:
    """A callback of another engine is called for each batch, and such an iteration has several."""
    hooks = [Foreign(Notes([])), GradientCumulativeOptimizerHook(cumulative_iters=2)]
    with pytest.raises(
        ValueError, match=r'receives each batch, and unit="update" makes an .* of 2 batches: leave'
    ):
        make_trainer(unit="update", hooks=hooks)


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_stops(make_trainer: MakeTrainer, patience: int) -> None:
    """EarlyStoppingCallback ends the run when the metric of `save_best` did not get better `patience` times."""
    scores = iter([0.5, 0.7, 0.6, 0.6, 0.9, 1.0])
    trainer = make_trainer(
        train_loader=batches(2),
        val_loader=batches(1),
        max_epochs=6,
        evaluator={"score": lambda preds, target: next(scores)},
        sanity_val=0,
        hooks=[
            Foreign(EarlyStoppingCallback(patience)),
            CheckpointHook(interval=9, save_best="score", rule="greater"),
        ],
    )

    trainer.train()

    assert trainer.epoch == 2 + patience
    assert trainer.stop_reason == "EarlyStoppingCallback of Transformers set control.should_training_stop"


def test_the_loss_is_watched_by_default(make_trainer: MakeTrainer) -> None:
    """Without `save_best`, EarlyStoppingCallback watches the loss of the validation."""
    losses = iter([0.5, 0.4, 0.6, 0.3])
    trainer = make_trainer(
        train_loader=batches(2),
        val_loader=batches(1),
        max_epochs=4,
        sanity_val=0,
        val_step=lambda trainer, batch: {"loss": torch.tensor(next(losses))},
        hooks=[Foreign(EarlyStoppingCallback())],
    )

    trainer.train()

    assert trainer.epoch == 3


def test_early_stopping_does_not_warn(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no warning about load_best_model_at_end, and other callbacks get the arguments as they are."""
    seen = []

    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.load_best_model_at_end)

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = make_trainer(
        train_loader=batches(2),
        val_loader=batches(1),
        max_epochs=1,
        hooks=[Foreign(EarlyStoppingCallback()), Foreign(Looks())],
    )

    trainer.train()

    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []
    assert seen == [False]


def test_a_resumed_run_has_the_callbacks_state(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The count of bad evaluations and the best metric are in our checkpoints."""
    options: dict[str, Any] = {"train_loader": batches(2), "val_loader": batches(1), "sanity_val": 0}

    def build(losses: list[float], epochs: int) -> tuple[Trainer, EarlyStoppingCallback]:
        values = iter(losses)
        callback = EarlyStoppingCallback(3)
        trainer = make_trainer(
            **options,
            max_epochs=epochs,
            work_dir=tmp_path,
            val_step=lambda trainer, batch: {"loss": torch.tensor(next(values))},
            hooks=[Foreign(callback), CheckpointHook(interval=1)],
        )
        return trainer, callback

    first, _ = build([0.5, 0.6, 0.7, 0.8], 3)
    first.train()
    second, callback = build([0.9, 0.9, 0.9], 6)
    second.resume("auto")
    second.train()

    assert second.epoch == 4
    assert callback.early_stopping_patience_counter == 3


class Logs(TrainerCallback):
    """A callback that notes what is logged."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note it."""
        self.seen.append((state.global_step, logs))


def test_what_is_logged_comes_with_its_step(make_trainer: MakeTrainer) -> None:
    """`on_log` gets losses, learning rates and metrics as floats, with the step at which they were logged."""
    logs = Logs()
    make_trainer(
        train_loader=batches(4),
        val_loader=batches(1),
        max_epochs=2,
        hooks=[Foreign(logs)],
        default_hooks={"logger": {"interval": 2}},
    ).train()

    assert [step for step, numbers in logs.seen if "loss" in numbers] == [2, 4, 6, 8]
    assert [step for step, numbers in logs.seen if "eval_loss" in numbers] == [4, 8]
    assert all(type(value) is float for _, numbers in logs.seen for value in numbers.values())
    assert all("learning_rate" in numbers for _, numbers in logs.seen if "loss" in numbers)


def test_progress_and_printer(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    """ProgressCallback counts to the last iteration, and PrinterCallback prints the losses."""
    make_trainer(
        train_loader=batches(4),
        max_epochs=2,
        hooks=[Foreign(ProgressCallback()), Foreign(PrinterCallback())],
        default_hooks={"logger": {"interval": 2}},
    ).train()

    out, err = capsys.readouterr()
    assert "8/8" in err
    assert out.count("'loss'") == 8  # of both


def test_progress_counts_updates(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    """Where gradients accumulate, ProgressCallback counts to the last update, as in Transformers."""
    make_trainer(
        train_loader=batches(4),
        max_epochs=2,
        hooks=[Foreign(ProgressCallback()), GradientCumulativeOptimizerHook(cumulative_iters=2)],
    ).train()

    assert "4/4" in capsys.readouterr().err


@pytest.mark.parametrize("validates", [True, False])
def test_notebook_table(make_trainer: MakeTrainer, tmp_path: Path, validates: bool) -> None:
    """NotebookProgressCallback has the rows and the bar that it has in Transformers."""
    pytest.importorskip("IPython", reason="NotebookProgressCallback needs IPython, which is not installed")
    from transformers.utils.notebook import NotebookProgressCallback

    class Noted(NotebookProgressCallback):
        def on_train_end(self, *arguments: Any, **others: Any) -> None:
            tracker = self.training_tracker
            self.seen = (
                [row[0] for row in tracker.inner_table],
                tracker.inner_table[0][:2],
                tracker.value,
                tracker.total,
            )
            super().on_train_end(*arguments, **others)

    theirs, ours = Noted(), Noted()
    given: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": rows(4)} if validates else {}
    host(tmp_path, theirs, per_device_train_batch_size=4, **given).train()

    make_trainer(
        train_loader=batches(4),
        val_loader=batches(1) if validates else None,
        max_epochs=2,
        hooks=[Foreign(ours)],
        default_hooks={"logger": {"interval": 2}},
    ).train()

    assert ours.seen == theirs.seen
    assert len(ours.seen[0]) == (3 if validates else 5)


def test_dvclive(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVCLiveCallback writes losses and metrics with the steps that they have in Transformers."""
    dvclive = pytest.importorskip("dvclive", reason="DVCLiveCallback needs dvclive, which is not installed")
    from transformers.integrations import DVCLiveCallback

    monkeypatch.chdir(tmp_path)  # dvclive writes settings into the repository of the current directory

    def callback(name: str) -> Any:
        return DVCLiveCallback(dvclive.Live(str(tmp_path / name), save_dvc_exp=False, dvcyaml=None))

    host(
        tmp_path,
        callback("theirs"),
        eval_strategy="epoch",
        eval_dataset=rows(4),
        per_device_train_batch_size=4,
    ).train()
    make_trainer(
        train_loader=batches(4),
        val_loader=batches(1),
        max_epochs=2,
        hooks=[Foreign(callback("ours"))],
        default_hooks={"logger": {"interval": 2}},
    ).train()

    for file in ("loss.tsv", "eval/loss.tsv"):
        theirs, ours = (
            [line.split()[0] for line in (tmp_path / name / "plots/metrics" / file).read_text().splitlines()]
            for name in ("theirs", "ours")
        )
        assert ours == theirs
        assert len(ours) > 2


def test_codecarbon(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CodeCarbonCallback makes, starts and stops its tracker, which asks the network where it is, once each."""
    utils: Any = import_module("transformers.integrations.integration_utils")
    calls: list[Any] = []

    def tracker(output_dir: str) -> Any:
        calls.append(output_dir)
        return SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))

    monkeypatch.setattr(utils, "is_codecarbon_available", lambda: True)
    monkeypatch.setitem(sys.modules, "codecarbon", SimpleNamespace(EmissionsTracker=tracker))
    host(tmp_path, utils.CodeCarbonCallback()).train()
    theirs = calls.copy()
    calls.clear()

    make_trainer(
        train_loader=batches(2), max_epochs=1, hooks=[Foreign(utils.CodeCarbonCallback())], work_dir=tmp_path
    ).train()

    assert calls == theirs == [str(tmp_path), "start", "stop"]


def test_tensorboard(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """TensorBoardCallback writes the losses with their steps."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers.integrations import TensorBoardCallback

    make_trainer(
        train_loader=batches(4),
        max_epochs=2,
        hooks=[Foreign(TensorBoardCallback())],
        work_dir=tmp_path,
        default_hooks={"logger": {"interval": 2}},
    ).train()

    (file,) = tmp_path.rglob("events.out.tfevents*")
    found = EventAccumulator(str(file)).Reload().Scalars("train/loss")
    assert [each.step for each in found] == [2, 4, 6, 8]


def test_its_own_rows(make_trainer: MakeTrainer) -> None:
    """Each method of a callback has its own name in the plan and in the costs."""
    trainer = make_trainer(train_loader=batches(2), max_epochs=1, hooks=[Foreign(Notes([]), priority="LOW")])

    trainer.train()

    assert "Notes.on_step_end (transformers)" in str(trainer.bus)
    rows = {row.name: row.calls for row in trainer.costs().handlers}
    assert rows["Notes.on_step_end (transformers)"] == 2


class Sets(TrainerCallback):
    """A callback that sets a flag of the control."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Set it."""
        return replace(control, **{self.flag: True})


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("should_epoch_stop", r"trainer.stop\(reason\)"),
        ("should_save", "CheckpointHook"),
        ("should_evaluate", "val_interval"),
        ("should_log", "logger=dict"),
    ],
)
def test_flags_without_an_effect(make_trainer: MakeTrainer, flag: str, instead: str) -> None:
    """A flag that has no effect here is an error that names the callback, the flag and the substitute."""
    trainer = make_trainer(train_loader=batches(2), max_epochs=1, hooks=[Foreign(Sets(flag))])

    with pytest.raises(
        RuntimeError,
        match=f"Sets.on_step_end of Transformers set control.{flag}, which has no effect here: use .*{instead}",
    ):
        trainer.train()


class Pushes(TrainerCallback):
    """A callback for a moment that never comes."""

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            DefaultFlowCallback,
            ValueError,
            "DefaultFlowCallback needs the loop of Transformers, and would have no effect here: use val",
        ),
        (
            lambda: import_module("transformers.trainer_jit_checkpoint").JITCheckpointCallback(),
            ValueError,
            "JITCheckpointCallback needs the loop of Transformers, .*: use this trainer, which saves at SIGTERM",
        ),
        (EventLoopCallback, ValueError, "EventLoopCallback needs the loop of Transformers"),
        (Pushes, ValueError, "Pushes defines on_push_begin, which would never be called"),
        (
            TrainerControl,
            TypeError,
            "Foreign takes a callback of Transformers, got TrainerControl, which does not",
        ),
    ],
)
def test_refused(build: Any, error: type[Exception], words: str) -> None:
    """A class that steers the loop of Transformers, or has no callback's methods, is refused at its line."""
    with pytest.raises(error, match=words):
        Foreign(build())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"Foreign\(EarlyStoppingCallback\(...\)\) needs a validation: give the Trainer a val_loader"),
        ({"val_loader": batches(1), "evaluator": None, "loss_fn": F.cross_entropy}, None),
    ],
)
def test_early_stopping_needs_a_validation(
    make_trainer: MakeTrainer, changes: dict[str, Any], words: str | None
) -> None:
    """EarlyStoppingCallback without a validation is refused when the trainer is built."""
    options = {"train_loader": batches(1), "max_epochs": 1, "hooks": [Foreign(EarlyStoppingCallback())]}
    if words is None:
        make_trainer(**options, **changes)
        return
    with pytest.raises(ValueError, match=words):
        make_trainer(**options, **changes)


def test_every_class_is_in_a_table() -> None:
    """Each callback class in Transformers' source is in a table of the page, as one that works, is refused or not tried."""
    package = Path(transformers.__file__).parent
    found = {
        name
        for folder in (package, package / "integrations", package / "utils")
        for file in folder.glob("*.py")
        for name in re.findall(
            r"^class (\w+Callback)\b", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }

    assert "TensorBoardCallback" in found
    assert found - classes_named("transformers.md") == set()
