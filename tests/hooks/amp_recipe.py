"""What the tests of mixed precision share: PyTorch's own recipe to compare with, and gradients that overflow."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from eventloop import Trainer
from eventloop.hooks import AmpOptimizerHook as Amp
from eventloop.hooks import Hook


class Overflow(Hook):
    """Makes the gradients of some iterations infinite, after backward."""

    def __init__(self, *iters: int) -> None:
        self._iters = iters

    def after_backward(self, trainer: Trainer, event: Any) -> None:
        """Of the last parameter alone."""
        if event.iter in self._iters:
            *_, last = trainer.model.parameters()
            assert last.grad is not None
            last.grad.fill_(torch.inf)


def by_hand(
    batches: list[Any], dtype: torch.dtype, windows: list[int], max_norm: float | None = None, **scaler: Any
) -> torch.nn.Module:
    """PyTorch's own recipe, for the model of `make_trainer`; `windows` are the iterations of each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scale = torch.amp.GradScaler("cpu", **scaler) if scaler else torch.amp.GradScaler("cpu", enabled=False)
    left = iter(batches)
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            inputs, target = next(left)
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(model(inputs), target)
            scale.scale(loss / window).backward()
        scale.unscale_(optimizer)
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        scale.step(optimizer)
        scale.update()
    return model


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """To the last bit."""
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def scale_of(hook: Amp) -> float:
    """What losses are multiplied with."""
    scale: float = hook.state_dict()["scaler"]["scale"]
    return scale


GROWING: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3}
