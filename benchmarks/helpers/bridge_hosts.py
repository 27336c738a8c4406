"""Trainings of other engines that pause after some steps, without and with a bridge, for `benchmarks.bridges`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eventloop import Bus
from eventloop.costs.records import HandlerCost

Pause = Callable[[], object]
Clock = Callable[[], float]
ENDLESS = 10**9
"""Steps of a training that never ends by itself."""


@dataclass
class Ride:
    """One training that never ends by itself.

    Attributes:
        host: the engine's name in `HOSTS`.
        step: seconds that a step computes, besides the host's own work.
        bridged: whether the bus rides along.
        work_dir: directory of its files.
        clock: by which it computes for so long.
        costs: returns the rows of the host's callbacks, once the training has begun.
        own: seconds of the host's callback by its own clock.
        calls: how often the callback was called.
    """

    host: str
    step: float
    bridged: bool
    work_dir: Path
    clock: Clock = perf_counter
    own: float = 0.0
    calls: int = 0
    costs: Callable[[], list[HandlerCost]] = field(default=list)

    def run(self, pause: Pause, block: int) -> None:
        """Train, and call `pause` before each `block` of steps."""
        HOSTS[self.host](self, pause, block)

    def follow(self, bus: Bus) -> None:
        """Take the rows of the host's callbacks from the trainer of a bridge's bus."""

        def keep(trainer: Any, event: Any) -> None:
            self.costs = lambda: trainer.foreign_calls.costs(1.0)

        bus.subscribe(keep, "before_train", name="keep_costs")

    def compute(self) -> None:
        """Compute for the length of a step."""
        spin(self.step, self.clock)

    def callback(self) -> None:
        """Be a callback of the host that takes time, and measures itself."""
        began = perf_counter()
        spin(2e-4, self.clock)
        self.own += perf_counter() - began
        self.calls += 1


def spin(seconds: float, clock: Clock) -> None:
    """Keep the processor busy."""
    until = clock() + seconds
    while clock() < until:
        pass


def endless(pause: Pause, block: int, name: str = "") -> Iterator[Any]:
    """Batches, in a dict under a name if there is one, with a pause before each block of them."""
    batch = {name: torch.ones(4, 8)} if name else torch.ones(4, 8)
    while True:
        pause()
        for _ in range(block):
            yield batch


class Batches(torch.utils.data.IterableDataset[Any]):
    """`endless` as a data set."""

    def __init__(self, pause: Pause, block: int, name: str = "") -> None:
        self._arguments = pause, block, name

    def __iter__(self) -> Iterator[Any]:
        return endless(*self._arguments)


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

    callbacks = [Busy()]
    if ride.bridged:
        bridge = import_module("eventloop.bridges.lightning").EventLoopCallback(work_dir=ride.work_dir)
        callbacks.append(bridge)
        ride.follow(bridge.bus)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=ride.work_dir,
        ).fit(Module(), torch.utils.data.DataLoader(Batches(pause, block), batch_size=None))


def transformers(ride: Ride, pause: Pause, block: int) -> None:
    """A `Trainer.train` with a callback of Transformers', without reports, bars or checkpoints."""
    host: Any = import_module("transformers")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            ride.compute()
            return {"loss": self.layer(inputs).square().mean()}

    class Busy(host.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            ride.callback()

    class Training(host.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Batches(pause, block, "inputs"), batch_size=None)

    callbacks = [Busy()]
    if ride.bridged:
        bridge = import_module("eventloop.bridges.transformers").EventLoopCallback(work_dir=ride.work_dir)
        callbacks.append(bridge)
        ride.follow(bridge.bus)
    options = host.TrainingArguments(
        str(ride.work_dir),
        max_steps=ENDLESS,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        optim="sgd",
        logging_strategy="no",
        save_strategy="no",
    )
    Training(Model(), options, train_dataset=Batches(pause, block), callbacks=callbacks).train()


def ignite(ride: Ride, pause: Pause, block: int) -> None:
    """An `Engine.run` with a handler of ignite's; the step is that of `create_supervised_trainer`."""
    engines: Any = import_module("ignite.engine")
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(engine: Any, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        model.train()
        ride.compute()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    engine = engines.Engine(step)
    engine.add_event_handler(engines.Events.ITERATION_COMPLETED, ride.callback)
    if ride.bridged:
        attach = import_module("eventloop.bridges.ignite").attach
        ride.follow(attach(engine, model=model, optimizer=optimizer, work_dir=ride.work_dir))
    engine.run(endless(pause, block), max_epochs=1, epoch_length=ENDLESS)


def mmengine(ride: Ride, pause: Pause, block: int) -> None:
    """A `Runner.train` with a hook of MMEngine's and its default hooks, without a logger, checkpoints or a sampler."""
    hooks, models, optim, runners = (
        import_module(f"mmengine.{name}") for name in ("hooks", "model", "optim", "runner")
    )

    class Model(models.BaseModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            ride.compute()
            return {"loss": self.layer(inputs).square().mean()}

    class Busy(hooks.Hook):  # type: ignore[misc, name-defined]
        def after_train_iter(self, *arguments: Any, **more: Any) -> None:
            ride.callback()

    custom = [Busy()]
    if ride.bridged:
        bridge = import_module("eventloop.bridges.mmengine").EventLoopHook()
        custom.append(bridge)
        ride.follow(bridge.bus)
    model = Model()
    runners.Runner(
        model,
        str(ride.work_dir),
        custom_hooks=custom,
        log_level="ERROR",
        train_dataloader=torch.utils.data.DataLoader(Batches(pause, block, "inputs"), batch_size=None),
        train_cfg={"by_epoch": False, "max_iters": ENDLESS, "val_interval": ENDLESS},
        optim_wrapper=optim.OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-3)),
        default_hooks={"logger": None, "checkpoint": None, "sampler_seed": None},
        experiment_name=str(ride.work_dir),  # its singletons are shared under this name
    ).train()


HOSTS: dict[str, Callable[[Ride, Pause, int], None]] = {
    "lightning": lightning,
    "transformers": transformers,
    "ignite": ignite,
    "mmengine": mmengine,
}
"""The training of each host; add a host here."""
