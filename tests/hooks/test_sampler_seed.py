"""DistSamplerSeedHook: a distributed sampler shuffles differently in each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.hooks.conftest import Make


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The numbers 0 to 7, as inputs and targets."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), float(index)), torch.full((1,), float(index))


def sampled() -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    """A loader with a distributed sampler of a single process."""
    data = Numbers()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
    return DataLoader(data, batch_size=2, sampler=sampler), sampler


def order_of(epoch: int) -> list[int]:
    """The order of one epoch, from the sampler itself."""
    _, sampler = sampled()
    sampler.set_epoch(epoch)
    return [*sampler]


class Watch:
    """A train step that writes down the samples it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, trainer: Trainer, batch: Any) -> torch.Tensor:
        inputs, target = batch
        self.seen += [int(number) for number in target.flatten()]
        loss: torch.Tensor = (trainer.model(inputs) * 0.0).mean()
        return loss


@pytest.mark.parametrize("unit", [{"max_epochs": 3}, {"max_iters": 12}], ids=["epochs", "iters"])
def test_each_epoch_is_shuffled_by_its_number(make_trainer: Make, unit: dict[str, int]) -> None:
    """Epoch 0, 1, 2 have the sampler's orders of 0, 1, 2; in a run of iterations the passes over the loader have."""
    watch = Watch()

    make_trainer(train_loader=sampled()[0], train_step=watch, **unit).train()

    assert watch.seen == order_of(0) + order_of(1) + order_of(2)


def test_resumed_pass_has_the_order_it_began_with(make_trainer: Make) -> None:
    """A run resumed in mid-pass of an iteration-based run sees the samples the pass had left."""
    hook = CheckpointHook(interval=6, save_last=False)
    first, second = Watch(), Watch()
    make_trainer(train_loader=sampled()[0], train_step=first, max_iters=7, hooks=[hook]).train()

    trainer = make_trainer(train_loader=sampled()[0], train_step=second, max_iters=12)
    trainer.resume()
    trainer.train()

    assert second.seen == (order_of(0) + order_of(1) + order_of(2))[12:]


def test_sampler_inside_a_batch_sampler_is_seeded(make_trainer: Make) -> None:
    """A loader built with `batch_sampler=` has its sampler one level down."""
    _, sampler = sampled()
    loader: DataLoader[Any] = DataLoader(
        Numbers(), batch_sampler=BatchSampler(sampler, batch_size=2, drop_last=False)
    )
    watch = Watch()

    make_trainer(train_loader=loader, train_step=watch, max_epochs=2).train()

    assert watch.seen == order_of(0) + order_of(1)


def test_loader_of_a_hand_written_loop_is_seeded(make_trainer: Make) -> None:
    """What is given to `trainer.batches` is the train loader."""
    loader, _ = sampled()
    watch = Watch()
    trainer = make_trainer(max_epochs=2)

    for _ in trainer.epochs():
        for batch in trainer.batches(loader):
            trainer.outputs = {"loss": watch(trainer, batch)}

    assert watch.seen == order_of(0) + order_of(1)


def test_without_the_hook_every_epoch_is_the_same(make_trainer: Make) -> None:
    """It is the hook that seeds: without it the sampler keeps its epoch."""
    watch = Watch()
    options = {"default_hooks": {"sampler_seed": None}}

    make_trainer(train_loader=sampled()[0], train_step=watch, max_epochs=2, **options).train()

    assert watch.seen == order_of(0) * 2
