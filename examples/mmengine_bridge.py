"""Keep a training of MMEngine, and give it ordered handlers, background writers and costs.

pip install 'torch-eventloop[mmengine]' && python examples/mmengine_bridge.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader, TensorDataset

from eventloop.bridges.mmengine import EventLoopHook
from eventloop.writers import JSONLWriter


class Model(BaseModel):  # type: ignore[misc]
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor, target: torch.Tensor, mode: str = "tensor") -> Any:
        """Return the loss in training."""
        scores = self.layer(inputs)
        return {"loss": F.cross_entropy(scores, target)} if mode == "loss" else scores


def main(work_dir: str) -> None:
    """Train a small model with a JSONL file."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    bridge = EventLoopHook(writers=[JSONLWriter()])

    @bridge.bus.on("after_train_iter", priority=70, every=16)
    def show(trainer: Any, event: Any) -> None:
        print(event.iter, trainer.outputs["loss"])

    Runner(
        model=Model(),
        work_dir=work_dir,
        custom_hooks=[bridge],
        train_cfg={"by_epoch": True, "max_epochs": 2},
        train_dataloader=DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True),
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
    ).train()


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="mmengine_bridge"))
