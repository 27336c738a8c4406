"""The port of style_original.py: a `train_step` calls the optimizer with its closure."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))
content, style = digits[0][0][None], digits[1][0][None]
features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1))
features.requires_grad_(False)


def gram(image: Tensor) -> Tensor:
    """Return how much the channels of the features go together."""
    channels: Tensor = features(image)[0].flatten(1)
    return channels @ channels.T / channels.numel()


class Picture(nn.Module):
    """The picture that is painted."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.pixels = nn.Parameter(start.clone())


picture = Picture(content)
optimizer = torch.optim.LBFGS(picture.parameters(), max_iter=5, tolerance_grad=0, tolerance_change=0)


def closure() -> Tensor:
    """Return the loss, and set the gradients."""
    optimizer.zero_grad()
    loss = F.mse_loss(features(picture.pixels), features(content))
    loss += 1e3 * F.mse_loss(gram(picture.pixels), gram(style))
    loss.backward()
    return loss


def train_step(trainer: Trainer, batch: None) -> Tensor:
    """Make one step of L-BFGS, which calls the closure several times."""
    loss: Tensor = optimizer.step(closure)
    return loss


Trainer(
    picture,
    optimizer=optimizer,
    train_step=train_step,
    train_loader=[None],
    max_iters=40,
    default_hooks={"optimizer": None},
    work_dir="runs/style",
).train()
torch.save(picture.state_dict(), sys.argv[1])
