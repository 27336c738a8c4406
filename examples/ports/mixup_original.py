"""Classify digits with mixup, smoothed labels, accumulated gradients, and a warm-up before a cosine."""

import math
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Beta
from torch.utils.data import DataLoader, TensorDataset

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


def mixup_loss(image: Tensor, label: Tensor) -> Tensor:
    """Return the loss of the images, each mixed with another one."""
    share, other = Beta(0.4, 0.4).sample(), torch.randperm(len(image))
    logits = model(share * image + (1 - share) * image[other])
    losses = [F.cross_entropy(logits, each, label_smoothing=0.1) for each in (label, label[other])]
    return share * losses[0] + (1 - share) * losses[1]


for epoch in range(EPOCHS):
    for i, (image, label) in enumerate(loader):
        opened = i - i % ACCUMULATED
        loss = mixup_loss(image, label) / min(ACCUMULATED, len(loader) - opened)
        loss.backward()
        if (i + 1) % ACCUMULATED == 0 or i + 1 == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    print(epoch, loss.item(), schedule.get_last_lr())

torch.save(model.state_dict(), sys.argv[1])
