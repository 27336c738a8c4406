"""The port of ppo_original.py: a loop of its own, in which an epoch is a rollout."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)


class ActorCritic(nn.Module):
    """Return the logits of the two pushes, left and right, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.actor(hidden), self.critic(hidden)[:, 0]


policy = ActorCritic()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)


@torch.no_grad()
def rollout(steps: int = 32, weights: int = 8) -> TensorDataset:
    """Push a few weights, and return states, actions, their log probabilities, returns and advantages."""
    state, seen = torch.randn(weights, 2), []
    for _ in range(steps):
        logits, value = policy(state)
        action = Categorical(logits=logits).sample()
        position, speed = state.T
        speed = 0.9 * speed + 0.2 * (2 * action - 1)
        seen.append((state, action, Categorical(logits=logits).log_prob(action), value, -position.abs()))
        state = torch.stack([position + 0.2 * speed, speed], 1)
    states, actions, log_probs, values, rewards = map(torch.stack, zip(*seen, strict=True))
    returns, later = torch.empty_like(rewards), policy(state)[1]
    for i in reversed(range(steps)):
        returns[i] = later = rewards[i] + 0.95 * later
    parts = states, actions, log_probs, returns, returns - values
    return TensorDataset(*(part.flatten(0, 1) for part in parts))


def ppo_loss(batch: list[Tensor]) -> Tensor:
    """Return the clipped loss of the policy, with those of the value and the entropy."""
    state, action, old, target, advantage = batch
    logits, value = policy(state)
    actions = Categorical(logits=logits)
    ratio = (actions.log_prob(action) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value_loss = F.mse_loss(value, target)
    loss: Tensor = 0.5 * value_loss - gain - 0.01 * actions.entropy().mean()
    return loss


trainer = Trainer(
    policy,
    optimizer=optimizer,
    max_epochs=10,
    work_dir="runs/ppo",
    default_hooks={"optimizer": {"grad_clip": {"max_norm": 0.5}}},
)
for _ in trainer.epochs():
    loader = DataLoader(rollout(), batch_size=64, shuffle=True)
    for batch in trainer.batches([batch for _ in range(4) for batch in loader]):
        trainer.outputs = {"loss": ppo_loss(batch)}

torch.save(policy.state_dict(), sys.argv[1])
