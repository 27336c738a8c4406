"""Paint one digit in the style of another: the pixels are optimized by L-BFGS, with a closure."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

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


for step in range(40):
    loss = optimizer.step(closure)
    if step % 10 == 9:
        print(step, loss.item())

torch.save(picture.state_dict(), sys.argv[1])
