"""The port of mixup_original.py: `unit="update"` counts steps of the optimizer, as the schedule does."""

import math
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Beta
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
EPOCHS, ACCUMULATED, WARMUP = 4, 4, 10
images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))
loader = DataLoader(train, batch_size=32, shuffle=True)
UPDATES = EPOCHS * math.ceil(len(loader) / ACCUMULATED)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(256, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)


def factor(update: int) -> float:
    """Return the part of the rate: a line up, then half a cosine down."""
    if update < WARMUP:
        return (update + 1) / WARMUP
    return (1 + math.cos(math.pi * (update - WARMUP) / (UPDATES - WARMUP))) / 2


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def mixup_loss(trainer: Trainer, batch: list[Tensor]) -> Tensor:
    """Return the loss of the images, each mixed with another one."""
    image, label = batch
    share, other = Beta(0.4, 0.4).sample(), torch.randperm(len(image))
    logits = model(share * image + (1 - share) * image[other])
    losses = [F.cross_entropy(logits, each, label_smoothing=0.1) for each in (label, label[other])]
    return share * losses[0] + (1 - share) * losses[1]


Trainer(
    model,
    optimizer=optimizer,
    schedulers=[schedule],
    train_step=mixup_loss,
    train_loader=loader,
    max_epochs=EPOCHS,
    unit="update",
    work_dir="runs/mixup",
    default_hooks={"optimizer": {"cumulative_iters": ACCUMULATED, "grad_clip": {"max_norm": 1.0}}},
).train()
torch.save(model.state_dict(), sys.argv[1])
