"""The port of ddpm_original.py: `EMAHook` keeps the average."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.events import BeforeTrain
from eventloop.hooks import EMAHook

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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def noise_loss(trainer: Trainer, batch: list[Tensor]) -> Tensor:
    """Return the error of the noise, at a random time for each point."""
    (point,) = batch
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


ema = EMAHook(momentum=0.02)
trainer = Trainer(
    model,
    optimizer=optimizer,
    train_step=noise_loss,
    train_loader=loader,
    max_epochs=8,
    hooks=[ema],
    work_dir="runs/ddpm",
)


@trainer.bus.on("before_train", priority="LOW", when=lambda event: event.iter == 0)
def begin_with_initial_weights(trainer: Trainer, event: BeforeTrain) -> None:
    """Make the average begin with the untrained weights, and not with those after the first step."""
    ema.ema_model.update_parameters(model)


trainer.train()
average = ema.ema_model.module
torch.save([model.state_dict(), average.state_dict(), draw(average, 16)], sys.argv[1])
