"""Keep a training of Transformers, and give it ordered handlers, background writers, an average and costs.

pip install 'torch-eventloop[transformers]' && python examples/transformers_bridge.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from eventloop.bridges.transformers import EventLoopCallback
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter


class Classifier(torch.nn.Module):
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.linear(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main(work_dir: str) -> None:
    """Train a small model with a JSONL file; its validations use the average of the weights."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data: Any = [{"inputs": row, "labels": int(row.sum() > 0)} for row in x]
    bridge = EventLoopCallback(hooks=[EMAHook(momentum=0.1)], writers=[JSONLWriter()])

    @bridge.bus.on("after_train_iter", priority=70, every=16)
    def show(trainer: Any, event: Any) -> None:
        print(event.iter, trainer.native.state.epoch)

    arguments = TrainingArguments(
        work_dir,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=0.1,
        logging_steps=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=data, eval_dataset=data, callbacks=[bridge])
    trainer.train()
    print(bridge.trainer.summary())


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="transformers_bridge"))
