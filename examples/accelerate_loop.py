"""Keep a loop with Hugging Face Accelerate, and give it hooks, background writers and costs.

    pip install 'torch-eventloop[demo]' accelerate && python examples/accelerate_loop.py

For several GPUs start it with `accelerate launch` or `torchrun`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from eventloop.bridges import DrivenTrainer
from eventloop.cli.demo import load_digits
from eventloop.hooks import EarlyStoppingHook, EMAHook
from eventloop.writers import JSONLWriter


def accuracy(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Any]) -> float:
    """Return the share of images whose digit the model finds."""
    model.eval()
    right = []
    with torch.inference_mode():
        for images, target in loader:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == target))
    model.train()
    return torch.cat(right).float().mean().item()


def main(work_dir: str | None = None) -> None:
    """Train until the accuracy of the average of the weights no longer grows, with a JSONL file."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    digits, held_out = load_digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model, optimizer, loader, val_loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        DataLoader(digits, batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=64),
    )
    trainer = DrivenTrainer(
        model,
        optimizer=optimizer,
        max_epochs=20,
        work_dir=work_dir,
        writers=[JSONLWriter()],
        hooks=[EMAHook(momentum=0.02), EarlyStoppingHook("accuracy", patience=2)],
    )

    for epoch in trainer.epochs():
        for images, target in trainer.batches(loader):
            loss = F.cross_entropy(model(images), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            trainer.outputs = {"loss": loss}
        trainer.begin_val()  # from here to its end the model has the average of its weights
        found = accuracy(accelerator, model, val_loader)
        trainer.end_val({"accuracy": found})
        accelerator.print(f"epoch {epoch + 1}: accuracy {found:.3f}")
    accelerator.print(trainer.stop_reason)
    accelerator.print(trainer.summary())


if __name__ == "__main__":
    main(*sys.argv[1:2])
