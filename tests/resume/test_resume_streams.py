"""What a loader without indices draws as its pass goes: it is read again, and where that cannot find it, the log says so."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.resume.test_resume_samplers import BATCH, COUNT, PER_EPOCH, Numbered, of_torch, whole_and_parts
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


class Combined:
    """Loaders one after the other, of which each draws its order when its turn comes."""

    def __iter__(self) -> Iterator[Any]:
        yield from chain.from_iterable(DataLoader(Numbered(), BATCH, shuffle=True) for _ in range(2))


class Sub(DataLoader[Any]):
    """A loader that may do anything."""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has of orders that cannot be found again."""
    return [line for line in caplog.messages if line.startswith("the samples from here on may differ")]


@pytest.mark.parametrize(
    ("loader", "stop"),
    [(lambda: DataLoader(Buffered(of_torch), BATCH), 3), (Combined, PER_EPOCH + 2)],
    ids=["stream", "combined"],
)
def test_an_order_that_training_has_a_part_in_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: Any, stop: int
) -> None:
    """Reading draws between the masks of a dropout: reading alone comes to another order."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [stop])

    assert parts != whole
    (line,) = told(caplog)
    assert (
        "reading draws from the global generator of torch during the pass, and so does the training" in line
    )


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Buffered(random.randrange), BATCH),
        lambda: Sub(Numbered(), BATCH, shuffle=True),
    ],
    ids=["draws alone", "has indices"],
)
def test_an_order_that_is_found_again_is_not_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: Any
) -> None:
    """Where nobody else draws from the stream's generator, or the order was drawn when the pass was opened."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [3, PER_EPOCH + 2])

    assert parts == whole
    assert told(caplog) == []
