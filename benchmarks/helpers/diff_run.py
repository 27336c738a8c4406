"""Train once, as a run to compare: python -m benchmarks.helpers.diff_run DIRECTORY [--forward US] [--handler US].

Two CPU threads at most, and a default trainer. The options plant a cost: microseconds of busy waiting in every forward
pass, or in a handler of every iteration.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.writers import JSONLWriter

WIDTH = 448
"""Of the perceptron: an iteration takes some 2 ms."""


def wait(microseconds: float) -> None:
    """Keep the processor busy for a time."""
    until = perf_counter() + microseconds / 1e6
    while perf_counter() < until:
        pass


class Planted(torch.nn.Module):
    """A perceptron whose forward pass takes longer than it needs."""

    def __init__(self, microseconds: float) -> None:
        super().__init__()
        sizes = [64, WIDTH, WIDTH, 10]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.layers = torch.nn.ModuleList(layers)
        self._microseconds = microseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (N, 64) and return (N, 10)."""
        wait(self._microseconds)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        found: torch.Tensor = self.layers[-1](x)
        return found


def main() -> None:
    """Train, and leave the directory of a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--forward", type=float, default=0.0, metavar="US")
    parser.add_argument("--handler", type=float, default=0.0, metavar="US")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(64 * 50, 64), torch.randint(0, 10, (64 * 50,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)
    model = Planted(options.forward)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss_fn=F.cross_entropy,
        train_loader=loader,
        max_iters=options.iterations,
        work_dir=options.directory,
        writers=[JSONLWriter()],
        default_hooks={"checkpoint": None},
    )

    @trainer.bus.on("after_train_iter", name="planted")
    def planted(event: object) -> None:
        wait(options.handler)

    trainer.train()


if __name__ == "__main__":
    main()
