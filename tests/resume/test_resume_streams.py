"""Loaders without indices are read again, which finds the order that reading alone decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.resume.test_resume_samplers import BATCH, COUNT, PER_EPOCH, Numbered, whole_and_parts
from tests.support.trainers import MakeTrainer


class Buffered(IterableDataset[Any]):
    """A stream that is shuffled by a buffer, as it goes."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for index in range(COUNT):
            buffer.append(index)
            if len(buffer) == 8:
                yield buffer.pop(self._draw(8)), torch.ones(2)
        while buffer:
            yield buffer.pop(self._draw(len(buffer))), torch.ones(2)


class Sub(DataLoader[Any]):
    """A loader that may do anything."""


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Buffered(random.randrange), BATCH),
        lambda: Sub(Numbered(), BATCH, shuffle=True),
    ],
    ids=["draws alone", "has indices"],
)
def test_an_order_is_found_by_reading_again(make_trainer: MakeTrainer, tmp_path: Path, loader: Any) -> None:
    """Where only the stream draws from its generator, or the order was drawn when the pass was opened."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [3, PER_EPOCH + 2])

    assert parts == whole
