"""The port of wgan_gp_original.py: a `train_step` makes the steps of both optimizers."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
angles = torch.randint(8, (2048,)) * torch.pi / 4
points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(2048, 2)
loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def penalty(real: Tensor, fake: Tensor) -> Tensor:
    """Return how far the critic's slope between real and fake points is from 1."""
    mixed = real.lerp(fake, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    distance: Tensor = slope.norm(dim=1) - 1
    return distance.square().mean()


def train_step(trainer: Trainer, batch: list[Tensor]) -> dict[str, Tensor]:
    """Step the critic, and after each fifth batch the generator."""
    (real,) = batch
    fake = generator(torch.randn(len(real), 8)).detach()
    critic_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if trainer.batch_idx % 5 != 4:
        return {"loss": critic_loss.detach()}
    generator_loss = -critic(generator(torch.randn(len(real), 8))).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
    return {"loss": critic_loss.detach(), "generator_loss": generator_loss.detach()}


Trainer(
    nn.ModuleDict({"generator": generator, "critic": critic}),
    optimizer={"generator": generator_optimizer, "critic": critic_optimizer},
    train_step=train_step,
    train_loader=loader,
    max_epochs=2,
    default_hooks={"optimizer": None},
    work_dir="runs/wgan_gp",
).train()
torch.save([generator.state_dict(), critic.state_dict()], sys.argv[1])
