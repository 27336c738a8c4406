"""A number of a host's training is logged once, with its value, at the step that it belongs to."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR

from eventloop.hooks import LoggerHook
from eventloop.writers import JSONLWriter
from tests.support.trainers import batches, samples, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts' own

Used = list[float]
STEPS = 6


def record_steps(optimizer: Any, used: Used) -> None:
    """Note the learning rate of each step of an optimizer where PyTorch makes it: the values that are right."""
    optimizer.register_step_pre_hook(lambda each, *_: used.append(each.param_groups[0]["lr"]))


def options(work_dir: Path) -> dict[str, Any]:
    """Return a bridge's options to log every iteration."""
    return {"hooks": [LoggerHook(interval=1)], "writers": [JSONLWriter()], "work_dir": work_dir}


def values(work_dir: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a number of the training."""
    lines = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line and line["mode"] == "train"]


def train_lightning(work_dir: Path, used: Used) -> None:
    """Train by Lightning, whose scheduler steps before `on_train_batch_end`."""
    import lightning.pytorch as pl

    from eventloop.bridges.lightning import EventLoopCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_model()

        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            record_steps(optimizer, used)
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    pl.Trainer(
        max_epochs=1,
        callbacks=[EventLoopCallback(**options(work_dir))],
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(work_dir),
    ).fit(Module(), torch.utils.data.DataLoader(samples(STEPS * 4), batch_size=4))


def train_transformers(work_dir: Path, used: Used) -> None:
    """Train by Transformers, whose scheduler steps before `on_step_end`."""
    from eventloop.bridges.transformers import EventLoopCallback
    from tests.support.transformers_host import host

    bridge = EventLoopCallback(**options(work_dir))
    native = host(work_dir / "hf", bridge, num_train_epochs=1, max_steps=STEPS, lr_scheduler_type="linear")
    native.create_optimizer()
    record_steps(native.optimizer, used)
    native.train()


def train_ignite(work_dir: Path, used: Used) -> None:
    """Train by ignite, with a scheduler in the process function."""
    from ignite.engine import Engine

    from eventloop.bridges.ignite import attach

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    record_steps(optimizer, used)
    scheduler = StepLR(optimizer, 1, gamma=0.5)

    def step(engine: Any, batch: Any) -> float:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    engine = Engine(step)
    attach(engine, model=model, optimizer=optimizer, **options(work_dir))
    engine.run(batches(STEPS), max_epochs=1)


def train_mmengine(work_dir: Path, used: Used) -> None:
    """Train by MMEngine, whose scheduler's hook comes before the bridge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eventloop.bridges.mmengine import EventLoopHook
        from tests.bridges.test_mmengine import loader, runner

    ours = runner(
        work_dir,
        EventLoopHook(**options(work_dir)),
        epochs=1,
        train_dataloader=loader(STEPS),
        param_scheduler={"type": "StepLR", "step_size": 1, "gamma": 0.5, "by_epoch": False},
    )
    ours.optim_wrapper = ours.build_optim_wrapper(ours.optim_wrapper)
    record_steps(ours.optim_wrapper.optimizer, used)
    ours.train()


HOSTS: dict[str, tuple[str, Callable[[Path, Used], None]]] = {
    "Lightning": ("lightning", train_lightning),
    "Transformers": ("transformers", train_transformers),
    "ignite": ("ignite", train_ignite),
    "MMEngine": ("mmengine", train_mmengine),
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_rate_is_that_of_its_update(tmp_path: Path, host: str) -> None:
    """The learning rate logged at step s is the one with which update s was made, in each host."""
    module, train = HOSTS[host]
    pytest.importorskip(module, reason=f"{host} is not installed")
    used: Used = []

    train(tmp_path, used)

    assert len(set(used)) == len(used) == STEPS
    assert values(tmp_path, "lr") == list(zip(range(1, STEPS + 1), used, strict=True))


@pytest.mark.parametrize("how", ["self.log", "a dict", "nothing"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_the_module_logs(tmp_path: Path, accumulate: int, how: str) -> None:
    """There is one `loss` at a step, that of `training_step`, however gradients are accumulated."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    import lightning.pytorch as pl

    from eventloop.bridges.lightning import EventLoopCallback

    losses: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_model()

        def training_step(self, batch: Any) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            if how == "self.log":
                self.log("loss", loss)
            return {"loss": loss} if how == "a dict" else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.Trainer(
        max_epochs=1,
        callbacks=[EventLoopCallback(**options(tmp_path))],
        logger=True,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path / "own"),
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    ).fit(Module(), torch.utils.data.DataLoader(samples(STEPS * 4), batch_size=4))

    found = values(tmp_path, "loss")
    assert len(found) == len({step for step, _ in found})
    assert found
    assert [value for _, value in found] == pytest.approx([losses[step - 1] for step, _ in found])
    if how == "self.log":  # what the step returns has a name of its own
        assert [value for _, value in values(tmp_path, "outputs/loss")] == pytest.approx(losses)


OWN = ("time", "data_time", "step_time", "hook_time", "lr", "lr/mine")
"""Names that the engine itself logs in a training; with several optimizers the rates are lr/NAME."""


def log_own_by_lightning(work_dir: Path) -> None:
    """Train by Lightning with a module that logs numbers under the engine's names."""
    from eventloop.bridges.lightning import EventLoopCallback
    from tests.support.lightning import Classifier, fit

    class Module(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log_dict(dict.fromkeys(OWN, -1.0))
            return super().training_step(batch, batch_idx)

    fit(work_dir, EventLoopCallback(**options(work_dir)), model=Module(), log_every_n_steps=1)


def log_own_by_ignite(work_dir: Path) -> None:
    """Train by ignite with metrics under the engine's names."""
    from ignite.engine import Engine

    from eventloop.bridges.ignite import attach

    def step(engine: Any, batch: Any) -> float:
        engine.state.metrics |= dict.fromkeys(OWN, -1.0)
        return 0.5

    model = tiny_model()
    engine = Engine(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(engine, model=model, optimizer=optimizer, **options(work_dir))
    engine.run(batches(STEPS), max_epochs=2)


@pytest.mark.parametrize(
    ("module", "train"), [("lightning", log_own_by_lightning), ("ignite", log_own_by_ignite)]
)
def test_the_hosts_numbers_under_the_engines_names(
    tmp_path: Path, module: str, train: Callable[[Path], None]
) -> None:
    """A name has one value at a step: a host's number with a name of eventloop's is logged as host/NAME."""
    pytest.importorskip(module, reason=f"{module} is not installed")

    train(tmp_path)

    for name in OWN:
        ours, theirs = values(tmp_path, name), values(tmp_path, f"host/{name}")
        assert all(value >= 0 for _, value in ours)
        for found in (ours, theirs):
            assert len(found) == len({step for step, _ in found})
        assert theirs
        assert {value for _, value in theirs} == {-1.0}
    assert {value for _, value in values(tmp_path, "lr")} == {0.1}
