"""Your own loop, with every event, hook and writer: the trainer counts, announces and cleans up.

    python examples/hand_written_loop.py

The optimizer hook does zero_grad, backward and step after each body. To write those yourself, give the trainer
`default_hooks=dict(optimizer=None)`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.events import AfterTrainIter, AfterValEpoch
from eventloop.writers import JSONLWriter


def main(work_dir: str | None = None) -> None:
    """Train a line through noisy points."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 256).unsqueeze(1)
    y = 3 * x + 0.5 + 0.1 * torch.randn_like(x)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        loss_fn=F.mse_loss,
        val_loader=loader,
        max_epochs=5,
        writers=[JSONLWriter()],
        work_dir=work_dir,
    )

    @trainer.bus.on("after_train_iter", priority="LOW", every=8)
    def show(trainer: Trainer, event: AfterTrainIter) -> None:
        print(f"iteration {event.iter + 1}: loss {trainer.outputs['loss'].item():.4f}")

    @trainer.bus.on(AfterValEpoch)
    async def tell(event: AfterValEpoch) -> None:  # a coroutine: the loop does not wait for it
        print(f"epoch {event.epoch}: validation loss {event.metrics['loss']:.4f}")

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(loader):
            trainer.outputs = {"loss": F.mse_loss(model(inputs), target)}

    slope, offset = model.weight.item(), model.bias.item()
    print(f"learnt y = {slope:.1f} x + {offset:.1f}")
    print(trainer.summary())


if __name__ == "__main__":
    main(*sys.argv[1:2])
