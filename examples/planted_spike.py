"""Survive a stretch of broken data: `RollbackHook` goes back to a checkpoint before it, and skips the batches.

    pip install 'torch-eventloop[demo]' && python examples/planted_spike.py

Some images in the middle have values ten thousand times too large, as after an error of a decoder. Without the hook
the weights are lost there.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.cli.demo import load_digits
from eventloop.hooks import CheckpointHook, RollbackHook
from eventloop.writers import ConsoleWriter, JSONLWriter

BROKEN = slice(4000, 4160)
"""The images with wrong values, those of ten batches."""


def main(work_dir: str | None = None, hook: str = "yes") -> None:
    """Train on images of which some are broken, and print the accuracy on others."""
    torch.manual_seed(0)
    digits, held_out = load_digits()
    order = torch.randint(len(digits), (8000,))
    images = torch.stack([digits[int(index)][0] for index in order])
    target = torch.tensor([int(digits[int(index)][1]) for index in order])
    images[BROKEN] *= 1e4

    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(TensorDataset(images, target), batch_size=16),
        val_loader=DataLoader(held_out, batch_size=64),
        max_epochs=1,
        work_dir=work_dir,
        hooks=[CheckpointHook(20, by_epoch=False), *([RollbackHook()] if hook == "yes" else [])],
        writers=[JSONLWriter(), ConsoleWriter(interval=100)],
    )
    trainer.train()
    print(f"trained on {trainer.iter} of {len(images) // 16} batches: {trainer.val()['accuracy']:.0%} right")


if __name__ == "__main__":
    main(*sys.argv[1:3])
