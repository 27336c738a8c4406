"""A monitored metric that the validation lacks is one kind of error, however early it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop.hooks import CheckpointHook, EarlyStoppingHook, ParamSchedulerHook
from tests.support.trainers import MakeTrainer, batches, tiny_model


def _plateau() -> dict[str, Any]:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedulers": [plateau],
        "hooks": [ParamSchedulerHook(monitor="accuracyy")],
    }


@pytest.mark.parametrize("sanity_val", [None, 1, 0])
@pytest.mark.parametrize(
    "options",
    [
        _plateau,
        lambda: {"hooks": [CheckpointHook(save_best="accuracyy", rule="greater")]},
        lambda: {"hooks": [EarlyStoppingHook(monitor="accuracyy", rule="greater")]},
    ],
    ids=["a scheduler", "save_best", "an early stop"],
)
def test_one_error(
    options: Callable[[], dict[str, Any]], sanity_val: int | None, make_trainer: MakeTrainer
) -> None:
    """It is a ValueError with a suggestion before the training, and after the first validation alike."""
    trainer = make_trainer(
        val_loader=batches(1),
        val_step=lambda trainer, batch: {"accuracy": 1.0},
        sanity_val=sanity_val,
        **options(),
    )

    with pytest.raises(
        ValueError, match=r"'accuracyy'.* validation does not report: did you mean 'accuracy'"
    ):
        trainer.train()
