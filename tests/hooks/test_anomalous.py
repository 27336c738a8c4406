"""Parameters that the loss does not reach are named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.hooks import OptimizerHook
from eventloop.model.unused_parameters import unreached_parameters


class TwoHeads(torch.nn.Module):
    """One head is used, the other only after the first `unused_for` calls; a third layer is frozen."""

    def __init__(self, unused_for: int = 1000) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, bias=False)
        self.frozen = torch.nn.Linear(2, 1).requires_grad_(False)
        self.left = unused_for

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (N, 1)."""
        self.left -= 1
        scores: torch.Tensor = self.used(inputs)
        return scores if self.left >= 0 else scores + self.idle(inputs)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages at the level of an error."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_unreached_parameters_are_named_once(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """Name and shape of each trainable parameter that is not in the graph, in one message a run."""
    make_trainer(model=TwoHeads(), hooks=[OptimizerHook(detect_anomalous_params=True)]).train()

    assert errors(caplog) == [
        "these parameters are not in the graph of the loss, which does not train them:\n  idle.weight, (1, 2)"
    ]


def test_a_change_is_logged_again(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """Reached in between, and then no longer, they are named once more."""

    class Blink(TwoHeads):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.left = self.calls % 2
            return super().forward(inputs)

    make_trainer(model=Blink(0), hooks=[OptimizerHook(detect_anomalous_params=True)]).train()

    assert len(errors(caplog)) == 2  # of four iterations, every other one


def test_nothing_is_logged_when_all_are_reached(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen parameter is not missed."""
    make_trainer(model=TwoHeads(0), hooks=[OptimizerHook(detect_anomalous_params=True)]).train()

    assert errors(caplog) == []


def test_it_is_off_by_default(make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    """The graph is walked only where it was asked for."""
    make_trainer(model=TwoHeads()).train()

    assert errors(caplog) == []


def test_graph_deeper_than_the_recursion_limit() -> None:
    """A graph of many thousand nodes is walked to its end."""
    model = torch.nn.Linear(1, 1)
    loss = F.mse_loss(model(torch.ones(1, 1)), torch.ones(1, 1))
    for _ in range(5000):
        loss = loss + 1

    assert unreached_parameters(loss, model) == {}


def test_loss_that_is_a_parameter_itself() -> None:
    """It has no graph, and is reached."""

    class Scalar(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.other = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

    model = Scalar()

    assert unreached_parameters(model.value, model) == {"other": model.other}


def test_names_are_those_inside_a_wrapper(caplog: pytest.LogCaptureFixture) -> None:
    """As in a checkpoint, without the wrapper's prefix."""
    model: Any = TwoHeads()
    loss = model(torch.ones(1, 2)).sum()

    assert [*unreached_parameters(loss, torch.nn.DataParallel(model))] == ["idle.weight"]
