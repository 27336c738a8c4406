"""Validate checkpoints in another process while the training goes on: python examples/sidecar_evaluator.py [DIRECTORY]

The function `build` makes the trainer, for the training and for the evaluator. A follower on another machine, in
place of the child process of `AsyncValidationHook`:

    eventloop evaluate DIRECTORY examples/sidecar_evaluator.py:build --follow --device cuda:0
"""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.events import CheckpointEvaluated
from eventloop.hooks import AsyncValidationHook, CheckpointHook, EarlyStoppingHook
from eventloop.writers import JSONLWriter


def rings(count: int, seed: int) -> TensorDataset:
    """Points of a plane; the class is the ring around the origin in which a point is."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points.norm(dim=1).long().clamp(max=2))


def build(work_dir: str = "runs/rings") -> Trainer:
    """Build the trainer; nothing in here trains."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    return Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(rings(2000, 1), batch_size=32, shuffle=True),
        val_loader=DataLoader(rings(1000, 2), batch_size=250),
        max_epochs=8,
        hooks=[
            CheckpointHook(interval=1, max_keep_ckpts=2, save_best="accuracy"),
            EarlyStoppingHook("accuracy", patience=4),
            AsyncValidationHook(build=f"{__file__}:build"),
        ],
        writers=[JSONLWriter()],
        work_dir=work_dir,
    )


if __name__ == "__main__":
    trainer = build(*sys.argv[1:])

    @trainer.bus.on("checkpoint_evaluated")
    def show(trainer: Trainer, event: CheckpointEvaluated) -> None:
        print(
            f"epoch {event.epoch}: accuracy {event.metrics['accuracy']:.3f}, known in epoch {trainer.epoch}"
        )

    trainer.train()
