"""Test torchdata's loader and samplers, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.resume.test_resume_samplers import BATCH, COUNT, STOPS, Numbered, whole_and_parts
from tests.support.trainers import MakeTrainer

stateful = pytest.importorskip("torchdata.stateful_dataloader")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

LOADERS: dict[str, Callable[[], Any]] = {
    "global": lambda: stateful.StatefulDataLoader(Numbered(False), BATCH, shuffle=True),
    "workers": lambda: stateful.StatefulDataLoader(Numbered(False), BATCH, shuffle=True, num_workers=2),
    "sampler": lambda: DataLoader(
        Numbered(), BATCH, sampler=samplers.StatefulDistributedSampler(range(COUNT), 1, 0, drop_last=False)
    ),
}


@pytest.mark.parametrize("stops", [[stop] for stop in STOPS] + [STOPS], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_torchdata_finds_every_batch_again(
    make_trainer: MakeTrainer, tmp_path: Path, loader: str, stops: list[int]
) -> None:
    """With torchdata's loader or sampler a resumed run gets the batches of the uninterrupted run."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, LOADERS[loader], stops)

    assert parts == whole


@pytest.mark.parametrize("stops", [[1], [3], [3, 4, 6]], ids=str)
@pytest.mark.parametrize("loader", ["global", "workers"])
def test_with_a_limit(make_trainer: MakeTrainer, tmp_path: Path, loader: str, stops: list[int]) -> None:
    """So it does within a limited pass, and at its end."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, LOADERS[loader], stops, limit=3)

    assert parts == whole
