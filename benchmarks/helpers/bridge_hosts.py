"""Trainings of other engines that pause after some steps, without and with a bridge, for `benchmarks.bridges`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eventloop.costs.records import HandlerCost

Pause = Callable[[], object]


@dataclass
class Ride:
    """One training that never ends by itself.

    Attributes:
        host: the engine's name in `HOSTS`.
        step: seconds that a step computes, besides the host's own work.
        bridged: whether the bus rides along.
        work_dir: directory of its files.
        rows: the rows of the host's callbacks, which `record` returns once the training has begun.
        own: seconds of the host's callback by its own clock.
        calls: how often the callback was called.
    """

    host: str
    step: float
    bridged: bool
    work_dir: Path
    own: float = 0.0
    calls: int = 0
    costs: Callable[[], list[HandlerCost]] = field(default=list)

    def run(self, pause: Pause, block: int) -> None:
        """Train, and call `pause` before each `block` of steps."""
        HOSTS[self.host](self, pause, block)

    def compute(self) -> None:
        """Compute for the length of a step."""
        spin(self.step)

    def callback(self) -> None:
        """Be a callback of the host that takes time, and measures itself."""
        began = perf_counter()
        spin(2e-4)
        self.own += perf_counter() - began
        self.calls += 1


def spin(seconds: float) -> None:
    """Keep the processor busy."""
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


def endless(pause: Pause, block: int) -> Iterator[torch.Tensor]:
    """Batches, with a pause before each block of them."""
    batch = torch.ones(4, 8)
    while True:
        pause()
        for _ in range(block):
            yield batch


def lightning(ride: Ride, pause: Pause, block: int) -> None:
    """A `Trainer.fit` with a callback of Lightning's, without a logger, bars or checkpoints."""
    pl: Any = import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            ride.compute()
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Busy(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *arguments: Any) -> None:
            ride.callback()

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return endless(pause, block)

    callbacks = [Busy()]
    if ride.bridged:
        bridge = import_module("eventloop.bridges.lightning").EventLoopCallback(work_dir=ride.work_dir)
        callbacks.append(bridge)
        bridge.bus.subscribe(partial(_keep_costs, ride), "before_train", name="keep_costs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=ride.work_dir,
        ).fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))  # fmt: skip


def _keep_costs(ride: Ride, trainer: Any, event: Any) -> None:
    ride.costs = lambda: trainer.foreign_calls.costs(1.0)


HOSTS: dict[str, Callable[[Ride, Pause, int], None]] = {"lightning": lightning}
"""The training of each host; add a host here."""
