"""Keep a training of pytorch-ignite, and give it ordered handlers, background writers and costs.

pip install 'torch-eventloop[ignite]' && python examples/ignite_bridge.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch.utils.data import DataLoader, TensorDataset

from eventloop.bridges.ignite import attach
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter


def main(work_dir: str) -> None:
    """Train a small model, with an average of its weights and a JSONL file."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
    model = torch.nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader))

    bus = attach(
        trainer,
        model=model,
        optimizer=optimizer,
        evaluators={"val": evaluator},
        work_dir=work_dir,
        hooks=[EMAHook()],
        writers=[JSONLWriter()],
    )

    @bus.on("after_train_iter", priority=70, every=16)
    def show(ours: Any, event: Any) -> None:
        print(event.iter, ours.outputs["loss"])

    @bus.on("after_val_epoch")
    async def report(event: Any) -> None:
        print(event.metrics)

    trainer.run(loader, max_epochs=2)


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="ignite_bridge"))
