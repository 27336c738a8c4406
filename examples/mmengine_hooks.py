"""Use hooks of MMEngine in this engine's trainer.

pip install 'torch-eventloop[demo,mmengine]' && python examples/mmengine_hooks.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from mmengine.hooks import EarlyStoppingHook, EMAHook
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.cli.demo import load_digits
from eventloop.events import AfterValEpoch
from eventloop.writers import JSONLWriter


def main(work_dir: str) -> None:
    """Validate MMEngine's average of the weights, until its EarlyStoppingHook sees no better accuracy twice."""
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
            Foreign(EMAHook(momentum=0.02)),
            Foreign(EarlyStoppingHook(monitor="accuracy", patience=2, min_delta=0.001)),
        ],
    )

    @trainer.bus.on("after_val_epoch")
    async def show(event: AfterValEpoch) -> None:
        print(f"epoch {event.epoch}: accuracy of the average {event.metrics['accuracy']:.3f}")

    print(trainer.bus)
    trainer.train()
    print(trainer.epoch, trainer.stop_reason)


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="mmengine_hooks"))
