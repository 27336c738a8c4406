"""The port of dqn_original.py: a loop of its own, whose batches are the steps in the corridor."""

import copy
import random
import sys
from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eventloop import Trainer

random.seed(0)
torch.manual_seed(0)
LENGTH = 8
Transition = tuple[int, int, float, int]
q_net = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))
target_net = copy.deepcopy(q_net).requires_grad_(False)
optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-2)
replay: deque[Transition] = deque(maxlen=500)


def one_hot(places: Sequence[int]) -> Tensor:
    """Return the inputs of the network."""
    return F.one_hot(torch.tensor(places), LENGTH).float()


def act(place: int, epsilon: float) -> int:
    """Go left (0) or right (1), at random with the probability epsilon."""
    return random.randrange(2) if random.random() < epsilon else int(q_net(one_hot([place])).argmax())


def td_loss() -> Tensor:
    """Return the error of the values of 32 remembered steps."""
    places, actions, rewards, followers = zip(*random.sample(replay, 32), strict=True)
    values = q_net(one_hot(places)).gather(1, torch.tensor(actions)[:, None])[:, 0]
    future = target_net(one_hot(followers)).amax(1)
    return F.smooth_l1_loss(values, torch.tensor(rewards) + 0.9 * future)


trainer = Trainer(
    nn.ModuleDict({"q": q_net, "target": target_net}),
    optimizer=optimizer,
    max_iters=150,
    default_hooks={"optimizer": None},
    work_dir="runs/dqn",
)
place = 0
for _ in trainer.epochs():
    for step in trainer.batches(range(150)):
        action = act(place, epsilon=max(0.1, 1 - step / 100))
        follower = max(0, min(LENGTH - 1, place + 2 * action - 1))
        reward = float(follower == LENGTH - 1)
        replay.append((place, action, reward, follower))
        place = 0 if reward else follower
        if len(replay) < 32:
            continue
        loss = td_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.outputs = {"loss": loss.detach()}
        if step % 20 == 0:
            target_net.load_state_dict(q_net.state_dict())

torch.save([q_net.state_dict(), target_net.state_dict()], sys.argv[1])
