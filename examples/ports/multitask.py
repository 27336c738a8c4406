"""The port of multitask_original.py: the weights of the losses are in the model of the trainer."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))


class DigitAndInk(Dataset[tuple[Tensor, tuple[Tensor, Tensor]]]):
    """An image, and as its target the digit and the mean of its pixels."""

    def __len__(self) -> int:
        return len(train)

    def __getitem__(self, index: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        image, digit = train[index]
        return image, (digit, image.mean())


class TwoHeads(nn.Module):
    """Return the logits of the digits, and the ink."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(image)
        return self.digit(hidden), self.ink(hidden)[:, 0]


class WeightedLoss(nn.Module):
    """The sum of both losses, each times exp(-s), plus s, where s is learnt for each (Kendall et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        losses = torch.stack([F.cross_entropy(outputs[0], target[0]), F.mse_loss(outputs[1], target[1])])
        weighted: Tensor = (losses * torch.exp(-self.log_variances) + self.log_variances).sum()
        return weighted


model, criterion = TwoHeads(), WeightedLoss()
optimizer = torch.optim.Adam(
    [
        {"params": model.parameters(), "lr": 3e-3},
        {"params": criterion.parameters(), "lr": 3e-2},
    ]
)
loader = DataLoader(DigitAndInk(), batch_size=64, shuffle=True)


def train_step(trainer: Trainer, batch: list[Any]) -> Tensor:
    """Return the weighted loss of a batch."""
    image, target = batch
    loss: Tensor = criterion(model(image), target)
    return loss


Trainer(
    nn.ModuleDict({"network": model, "criterion": criterion}),
    optimizer=optimizer,
    train_step=train_step,
    train_loader=loader,
    max_epochs=3,
    work_dir="runs/multitask",
).train()
torch.save([model.state_dict(), criterion.state_dict()], sys.argv[1])
