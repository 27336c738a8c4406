"""RuntimeInfoHook: what the run is, and the numbers its steps return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.events import RunInfo
from eventloop.hooks import RuntimeInfoHook
from tests.hooks.conftest import Make


def step_with(**more: Any) -> Callable[[Trainer, Any], dict[str, Any]]:
    """A train step that returns the loss and these."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": F.mse_loss(trainer.model(batch[0]), batch[1]), **more}

    return step


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (value, 0.5)
            for value in (0.5, torch.tensor(0.5), torch.tensor([[0.5]]), np.float32(0.5), np.array([0.5]))
        ),
        (3, 3.0),
        (True, 1.0),
        (np.int64(3), 3.0),
        *((value, None) for value in (torch.zeros(2), np.zeros(3), "text", None, [1.0])),
    ],
)
def test_every_single_number_of_the_outputs_is_put(
    make_trainer: Make, value: Any, expected: float | None
) -> None:
    """Numbers, and tensors and arrays of one element, become metrics under their own name; logits and texts do not."""
    trainer = make_trainer(train_step=step_with(share=value))

    trainer.train()

    assert trainer.metrics.latest().get("share") == (None if expected is None else (expected, 3))


def test_outputs_of_a_hand_written_loop_may_be_any_mapping(
    make_trainer: Make, make_batches: Callable[[int], list[Any]]
) -> None:
    """The numbers of a mapping that is no dict are put as well, each for its iteration."""
    trainer = make_trainer()

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(2)):
            loss = F.mse_loss(trainer.model(inputs), target)
            trainer.outputs = MappingProxyType({"loss": loss, "number": float(trainer.iter)})

    assert trainer.metrics.history("number").values() == [(0.0, 0), (1.0, 1)]


def run_infos(trainer: Trainer) -> list[Mapping[str, str]]:
    """What a training announces about itself."""
    seen: list[Mapping[str, str]] = []

    def record(event: RunInfo) -> None:
        seen.append(event.info)

    trainer.bus.subscribe(record, "run_info", offload="thread")
    trainer.train()
    return seen


def test_run_info_is_announced_once_at_the_start(make_trainer: Make) -> None:
    """The facts of the run, the printed plan among them, go out with before_run."""
    (info,) = run_infos(make_trainer(max_epochs=3))

    assert info["model"] == "Linear"
    assert info["parameters"] == "3"
    assert info["optimizer"] == "SGD"
    assert info["schedulers"] == "none"
    assert info["device"] == "cpu"
    assert "OptimizerHook.after_train_iter" in info["plan"]


def test_run_info_takes_more_facts(make_trainer: Make) -> None:
    """`info=` adds to the facts, and may correct them. Parameters without a size before the first batch are said so."""
    lazy = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LazyLinear(1))
    facts = RuntimeInfoHook({"seed": "7", "model": "tiny"})

    (info,) = run_infos(make_trainer(model=lazy, hooks=[facts]))

    assert (info["seed"], info["model"]) == ("7", "tiny")
    assert info["parameters"] == "12 and 2 of unknown size"
