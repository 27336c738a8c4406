"""Use callbacks of Lightning in this engine's trainer.

pip install 'torch-eventloop[lightning]' && python examples/lightning_callbacks.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.writers import JSONLWriter


def main(work_dir: str) -> None:
    """Train until Lightning's EarlyStopping sees no more gain of 0.1."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
    model = torch.nn.Linear(16, 2)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=loader,
        val_loader=loader,
        max_epochs=20,
        work_dir=work_dir,
        writers=[JSONLWriter()],
        hooks=[Foreign(EarlyStopping("loss", patience=1, min_delta=0.1)), Foreign(LearningRateMonitor())],
    )
    print(trainer.bus)
    trainer.train()
    print(trainer.epoch, trainer.stop_reason)


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="lightning_callbacks"))
