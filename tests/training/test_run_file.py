"""`run.json` of trainings: the options, the model and the begins, and what the program gave as `config`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.description.record import RunRecord, read_record
from eventloop.events import RunInfo
from eventloop.hooks import EMAHook, LoggerHook
from eventloop.writers import JSONLWriter
from tests.support.trainers import MakeTrainer, batches


def written(trainer: Trainer) -> RunRecord:
    """The record in the work_dir, once a run has ended."""
    found = read_record(trainer.work_dir)
    assert found is not None
    return found


def test_a_training_writes_what_it_was_begun_with(make_trainer: MakeTrainer) -> None:
    """The settings are those that the objects have; what JSON lacks is a text."""
    given: dict[str, Any] = {
        "lr": 0.5,
        "path": Path("data"),
        "layers": (1, 2),
        "bad": float("nan"),
        "f": object,
    }
    trainer = make_trainer(max_epochs=1, hooks=[EMAHook(momentum=0.25), LoggerHook(7)], config=given)
    group = trainer.optimizer.param_groups[0]
    trainer.train()

    found = written(trainer)

    assert found.config == {
        "lr": 0.5,
        "path": "data",
        "layers": [1, 2],
        "bad": "nan",
        "f": "<class 'object'>",
    }
    assert found.options["optimizer"]["type"] == type(trainer.optimizer).__name__
    assert found.options["optimizer"]["lr"] == group["lr"]
    assert found.options["hooks"]["EMAHook"]["momentum"] == 0.25
    assert found.options["hooks"]["logger"] == {"type": "LoggerHook", "interval": 7}
    assert found.options["trainer"]["max_epochs"] == 1
    assert (found.model, found.ranks, found.torch) == (
        type(trainer.model).__name__,
        1,
        str(torch.__version__),
    )
    assert found.parameters == found.trainable == sum(p.numel() for p in trainer.model.parameters())


def accuracy(preds: torch.Tensor, target: torch.Tensor) -> float:
    """The share of the right classes."""
    return float((preds.argmax(1) == target).float().mean())


def uncompiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A backend of `torch.compile` that runs the graph as it is."""
    return graph.forward


ARGUMENTS = {
    "val_before_train": True,
    "sanity_val": 0,
    "device": "cpu",
    "compile": {"model": {"backend": "uncompiled", "dynamic": False}},
    "loss_fn": "CrossEntropyLoss",
    "evaluator": {"top": "accuracy"},
    "writers": ["JSONLWriter"],
}
"""Arguments of the trainer as `run.json` has them."""


def test_the_options_have_all_arguments_of_the_trainer(make_trainer: MakeTrainer) -> None:
    """Functions, metrics and writers are named, also within the options of `compile`."""
    trainer = make_trainer(
        max_epochs=1,
        val_loader=batches(1),
        val_before_train=True,
        sanity_val=0,
        device="cpu",
        compile={"model": {"backend": uncompiled, "dynamic": False}},
        loss_fn=torch.nn.CrossEntropyLoss(),
        evaluator={"top": accuracy},
        writers=[JSONLWriter()],
    )
    trainer.train()

    options = written(trainer).options["trainer"]
    assert {name: options.get(name) for name in ARGUMENTS} == ARGUMENTS


def test_the_options_omit_arguments_with_their_defaults(make_trainer: MakeTrainer) -> None:
    """Of these arguments only the loss is given."""
    trainer = make_trainer(max_epochs=1, val_loader=batches(1))
    trainer.train()

    options = written(trainer).options["trainer"]
    assert {name: options[name] for name in ARGUMENTS if name in options} == {"loss_fn": "cross_entropy"}


def test_a_later_training_adds_its_begin_and_an_evaluation_none(make_trainer: MakeTrainer) -> None:
    """The begins have the completed iterations; the options are those of the last training."""
    trainer = make_trainer(max_epochs=1, val_loader=batches(1), val_step=lambda trainer, batch: {"acc": 1.0})
    trainer.train()
    done = trainer.iter
    trainer.max_epochs = 2
    trainer.train()
    trainer.val()

    found = written(trainer)

    assert [begin.iter for begin in found.begins] == [0, done]
    assert found.options["trainer"]["max_epochs"] == 2


def test_writers_get_the_settings_with_the_facts(make_trainer: MakeTrainer) -> None:
    """`run_info` has the config as it was given, and the options of `run.json`."""
    trainer, seen = make_trainer(max_epochs=1, config={"model": {"width": 3}}), list[RunInfo]()

    def record(event: RunInfo) -> None:
        seen.append(event)

    trainer.bus.subscribe(record, "run_info", offload="thread")
    trainer.train()

    (info,) = seen
    assert info.config == {"model": {"width": 3}}
    assert info.options == written(trainer).options


def test_the_options_of_a_dev_run_say_how_many_batches_it_has(make_trainer: MakeTrainer) -> None:
    """It writes no `run.json`, so this is for subscribers of `run_info`."""
    trainer, seen = make_trainer(max_epochs=1, fast_dev_run=2), list[RunInfo]()

    def record(event: RunInfo) -> None:
        seen.append(event)

    trainer.bus.subscribe(record, "run_info", offload="thread")
    trainer.train()

    assert seen[0].options["trainer"]["fast_dev_run"] == 2


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            Namespace(lr=1),
            r"config must be a mapping of names to settings, such as vars\(args\) .* got Namespace",
        ),
        ({1: "a"}, r"the names in config must be a str, got 1 \(int\)"),
    ],
)
def test_a_config_of_another_type_is_refused(config: Any, error: str, make_trainer: MakeTrainer) -> None:
    """When the trainer is built."""
    with pytest.raises(TypeError, match=error):
        make_trainer(max_epochs=1, config=config)


def test_a_config_that_holds_itself_ends(make_trainer: MakeTrainer) -> None:
    """What is too deep becomes a text."""
    config: dict[str, Any] = {"lr": 1}
    config["all"] = config

    inner: Any = make_trainer(max_epochs=1, config=config).config
    while isinstance(inner, Mapping):
        inner = inner["all"]
    assert inner == "{'lr': 1, 'all': {...}}"
