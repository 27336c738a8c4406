"""Train a diffusion model of a spiral, with an average of the weights, and draw points from the average."""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
STEPS = 50
beta = torch.linspace(1e-3, 0.2, STEPS)
signal = (1 - beta).cumprod(0)
angle = 4 + 8 * torch.rand(1024)
points = torch.stack([angle.cos(), angle.sin()], 1) * angle[:, None] / 8
loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True)


class Denoiser(nn.Module):
    """Tell the noise in a point at a time of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, 32)
        self.layers = nn.Sequential(
            nn.Linear(34, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )

    def forward(self, point: Tensor, time: Tensor) -> Tensor:
        prediction: Tensor = self.layers(torch.cat([point, self.time(time)], 1))
        return prediction


model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def noise_loss(point: Tensor) -> Tensor:
    """Return the error of the noise, at a random time for each point."""
    time, noise = torch.randint(STEPS, (len(point),)), torch.randn_like(point)
    kept = signal[time][:, None]
    return nn.functional.mse_loss(model(kept.sqrt() * point + (1 - kept).sqrt() * noise, time), noise)


@torch.no_grad()
def draw(network: nn.Module, count: int) -> Tensor:
    """Turn noise into points, step by step."""
    point = torch.randn(count, 2)
    for t in reversed(range(STEPS)):
        noise = network(point, torch.full((count,), t))
        point = (point - beta[t] / (1 - signal[t]).sqrt() * noise) / (1 - beta[t]).sqrt()
        point += beta[t].sqrt() * torch.randn_like(point) * (t > 0)
    return point


for epoch in range(8):
    for (point,) in loader:
        loss = noise_loss(point)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for ours, new in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(new, 0.02)
    print(epoch, loss.item())

torch.save([model.state_dict(), average.state_dict(), draw(average, 16)], sys.argv[1])
