"""What contradicts itself, or cannot work, is refused with a message that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Bus, Trainer
from eventloop.events import Event
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.writers import CSVWriter, JSONLWriter, Writer
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


class Nameless(Writer):
    """A writer whose constructor takes no name."""

    def write(self, event: Event) -> None:
        raise AssertionError


TWICE = JSONLWriter()
SAMPLES = (torch.ones(4, 2), torch.ones(4).long())


class OwnTrain(nn.Linear):
    """A model whose `train` is a training, as in scripts with a loss for each layer."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def train(self, first: Any, second: Any) -> Any:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_epochs": None}, ValueError, "exactly one of max_epochs and max_iters.*got neither"),
        ({"max_epochs": 1, "max_iters": 1}, ValueError, r"got both \(max_epochs=1, max_iters=1\)"),
        ({"max_epochs": 0}, ValueError, "max_epochs must be at least 1, got 0"),
        ({"max_epochs": 1.0}, TypeError, r"max_epochs must be an int, got 1\.0"),
        ({"max_iters": True}, TypeError, "max_iters must be an int, got True"),
        (
            {"model": nn.Linear},
            TypeError,
            r"model must be a torch\.nn\.Module, got the class Linear: write Linear\(\.\.\.\)",
        ),
        (
            {"model": "resnet", "max_epochs": None},
            TypeError,
            r"model must be a torch\.nn\.Module, got 'resnet'",
        ),
        ({"model": lambda x: x}, TypeError, r"model must be a torch\.nn\.Module"),
        (
            {"model": OwnTrain()},
            TypeError,
            r"model.train \(rename .*\) is called with \(mode\), .* OwnTrain.train\(first",
        ),
        ({"train_loader": []}, ValueError, "train_loader is empty: it has 0 batches"),
        ({"test_loader": 3}, TypeError, "test_loader must be an iterable of batches, got 3"),
        ({"optimizer": torch.optim.SGD}, TypeError, r"optimizer must be a torch\.optim\.Optimizer"),
        (
            {"optimizer": {"type": "SGD", "lr": 0.1}},
            TypeError,
            r"write torch.optim.SGD\(model.parameters\(\), ...\)",
        ),
        ({"optimizer": {"type": torch.optim.Adam}}, TypeError, r"write torch.optim.Adam\(model.parameters"),
        (
            {"default_hooks": {"loger": None}},
            ValueError,
            "default_hooks has no 'loger': did you mean 'logger'",
        ),
        (
            {"default_hooks": [1]},
            TypeError,
            r"default_hooks must be a mapping \{name: .*\}, got \[1\]; other hooks",
        ),
        ({"default_hooks": {"logger": 3}}, TypeError, "expected a hook or a config .*, got 3"),
        (
            {"default_hooks": {"logger": LoggerHook(1)}, "hooks": [LoggerHook(2)]},
            ValueError,
            "and hooks another LoggerHook",
        ),
        (
            {"custom_hooks": {"type": "EMAHook"}},
            TypeError,
            r"got one config: write custom_hooks=\[dict\(type=...\)\]",
        ),
        (
            {"hooks": LoggerHook(1)},
            TypeError,
            r"hooks must be a list, got <.*LoggerHook.*>: write hooks=\[...\]",
        ),
        ({"writers": "JSONLWriter"}, TypeError, "writers must be a list, got 'JSONLWriter'"),
        ({"hooks": [LoggerHook]}, TypeError, r"the class LoggerHook: write LoggerHook\(\)"),
        (
            {"hooks": [print]},
            TypeError,
            r'expected a hook or a config .*: give CallbackHook\(.*@bus\.on\("after_train_iter',
        ),
        (
            {"hooks": [JSONLWriter()]},
            TypeError,
            r"JSONLWriter, which is a writer: it goes to writers=\[...\]",
        ),
        (
            {"hooks": [{"type": "JSONLWritr"}]},
            ValueError,
            "unknown type 'JSONLWritr': did you mean 'JSONLWriter'",
        ),
        ({"writers": [JSONLWriter]}, TypeError, r"the class JSONLWriter: write JSONLWriter\(\)"),
        ({"writers": [LoggerHook()]}, TypeError, r"LoggerHook, which is a hook: it goes to hooks=\[...\]"),
        (
            {"hooks": [Unsized([])]},
            TypeError,
            r"expected a hook .*, got <.*Unsized.*>: derive its class from eventloop\.hooks\.Hook",
        ),
        (
            {"writers": [Unsized([])]},
            TypeError,
            r"expected a writer .*: derive its class from eventloop\.writers\.Writer",
        ),
        (
            {"writers": [JSONLWriter(), JSONLWriter()]},
            ValueError,
            r"writers= holds two JSONLWriter named 'JSONLWriter': give the second a name, JSONLWriter\(name=...\)",
        ),
        (
            {"writers": [JSONLWriter(name="a"), CSVWriter(name="a")]},
            ValueError,
            r"two writers named 'a': .* CSVWriter\(name=...\)",
        ),
        (
            {"writers": [Nameless(), Nameless()]},
            ValueError,
            r"two Nameless named 'Nameless': .* writer\.name = \.\.\.",
        ),
        ({"writers": [TWICE, TWICE]}, ValueError, "writers= holds the same JSONLWriter twice: list it once"),
        ({"hooks": [Stateful(), Stateful()]}, ValueError, "two hooks have the state name 'Stateful'"),
        ({"hooks": [CheckpointHook(save_best="accuracy")]}, ValueError, "needs a validation.*val_loader"),
        (
            {"max_epochs": None, "max_iters": 5, "hooks": [CheckpointHook(1, by_epoch=True)]},
            ValueError,
            "would never save",
        ),
        (
            {"evaluator": {"type": "Accuracy"}},
            TypeError,
            "evaluator 'type' .*, got 'Accuracy': a config does not make one",
        ),
        (
            {"loss_fn": nn.CrossEntropyLoss},
            TypeError,
            r"loss_fn is a class: give an object of it, CrossEntropyLoss\(\)",
        ),
        (
            {"loss_fn": lambda preds: preds},
            TypeError,
            r"loss_fn is called with \(model\(inputs\), target\), but the signature is .*\(preds\): too many",
        ),
        (
            {"evaluator": {"f1": lambda preds: 1}},
            TypeError,
            r"evaluator 'f1' is called with \(preds, target\), but the signature is .*\(preds\): too many",
        ),
        (
            {"evaluator": lambda preds: 1},
            TypeError,
            r"evaluator is called with \(preds, target\), but .*\(preds\): too many",
        ),
        ({"loss_fn": "mse"}, TypeError, r"loss_fn must be a function \(model\(inputs\), target\), got 'mse'"),
        (
            {"schedulers": torch.optim.lr_scheduler.StepLR},
            TypeError,
            r"class StepLR: write StepLR\(optimizer, ...\)",
        ),
        ({"bus": Bus}, TypeError, r"bus must be a Bus, as Bus\(\) makes one, got <class"),
        ({"work_dir": 3}, TypeError, "work_dir must be a path, a str or a Path, got 3"),
        (
            {"loss_fn": F.cross_entropy, "train_step": lambda trainer, batch: None},
            ValueError,
            "give loss_fn or train_step, not both",
        ),
        (
            {"train_step": lambda batch: batch},
            TypeError,
            r"train_step is called with \(trainer, batch\), .*too many",
        ),
        ({"train_step": 3}, TypeError, r"train_step must be a function \(trainer, batch\), got 3"),
        (
            {"val_step": lambda trainer, batch, epoch: batch},
            TypeError,
            "val_step is called with .* required argument: 'epoch'",
        ),
        (
            {"train_loader": SAMPLES},
            TypeError,
            r"^train_loader must give .*, got a tuple of tensors, .*: give DataLoader\(TensorDataset\(x, y\), .*, or pass train_step=",
        ),
        (
            {"train_loader": [*SAMPLES, SAMPLES[0]]},
            TypeError,
            "train_loader must give .*, got a list of tensors",
        ),
        (
            {"val_loader": [*SAMPLES]},
            TypeError,
            "val_loader must give .*, got a list of tensors, .*, or pass val_step=",
        ),
        (
            {"test_loader": {"a": SAMPLES}},
            TypeError,
            r"test_loader\['a'\] must give .*, got a tuple of tensors",
        ),
        (
            {"val_intervall": 2},
            TypeError,
            "Trainer has no argument 'val_intervall': did you mean 'val_interval'",
        ),
    ],
)
def test_refused_when_built(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """An argument that cannot work is an error at the line that builds the trainer."""
    model = tiny_model()
    step = {} if "train_step" in arguments else {"loss_fn": F.cross_entropy}
    valid = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_epochs": 2,
        "train_loader": batches(1),
        "work_dir": tmp_path,
    }
    if "max_iters" in arguments and "max_epochs" not in arguments:
        del valid["max_epochs"]
    with pytest.raises(error, match=message):
        Trainer(**{"model": model, **valid, **step, **arguments})


def test_tensors_are_batches_of_steps_that_take_them(make_trainer: MakeTrainer) -> None:
    """A `train_step` and a `val_step` of the user, or of a subclass, may take a tensor as a batch."""

    class Own(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch).mean()}

        def val_step(self, batch: Any) -> dict[str, Any]:
            return {"size": len(batch)}

    inputs = [torch.ones(4, 2), torch.ones(3, 2)]
    make_trainer(
        train_step=lambda trainer, batch: trainer.model(batch).mean(),
        train_loader=inputs,
        val_step=lambda trainer, batch: {"size": len(batch)},
        val_loader=inputs,
    ).train()
    model = tiny_model()
    trainer = Own(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.mse_loss,
        max_epochs=1,
        train_loader=inputs,
        val_loader=inputs,
        work_dir=make_trainer().work_dir,
    )

    trainer.train()

    assert trainer.iter == 2
    trainer.close()


@wraps(lambda preds: preds.mean())
def wrapper(preds: Any, target: Any) -> Any:
    """A wrapper that takes one more argument than the function that it wraps."""
    return preds.mean()


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, reduction="sum"), wrapper, max],
)
def test_functions_that_take_more_or_show_no_signature(make_trainer: MakeTrainer, loss_fn: Any) -> None:
    """Modules, functions with optional arguments, partial functions, wrappers and builtins are accepted."""
    assert make_trainer(loss_fn=loss_fn, evaluator=loss_fn).loss_fn is loss_fn


def test_bus_of_another_trainer(make_trainer: MakeTrainer) -> None:
    """Its hooks would make steps of their own in this one's iterations."""
    other = make_trainer()

    with pytest.raises(ValueError, match=r"the bus belongs to another trainer, .*: give each trainer a bus"):
        make_trainer(bus=other.bus)


@pytest.mark.parametrize("what", ["train", "epochs"])
def test_training_within_a_training(make_trainer: MakeTrainer, what: str) -> None:
    """A handler may validate, but not train: it would go on and on."""
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


@pytest.mark.parametrize(
    ("place", "error", "why"),
    [("file/run", NotADirectoryError, ""), ("file", FileExistsError, ": it is a file")],
)
def test_work_dir_that_cannot_be_written(
    make_trainer: MakeTrainer, tmp_path: Path, place: str, error: type[OSError], why: str
) -> None:
    """A work dir at or below a file is refused by its name, as the operating system's own error."""
    (tmp_path / "file").touch()

    with pytest.raises(error, match=re.escape(f"'{tmp_path}/{place}' cannot be written") + f".*{why}"):
        make_trainer(work_dir=tmp_path / place)


def test_a_work_dir_of_its_own(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a work dir every trainer gets a new directory under runs/, also two in one second."""
    monkeypatch.chdir(tmp_path)

    first, second = make_trainer(work_dir=None), make_trainer(work_dir=None)

    assert first.work_dir != second.work_dir
    assert first.work_dir.parent == second.work_dir.parent == Path("runs")


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"train_loader": Unsized([])}, "train", "trained no iteration: it is empty"),
        ({"train_loader": Unsized([]), "max_iters": 2}, "train", "trained no iteration: it is empty"),
        ({"train_loader": iter(batches(2))}, "train", "is empty.*; an iterator gives its batches only once"),
        ({"val_loader": Unsized([])}, "val", "the val loader is empty"),
    ],
    ids=["epochs", "iterations", "iterator", "validation"],
)
def test_empty_loader_without_a_length(
    make_trainer: MakeTrainer, options: dict[str, Any], call: str, message: str
) -> None:
    """A loader that turns out to be empty ends the run with an error instead of turning for ever."""
    trainer = make_trainer(**options)

    with pytest.raises(ValueError, match=message):
        getattr(trainer, call)()


DETACHED = torch.ones(())


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "the train step must return the loss tensor or a mapping with 'loss', got None"),
        (0.5, TypeError, r"with 'loss', got 0\.5.* needs default_hooks=dict\(optimizer=None\)"),
        ({"los": DETACHED}, TypeError, r"a mapping with 'loss', got a mapping with \['los'\]"),
        ({"loss": 0.5}, TypeError, "a 'loss' tensor of one element"),
        (
            torch.ones(2, requires_grad=True),
            TypeError,
            r"one element, .* got a loss of shape \(2,\): take its mean\(\)",
        ),
        (DETACHED, RuntimeError, "the loss needs no grad, so backward would train nothing"),
    ],
)
def test_step_returning_something_else(
    make_trainer: MakeTrainer, returned: Any, error: type[Exception], message: str
) -> None:
    """A train step without a loss to go backward from is an error that shows what it returned."""
    trainer = make_trainer(train_step=lambda trainer, batch: returned)

    with pytest.raises(error, match=message):
        trainer.train()


def test_a_val_step_of_a_subclass_that_returns_no_mapping(tmp_path: Path) -> None:
    """A method is checked as the function `val_step=` is."""

    class Mine(Trainer):
        def val_step(self, batch: Any) -> Any:
            return None

    trainer = Mine(nn.Linear(2, 2), val_loader=[DETACHED], max_epochs=1, work_dir=tmp_path)

    with pytest.raises(TypeError, match="val_step must return a mapping of values, got None"):
        trainer.val()


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        (
            {"val_step": lambda trainer, batch: 0.5},
            "val",
            r"val_step must return a mapping of values, got 0\.5",
        ),
        (
            {"train_loader": [{"x": DETACHED}]},
            "train",
            r"train_loader must give batches \(inputs, target\), got a dict: pass train_step=",
        ),
        (
            {"train_loader": [(DETACHED, DETACHED, DETACHED)]},
            "train",
            r"train_loader must give batches \(inputs, target\), got a tuple of 3: pass train_step=",
        ),
        (
            {"val_loader": [[DETACHED]]},
            "train",
            r"val_loader must give batches \(inputs, target\), got a list of 1: pass val_step=",
        ),
        (
            {"test_loader": [{"x": DETACHED}]},
            "test",
            r"test_loader must give batches \(inputs, target\), got a dict: pass val_step=",
        ),
    ],
)
def test_values_of_another_form(
    make_trainer: MakeTrainer, options: dict[str, Any], call: str, message: str
) -> None:
    """A val_step returns named values, and loss_fn needs pairs: else the message names the loader and the step."""
    trainer = make_trainer(**{"val_loader": batches(1), **options})

    with pytest.raises(TypeError, match=message):
        getattr(trainer, call)()


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
    """`default_hooks=dict(optimizer=None)` says that the program makes the steps itself: no optimizer is needed."""
    trainer = make_trainer(optimizer=None, default_hooks={"optimizer": None}, max_epochs=1)

    trainer.train()

    assert trainer.iter == 3


def test_a_closed_trainer(make_trainer: MakeTrainer) -> None:
    """A run opens its bus again."""
    trainer = make_trainer(max_epochs=1)
    trainer.close()

    trainer.train()

    assert (trainer.iter, trainer.bus.closed) == (3, False)
