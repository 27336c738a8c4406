"""A small Lightning training, as its documentation writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from eventloop.bridges.lightning import EventLoopCallback
from eventloop.costs.records import RunCosts, read_costs
from tests.support.trainers import samples, tiny_model

MakeBridge = Callable[..., EventLoopCallback]


class Classifier(LightningModule):  # type: ignore[misc]
    """The tiny model, its loss and its accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = tiny_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(inputs)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.log("val_loss", F.cross_entropy(scores, batch[1]))
        self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(count: int = 4, size: int = 4) -> DataLoader[Any]:
    """A loader of `count` batches."""
    return DataLoader(samples(count * size), batch_size=size)


def make_trainer(root: Path, *callbacks: Any, **options: Any) -> Trainer:
    """A trainer of two epochs that prints nothing and has no logger."""
    seed_everything(3, verbose=False)
    arguments = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "default_root_dir": root,
        **options,
    }
    return Trainer(callbacks=list(callbacks), **arguments)


def fit(root: Path, *callbacks: Any, model: LightningModule | None = None, **options: Any) -> Trainer:
    """Train the classifier, and return the trainer."""
    path = options.pop("ckpt_path", None)
    validates = options.pop("validates", True)
    trainer = make_trainer(root, *callbacks, **options)
    trainer.fit(model or Classifier(), loader(), loader(2) if validates else None, ckpt_path=path)
    return trainer


def rows(bridge: EventLoopCallback, *events: str) -> list[str]:
    """Collect the names of events while they are emitted."""
    seen: list[str] = []
    bridge.bus.subscribe(lambda event: seen.append(type(event).__name__), *events, name="rows")
    return seen


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL writer's file."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def costs(path: Path) -> tuple[RunCosts, dict[str, int]]:
    """The cost record of a run, and the number of calls in each of its rows."""
    record = read_costs(path)
    return record, {row.name: row.calls for row in record.handlers}
