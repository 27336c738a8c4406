"""RuntimeInfoHook: what the run is, and the numbers its steps return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from eventloop.events import RunInfo, ScalarsLogged
from eventloop.hooks import RuntimeInfoHook
from eventloop.training.trainer import Trainer


def step_with(**more: Any) -> Callable[[Trainer, Any], dict[str, Any]]:
    """A train step that returns the loss and these."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": F.mse_loss(trainer.model(batch[0]), batch[1]), **more}

    return step


@pytest.mark.parametrize(
    "value",
    [0.5, torch.tensor(0.5), torch.tensor([[0.5]]), np.float32(0.5), np.array([0.5])],
    ids=["float", "0-dim", "one element", "numpy", "array"],
)
def test_every_single_number_of_the_outputs_is_put(make_trainer: Callable[..., Trainer], value: Any) -> None:
    """Floats, and tensors and arrays of one element, become metrics under their own name."""
    trainer = make_trainer(train_step=step_with(share=value))

    trainer.train()

    assert trainer.metrics.latest()["share"] == (0.5, 3)


@pytest.mark.parametrize("value", [3, True, np.int64(3)])
def test_whole_numbers_are_put(make_trainer: Callable[..., Trainer], value: Any) -> None:
    """An int, a bool or a numpy int counts as a number."""
    trainer = make_trainer(train_step=step_with(count=value))

    trainer.train()

    assert trainer.metrics.latest()["count"][0] == float(value)


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(3), "text", None, [1.0]])
def test_what_is_no_number_is_left_alone(make_trainer: Callable[..., Trainer], value: Any) -> None:
    """Logits, names and the like stay in `trainer.outputs`."""
    trainer = make_trainer(train_step=step_with(other=value))

    trainer.train()

    assert "other" not in trainer.metrics.latest()


def test_outputs_of_a_hand_written_loop_may_be_any_mapping(
    make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]]
) -> None:
    """The numbers of a mapping that is no dict are put as well."""
    trainer = make_trainer()

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(2)):
            loss = F.mse_loss(trainer.model(inputs), target)
            trainer.outputs = MappingProxyType({"loss": loss, "two": 2.0})

    assert trainer.metrics.latest()["two"] == (2.0, 1)


def test_each_iteration_has_its_own_loss(make_trainer: Callable[..., Trainer]) -> None:
    """The history holds the value of every iteration, in order."""
    losses: list[float] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    trainer = make_trainer(train_step=step)
    trainer.train()

    assert trainer.metrics.history("loss").values() == [(loss, i) for i, loss in enumerate(losses)]


def run_infos(trainer: Trainer) -> list[Mapping[str, str]]:
    """What a training announces about itself."""
    seen: list[Mapping[str, str]] = []

    def record(event: RunInfo) -> None:
        seen.append(event.info)

    trainer.bus.subscribe(record, "run_info", offload="thread")
    trainer.train()
    return seen


def test_run_info_is_announced_once_at_the_start(make_trainer: Callable[..., Trainer]) -> None:
    """The facts of the run, the printed plan among them, go out with before_run."""
    (info,) = run_infos(make_trainer(max_epochs=3))

    assert info["model"] == "Linear"
    assert info["parameters"] == "3"
    assert info["optimizer"] == "SGD"
    assert info["schedulers"] == "none"
    assert info["device"] == "cpu"
    assert "OptimizerHook.after_train_iter" in info["plan"]


def test_run_info_takes_more_facts(make_trainer: Callable[..., Trainer]) -> None:
    """`info=` adds to the facts, and may correct them."""
    (info,) = run_infos(make_trainer(hooks=[RuntimeInfoHook({"seed": "7", "model": "tiny"})]))

    assert (info["seed"], info["model"]) == ("7", "tiny")


def test_model_with_lazy_parameters_is_described(make_trainer: Callable[..., Trainer]) -> None:
    """Parameters that have no size before the first batch do not stop the run."""
    lazy = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LazyLinear(1))

    (info,) = run_infos(make_trainer(model=lazy))

    assert info["parameters"] == "12 and 2 of unknown size"


def test_scalars_reach_the_writers(
    make_trainer: Callable[..., Trainer], record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> None:
    """What a step returns is in the `scalars_logged` of its interval."""
    trainer = make_trainer(train_step=step_with(share=0.25))
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["share"] for event in seen] == [0.25]
