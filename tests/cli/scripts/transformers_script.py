"""A training by Transformers that knows nothing of eventloop; prints a hash of the weights."""

import argparse
import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Watcher(TrainerCallback):
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if options.fail:
            raise ArithmeticError("the script's own error")


torch.manual_seed(0)
model = Model()
data = [{"inputs": torch.randn(4), "labels": i % 3} for i in range(16)]
arguments = TrainingArguments(
    "out",
    num_train_epochs=options.epochs,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    logging_steps=1,
    save_strategy="no",
    eval_strategy="epoch",
    seed=3,
)
Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Watcher()]).train()
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(hashlib.sha256(weights).hexdigest())
