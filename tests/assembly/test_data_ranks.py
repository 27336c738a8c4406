"""`Trainer(data_ranks=)` is checked when the trainer is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.trainers import MakeTrainer


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (2.0, TypeError, "data_ranks must be an int, got 2.0"),
        (True, TypeError, "data_ranks must be an int, got True"),
        (0, ValueError, "data_ranks must be at least 1, got 0"),
        (2, ValueError, "data_ranks must divide the number of ranks, 1, got 2"),
    ],
)
def test_other_numbers_are_refused(
    make_trainer: MakeTrainer, given: Any, error: type[Exception], message: str
) -> None:
    """It is an int from 1 to the number of ranks."""
    with pytest.raises(error, match=message):
        make_trainer(data_ranks=given)


def test_a_sampler_for_more_ranks_than_there_are(make_trainer: MakeTrainer) -> None:
    """One process that reads the share of one of two has data of one rank."""
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))

    trainer = make_trainer(train_loader=DataLoader(data, sampler=DistributedSampler(data, 2, 0)))

    assert trainer.data_ranks == 1
