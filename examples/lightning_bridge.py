"""Keep a training of Lightning, and give it ordered handlers, background writers, an average and costs.

pip install 'torch-eventloop[lightning]' && python examples/lightning_bridge.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, Timer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from eventloop.bridges.lightning import EventLoopCallback
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter


class Classifier(LightningModule):  # type: ignore[misc]
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss, and log it."""
        loss = F.cross_entropy(self.linear(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("accuracy", (self.linear(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(work_dir: str) -> None:
    """Train a small model with a JSONL file; its validations use the average of the weights."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
    bridge = EventLoopCallback(hooks=[EMAHook(momentum=0.1)], writers=[JSONLWriter()], work_dir=work_dir)

    @bridge.bus.on("after_train_iter", priority=70, every=16)
    def show(trainer: Any, event: Any) -> None:
        print(event.iter, float(trainer.outputs["loss"]))

    @bridge.bus.on("after_val_epoch")
    async def report(event: Any) -> None:
        print(event.metrics)

    trainer = Trainer(
        max_epochs=2,
        callbacks=[bridge, Timer(), LearningRateMonitor()],
        logger=CSVLogger(work_dir),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=8,
        accelerator="cpu",
    )
    trainer.fit(Classifier(), loader, loader)
    print(bridge.trainer.summary())


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="lightning_bridge"))
