"""What contradicts itself, or cannot work, is refused with a message that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Bus, Trainer
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.writers import JSONLWriter
from tests.support.trainers import MakeTrainer, batches, tiny_model


class Stateful(Hook):
    """A hook with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_epochs": None}, ValueError, "exactly one of max_epochs and max_iters.*got neither"),
        ({"max_epochs": 1, "max_iters": 1}, ValueError, r"got both \(max_epochs=1, max_iters=1\)"),
        ({"max_epochs": 0}, ValueError, "max_epochs must be at least 1, got 0"),
        ({"max_epochs": 1.0}, TypeError, r"max_epochs must be an int, got 1\.0"),
        ({"max_iters": True}, TypeError, "max_iters must be an int, got True"),
        ({"train_loader": []}, ValueError, "train_loader is empty: it has 0 batches"),
        ({"val_loader": []}, ValueError, "val_loader is empty"),
        ({"test_loader": 3}, TypeError, "test_loader must be an iterable of batches, got 3"),
        ({"optimizer": torch.optim.SGD}, TypeError, r"optimizer must be a torch\.optim\.Optimizer"),
        ({"default_hooks": {"loger": None}}, ValueError, "default_hooks has no 'loger': did you mean 'logger'"),
        ({"default_hooks": [1]}, TypeError, r"default_hooks must be a mapping \{name: .*\}, got \[1\]; other hooks"),
        (
            {"custom_hooks": {"type": "EMAHook"}},
            TypeError,
            r"custom_hooks must be a list of them, got one config: write custom_hooks=\[dict\(type=...\)\]",
        ),
        ({"hooks": LoggerHook(1)}, TypeError, r"hooks must be a list, got <.*LoggerHook.*>: write hooks=\[...\]"),
        ({"writers": "JSONLWriter"}, TypeError, "writers must be a list, got 'JSONLWriter'"),
        ({"default_hooks": {"logger": 3}}, TypeError, "expected a hook or a config .*, got 3"),
        (
            {"default_hooks": {"logger": LoggerHook(1)}, "hooks": [LoggerHook(2)]},
            ValueError,
            "default_hooks has a 'logger', and hooks another LoggerHook",
        ),
        ({"hooks": [LoggerHook]}, TypeError, r"the class LoggerHook: write LoggerHook\(\)"),
        ({"hooks": [print]}, TypeError, "expected a hook or a config"),
        ({"hooks": [JSONLWriter()]}, TypeError, r"JSONLWriter, which is a writer: it goes to writers=\[...\]"),
        ({"writers": [JSONLWriter]}, TypeError, r"the class JSONLWriter: write JSONLWriter\(\)"),
        ({"writers": [LoggerHook()]}, TypeError, r"LoggerHook, which is a hook: it goes to hooks=\[...\]"),
        ({"writers": [JSONLWriter(), JSONLWriter()]}, ValueError, "already has a subscription named 'JSONLWriter'"),
        ({"hooks": [Stateful(), Stateful()]}, ValueError, "two hooks have the state name 'Stateful'"),
        ({"hooks": [{"interval": 3}]}, TypeError, r"expected an object or a config dict\(type=...\)"),
        ({"hooks": [{"type": "LogerHook"}]}, ValueError, "unknown type 'LogerHook': did you mean 'LoggerHook'"),
        (
            {"hooks": [{"type": "LoggerHook", "intervall": 3}]},
            ValueError,
            "LoggerHook has no argument 'intervall': did you mean 'interval'",
        ),
        ({"hooks": [{"type": 5}]}, TypeError, "type must be a class or its name, got 5"),
        ({"hooks": [CheckpointHook(save_best="accuracy")]}, ValueError, "needs a validation.*val_loader"),
        ({"evaluator": 3}, TypeError, "evaluator 'int' must be a function"),
        (
            {"evaluator": {"type": "Accuracy"}},
            TypeError,
            "evaluator 'type' must be a function .*, got 'Accuracy': a config does not make one",
        ),
        (
            {"optimizer": {"type": "SGD", "lr": 0.1}},
            TypeError,
            r"optimizer is a config, and must be an object: write torch.optim.SGD\(model.parameters\(\), ...\)",
        ),
        (
            {"optimizer": {"type": torch.optim.Adam}},
            TypeError,
            r"must be an object: write torch.optim.Adam\(model.parameters",
        ),
        ({"loss_fn": nn.CrossEntropyLoss}, TypeError, r"loss_fn is a class: give an object of it, CrossEntropyLoss\(\)"),
        ({"loss_fn": "mse"}, TypeError, r"loss_fn must be a function \(model\(inputs\), target\), got 'mse'"),
        (
            {"schedulers": torch.optim.lr_scheduler.StepLR},
            TypeError,
            r"expected a scheduler, got the class StepLR: write StepLR\(optimizer, ...\)",
        ),
        ({"bus": Bus}, TypeError, r"bus must be a Bus, as Bus\(\) makes one, got <class"),
        ({"work_dir": 3}, TypeError, "work_dir must be a path, a str or a Path, got 3"),
        (
            {"train_step": lambda batch: batch},
            TypeError,
            r"train_step is called with \(trainer, batch\), but .*<lambda> .*\(batch\): too many",
        ),
        ({"train_step": 3}, TypeError, r"train_step must be a function \(trainer, batch\), got 3"),
        (
            {"val_step": lambda trainer, batch, epoch: batch},
            TypeError,
            r"val_step is called with \(trainer, batch\), .*: missing a required argument: 'epoch'",
        ),
        (
            {"train_dataloader": []},
            TypeError,
            "Trainer has no argument 'train_dataloader': use train_loader=..., a loader",
        ),
        ({"resume": True}, TypeError, r"no argument 'resume': use trainer.resume\(\"auto\"\)"),
        ({"val_intervall": 2}, TypeError, "Trainer has no argument 'val_intervall': did you mean 'val_interval'"),
    ],
)  # fmt: skip
def test_refused_when_built(
    make_trainer: MakeTrainer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """An argument that cannot work is an error at the line that builds the trainer."""
    with pytest.raises(error, match=message):
        make_trainer(**arguments)


def test_by_epoch_in_a_run_of_iterations(make_trainer: MakeTrainer) -> None:
    """A hook that counts epochs in a run without any would never act: it is refused."""
    with pytest.raises(ValueError, match=r"by_epoch=True\) in a run measured in iterations would never save"):
        make_trainer(max_iters=5, hooks=[CheckpointHook(interval=1, by_epoch=True)])


@pytest.mark.parametrize("model", [nn.Linear, lambda x: x], ids=["class", "function"])
def test_model_that_is_no_module(tmp_path: Path, model: Any) -> None:
    """A class, or a function, in the model's place is refused."""
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        Trainer(model, loss_fn=F.cross_entropy, max_epochs=1, work_dir=tmp_path)


def test_bus_of_another_trainer(make_trainer: MakeTrainer) -> None:
    """Its hooks would make steps of their own in this one's iterations."""
    other = make_trainer()

    with pytest.raises(
        ValueError, match=r"the bus belongs to another trainer, .*: give each trainer a bus of its own"
    ):
        make_trainer(bus=other.bus)


@pytest.mark.parametrize("what", ["train", "epochs"])
def test_training_within_a_training(make_trainer: MakeTrainer, what: str) -> None:
    """Called by a handler it would go on and on; a validation may be."""
    trainer = make_trainer(val_loader=batches(1))

    def again(trainer: Trainer, event: Any) -> None:
        assert trainer.val()
        trainer.train() if what == "train" else next(trainer.epochs())

    trainer.bus.subscribe(again, "after_train_iter")

    with pytest.raises(
        RuntimeError, match=rf"trainer\.{what}\(\) was called in the middle of a run .*; a handler may"
    ):
        trainer.train()

    assert not trainer.running


def test_loss_fn_and_train_step(tmp_path: Path) -> None:
    """`train_step` replaces `loss_fn`: of both one would be ignored."""
    with pytest.raises(ValueError, match="give loss_fn or train_step, not both"):
        Trainer(
            tiny_model(), loss_fn=F.cross_entropy, train_step=lambda trainer, batch: None, max_epochs=1,
            work_dir=tmp_path,
        )  # fmt: skip


def test_two_hooks_of_one_class_without_state(make_trainer: MakeTrainer) -> None:
    """Hooks without a state may share a class: each gets a name of its own."""

    class Quiet(Hook):
        def after_run(self, trainer: Any, event: Any) -> None:
            pass

    trainer = make_trainer(hooks=[Quiet(), Quiet()])

    assert [hook.name for hook in trainer.hooks[-2:]] == ["Quiet", "Quiet #2"]


def test_work_dir_that_cannot_be_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A work dir below a file is refused by its name, as the operating system's own error."""
    (tmp_path / "file").touch()

    with pytest.raises(
        NotADirectoryError, match=re.escape(f"work_dir '{tmp_path}/file/run' cannot be written")
    ):
        make_trainer(work_dir=tmp_path / "file" / "run")


def test_work_dir_that_is_a_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A file in the work dir's place is refused, and called that."""
    (tmp_path / "file").touch()

    with pytest.raises(
        FileExistsError, match=re.escape(f"'{tmp_path}/file' cannot be written: it is a file")
    ):
        make_trainer(work_dir=tmp_path / "file")


def test_a_work_dir_of_its_own(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a work dir every trainer gets a new directory under runs/, also two in one second."""
    monkeypatch.chdir(tmp_path)

    first, second = make_trainer(work_dir=None), make_trainer(work_dir=None)

    assert first.work_dir != second.work_dir
    assert first.work_dir.parent == second.work_dir.parent == Path("runs")


@pytest.mark.parametrize("unit", [{"max_epochs": 2}, {"max_iters": 2}], ids=str)
def test_empty_loader_without_a_length(make_trainer: MakeTrainer, unit: dict[str, int]) -> None:
    """A loader that turns out to be empty ends the run with an error instead of turning for ever."""
    trainer = make_trainer(train_loader=Unsized([]), **unit)

    with pytest.raises(ValueError, match="trained no iteration: it is empty"):
        trainer.train()


def test_a_generator_as_loader(make_trainer: MakeTrainer) -> None:
    """A generator gives batches for one epoch only, which the second says."""
    trainer = make_trainer(train_loader=(batch for batch in batches(2)), max_epochs=2)

    with pytest.raises(
        ValueError, match=r"trained no iteration: it is empty.*; an iterator gives its batches only once"
    ):
        trainer.train()

    assert trainer.iter == 2


def test_empty_validation_loader_without_a_length(make_trainer: MakeTrainer) -> None:
    """A validation over nothing has no metrics: it is an error."""
    trainer = make_trainer(val_loader=Unsized([]))

    with pytest.raises(ValueError, match="the val loader is empty"):
        trainer.val()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the train step must return the loss tensor or a mapping with 'loss', got None"),
        (
            0.5,
            r"the loss tensor or a mapping with 'loss', got 0\.5.* needs default_hooks=dict\(optimizer=None\)",
        ),
        ({"los": torch.ones(())}, r"a mapping with 'loss', got a mapping with \['los'\]"),
        ({"loss": 0.5}, "a 'loss' tensor of one element"),
        (torch.ones(2, requires_grad=True), "a 'loss' tensor of one element"),
    ],
)
def test_step_returning_something_else(make_trainer: MakeTrainer, returned: Any, message: str) -> None:
    """A train step without a loss to go backward from is an error that shows what it returned."""
    trainer = make_trainer(train_step=lambda trainer, batch: returned)

    with pytest.raises(TypeError, match=message):
        trainer.train()


def test_loss_that_needs_no_grad(make_trainer: MakeTrainer) -> None:
    """A detached loss would train nothing."""
    trainer = make_trainer(train_step=lambda trainer, batch: trainer.model(batch[0]).sum().detach())

    with pytest.raises(RuntimeError, match="the loss needs no grad, so backward would train nothing"):
        trainer.train()


def test_val_step_returning_no_mapping(make_trainer: MakeTrainer) -> None:
    """A val_step returns named values."""
    trainer = make_trainer(val_loader=batches(1), val_step=lambda trainer, batch: 0.5)

    with pytest.raises(TypeError, match=r"val_step must return a mapping of values, got 0\.5"):
        trainer.val()


def test_batches_of_another_form(make_trainer: MakeTrainer) -> None:
    """loss_fn needs pairs; for anything else the message names train_step."""
    trainer = make_trainer(train_loader=[{"image": torch.ones(1, 2)}])

    with pytest.raises(
        TypeError, match=r"batches \(inputs, target\), got dict from the loader: pass train_step"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({"train_loader": None}, "train", "no train_loader to train on: pass train_loader"),
        ({}, "val", "no val_loader to evaluate on: pass val_loader"),
        ({}, "test", "no test_loader to evaluate on: pass test_loader"),
        ({"loss_fn": None}, "train", "the trainer has no step: pass loss_fn"),
        ({"optimizer": None}, "train", "no optimizer, so train.. would change nothing: pass optimizer"),
    ],
)
def test_what_a_call_needs(
    make_trainer: MakeTrainer, arguments: dict[str, Any], call: str, message: str
) -> None:
    """A call that lacks something says which argument to pass, and leaves the trainer usable."""
    trainer = make_trainer(**arguments)

    with pytest.raises(ValueError, match=message):
        getattr(trainer, call)()

    assert not trainer.running


def test_steps_made_elsewhere(make_trainer: MakeTrainer) -> None:
    """`default_hooks=dict(optimizer=None)` says that somebody else steps: no optimizer is needed."""
    trainer = make_trainer(optimizer=None, default_hooks={"optimizer": None}, max_epochs=1)

    trainer.train()

    assert trainer.iter == 3


def test_a_closed_trainer(make_trainer: MakeTrainer) -> None:
    """A run opens its bus again."""
    trainer = make_trainer(max_epochs=1)
    trainer.close()

    trainer.train()

    assert (trainer.iter, trainer.bus.closed) == (3, False)
