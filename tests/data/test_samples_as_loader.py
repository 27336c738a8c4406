"""Samples given where a loader is expected: each of them would be taken as a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from eventloop import Trainer
from eventloop.hooks import PreciseBN
from tests.support.trainers import MakeTrainer, batches, samples

EXPECTED = "must be a DataLoader or another iterable of batches, got the "
INPUTS = samples(8).tensors[0]


class Batches(IterableDataset[torch.Tensor]):
    """A stream that gives whole batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(INPUTS.split(4))


@pytest.mark.parametrize(
    ("loader", "got"),
    [
        (torch.zeros(8, 4), r"Tensor of shape \(8, 4\), each of whose items .* give DataLoader\(tensor, "),
        (np.zeros((8, 4)), r"ndarray of shape \(8, 4\), each of whose items .* give DataLoader\(array, "),
        (samples(8), r"data set TensorDataset, each of whose items .* give DataLoader\(dataset, "),
        (Subset(samples(8), [0, 1]), r"data set Subset, each of whose items .* give DataLoader\(dataset, "),
        (torch.zeros(0, 4), r"Tensor of shape \(0, 4\), "),
    ],
)
def test_samples_are_no_batches(make_trainer: MakeTrainer, loader: Any, got: str) -> None:
    """The error says what came, and with which loader its rows become batches."""
    with pytest.raises(TypeError, match=f"^loader {EXPECTED}{got}"):
        make_trainer().predict(loader)


@pytest.mark.parametrize("argument", ["train_loader", "val_loader", "test_loader"])
def test_the_trainer_takes_no_samples(make_trainer: MakeTrainer, argument: str) -> None:
    """Each loader of the constructor is checked, and named."""
    with pytest.raises(TypeError, match=f"^{argument} {EXPECTED}data set TensorDataset"):
        make_trainer(**{argument: samples(8)})


def test_a_named_loader_takes_no_samples(make_trainer: MakeTrainer) -> None:
    """The name is in the message."""
    with pytest.raises(TypeError, match=rf"^val_loader\['noisy'\] {EXPECTED}data set TensorDataset"):
        make_trainer(val_loader={"clean": batches(2), "noisy": samples(8)})


def test_several_loaders_have_names(make_trainer: MakeTrainer) -> None:
    """A list of loaders, as Lightning takes it, would be a loader whose batches are loaders."""
    with pytest.raises(
        TypeError, match=r"^val_loader must be .* several by name, .*dict.*; got a list of loaders"
    ):
        make_trainer(val_loader=[DataLoader(samples(8)), DataLoader(samples(4))])


def test_a_hand_written_loop_takes_no_samples(make_trainer: MakeTrainer) -> None:
    """The call of `batches` raises, before an epoch begins."""
    trainer = make_trainer()

    def loop(trainer: Trainer) -> None:
        for _ in trainer.epochs():
            trainer.batches(samples(8))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=f"^loader {EXPECTED}data set TensorDataset"):
        loop(trainer)


def test_precise_statistics_take_no_samples() -> None:
    """The hook's own loader is checked like the trainer's."""
    with pytest.raises(TypeError, match=f"^PreciseBN: data_loader {EXPECTED}Tensor"):
        PreciseBN(data_loader=INPUTS)


@pytest.mark.parametrize("loader", [DataLoader(INPUTS, batch_size=4), Batches(), INPUTS.split(4)])  # type: ignore[arg-type]
def test_batches_of_the_samples_are_taken(make_trainer: MakeTrainer, loader: Any) -> None:
    """The loader that the message names, a stream of batches and a tuple of batches give the same outputs."""
    trainer = make_trainer()

    with torch.no_grad():
        expected = trainer.model.eval()(INPUTS)

    torch.testing.assert_close(trainer.predict(loader), expected)
