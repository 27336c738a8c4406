"""A training by MMEngine that knows nothing of eventloop; prints a hash of the weights."""

import argparse
import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def forward(self, inputs: Any, labels: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layers(torch.stack(list(inputs))), torch.as_tensor(labels))}


class Watcher(Hook):
    def after_train_epoch(self, runner: Runner) -> None:
        if options.fail:
            raise ArithmeticError("the script's own error")


torch.manual_seed(0)
data = [(torch.randn(4), i % 3) for i in range(16)]
model = Model()
runner = Runner(
    model,
    "out",
    train_dataloader=DataLoader(data, batch_size=4),
    custom_hooks=[Watcher()],
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
    train_cfg={"by_epoch": True, "max_epochs": options.epochs},
    default_hooks={"checkpoint": None},
    randomness={"seed": 3},
    log_level="ERROR",
)
runner.train()
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(hashlib.sha256(weights).hexdigest())
