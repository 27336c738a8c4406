"""Use callbacks of Transformers in this engine's trainer.

pip install 'torch-eventloop[demo,transformers]' && python examples/transformers_callbacks.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.cli.demo import load_digits
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter


def main(work_dir: str) -> None:
    """Train until Transformers' EarlyStoppingCallback sees no better accuracy twice, and load the best weights."""
    torch.manual_seed(0)
    digits, held_out = load_digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(digits, batch_size=32, shuffle=True),
        val_loader=DataLoader(held_out, batch_size=360),
        max_epochs=50,
        work_dir=work_dir,
        writers=[JSONLWriter()],
        hooks=[
            CheckpointHook(
                interval=1, save_best="accuracy"
            ),  # its metric is the one that the callback watches
            Foreign(EarlyStoppingCallback(early_stopping_patience=2)),
            Foreign(PrinterCallback()),
        ],
    )
    print(trainer.bus)
    trainer.train()
    print(trainer.epoch, trainer.stop_reason)
    trainer.load_checkpoint("best")
    print(trainer.val())


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="transformers_callbacks"))
