"""A training whose weights show every random number and every command, and what steers it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from eventloop import Bus, SkipIteration, Trainer
from eventloop.commands.messages import Applied, Command, new_id
from eventloop.commands.record import NAME, read_record
from eventloop.hooks import CheckpointHook
from tests.support.trainers import DEADLINE, samples

PER_EPOCH, EPOCHS = 4, 3
ITERS = PER_EPOCH * EPOCHS

Plan = Mapping[int, Sequence[tuple[str, ...]]]
"""Commands, as their words, by the number of completed iterations."""
PLAN: Plan = {
    2: [("note", "hello")],
    3: [("shake", "0.1"), ("validate",)],
    4: [("shake", "0.2")],  # after the last iteration of an epoch
    6: [("checkpoint",), ("shake", "0.3")],
    11: [("shake", "0.4"), ("note", "bye")],
}


class Noise(nn.Module):
    """Noise from a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add noise, in evaluations too."""
        return x + 0.01 * torch.randn(x.shape, generator=self.generator)


def noisy_model() -> nn.Module:
    """Return a model with running averages, dropout, and noise of its own."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # the global generator, which a validation must restore
    return nn.Sequential(
        nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), Noise(), nn.Linear(8, 3)
    )


def add_shake(trainer: Trainer) -> None:
    """Add a command that changes the weights, by numbers of the global generator."""

    @trainer.command
    def shake(trainer: Trainer, amount: float) -> float:
        """Add noise to the weights."""
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=amount)
        return amount


def build(folder: Path, *, by_epoch: bool = True, skips: Iterable[int] = (), **options: Any) -> Trainer:
    """Return a trainer of three epochs of four batches, which saves every five iterations.

    Args:
        folder: its directory.
        by_epoch: whether it counts epochs.
        skips: the batches of each epoch that a handler skips, by index.
    """
    model = options.pop("model", None) or noisy_model()
    length: dict[str, Any] = {"max_epochs": EPOCHS} if by_epoch else {"max_iters": ITERS}
    if "max_iters" in options:
        length = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments: dict[str, Any] = {
        "optimizer": optimizer,
        "loss_fn": F.cross_entropy,
        "train_loader": DataLoader(samples(PER_EPOCH * 4), batch_size=4, shuffle=True),
        "val_loader": DataLoader(samples(8), batch_size=4, shuffle=True, generator=torch.Generator()),
        "val_interval": 1 if by_epoch else PER_EPOCH,
        "hooks": [CheckpointHook(interval=5, by_epoch=False)],
        "writers": [],
        "bus": Bus(drain_timeout=DEADLINE),
        "default_hooks": {"garbage_collection": None},
        "work_dir": folder,
        **length,
        **options,
    }
    trainer = Trainer(model, **arguments)
    add_shake(trainer)
    skipped = {*skips}

    def skip(event: Any) -> None:
        if event.batch_idx in skipped:
            raise SkipIteration

    if skipped:
        trainer.bus.subscribe(skip, "before_train_iter")
    return trainer


def command(name: str, *words: str, **arguments: Any) -> Command:
    """Return a command from outside."""
    return Command(id=new_id(), command=name, words=[*words], arguments=arguments, source="anna@login1")


def steer(trainer: Trainer, plan: Plan) -> None:
    """Give commands in the iterations of a plan, as the background does that has read the inbox."""

    def give(event: Any) -> None:
        for words in plan.get(event.iter + 1, ()):
            trainer.stops.commands.append(command(*words))

    trainer.bus.subscribe(give, "after_train_iter", name="steer")


def collected(trainer: Trainer, *events: str) -> list[Any]:
    """Keep the events named, as they happen."""
    seen: list[Any] = []
    trainer.bus.subscribe(seen.append, *events, priority="LOWEST")
    return seen


def weights(trainer: Trainer) -> str:
    """Return the SHA-256 of the model's state, running averages included."""
    state = trainer.model.state_dict().values()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state)).hexdigest()


def applied(commands: Iterable[Applied]) -> list[tuple[int, str]]:
    """Return when which command was applied."""
    return [(each.iter, each.command) for each in commands]


def recorded(folder: Path) -> list[tuple[int, str]]:
    """Return what the record of a directory says."""
    return applied(read_record(folder / NAME))


def planned(plan: Plan) -> list[tuple[int, str]]:
    """Return when which command of a plan is due."""
    return [(at, words[0]) for at, each in plan.items() for words in each]
