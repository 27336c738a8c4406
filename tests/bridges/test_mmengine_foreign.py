"""Hooks of MMEngine in this engine's trainer: each has the effect that it has in a runner."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

with warnings.catch_warnings():  # of torch.jit, when torch.distributed.optim is imported
    warnings.simplefilter("ignore")
    from mmengine import hooks as mm
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.mmengine import EventLoopHook
from tests.support.trainers import batches, samples, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind


class Model(BaseModel):  # type: ignore[misc]
    """The tiny model with MMEngine's interface, and the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_model()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        out = self.net(inputs)
        return {"loss": F.cross_entropy(out, target)} if mode == "loss" else out


def loader() -> DataLoader[Any]:
    return DataLoader(samples(16), batch_size=4)


Seen = list[Any]


class Notes(mm.Hook):  # type: ignore[misc]
    """A hook that notes each stage with its counters."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def before_train(self, runner: Any) -> None:
        self.seen.append(("before_train", runner.iter, runner.epoch, runner.max_epochs, runner.max_iters))

    def before_train_epoch(self, runner: Any) -> None:
        self.seen.append(("epoch", runner.iter, runner.epoch))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        loss = round(float(outputs["loss"]), 5)
        self.seen.append(
            (
                batch_idx,
                runner.iter,
                loss,
                self.every_n_train_iters(runner, 3),
                self.is_last_train_iter(runner),
            )
        )

    def after_train_epoch(self, runner: Any) -> None:
        self.seen.append(
            ("end", runner.epoch, self.is_last_train_epoch(runner), self.every_n_epochs(runner, 2))
        )


class Freezes(mm.Hook):  # type: ignore[misc]
    """A hook that freezes a layer after one epoch, as those of mmdet do."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            for parameter in runner.model.net[0].parameters():
                parameter.requires_grad_(False)
                parameter.grad = None

    def after_train(self, runner: Any) -> None:
        self.seen.append([round(float(p.detach().sum()), 5) for p in runner.model.parameters()])


class Averages(mm.EMAHook):  # type: ignore[misc]
    """MMEngine's average, whose result is noted."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        super().__init__(momentum=0.5)
        self.seen = seen

    def after_train(self, runner: Any) -> None:
        self.seen.append([round(float(p.sum()), 5) for p in self.ema_model.parameters()])


class Stops(mm.Hook):  # type: ignore[misc]
    """A hook that stops the training as MMEngine's early stopping does."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def after_train_epoch(self, runner: Any) -> None:
        self.seen.append(runner.epoch)
        runner.train_loop.stop_training = runner.epoch == 1


class Puts(mm.Hook):  # type: ignore[misc]
    """A hook that logs, and reads back what it logged."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        runner.message_hub.update_scalar("train/mine", batch_idx * 2)
        self.seen.append(float(runner.message_hub.get_scalar("train/mine").current()))


def checkpoint(seen: Seen, folder: Path) -> mm.Hook:
    return mm.CheckpointHook(interval=1, max_keep_ckpts=2, out_dir=str(folder / "saved"))


def timer(seen: Seen, folder: Path) -> mm.Hook:
    return mm.IterTimerHook()


def empty_cache(seen: Seen, folder: Path) -> mm.Hook:
    return mm.EmptyCacheHook(after_epoch=True)


def sync_buffers(seen: Seen, folder: Path) -> mm.Hook:
    return mm.SyncBuffersHook()


Make = Callable[[Seen, Path], Any]


def natively(make: Make, folder: Path) -> tuple[Seen, set[str]]:
    """Train by MMEngine, and return what the hook notes and saves."""
    seen: Seen = []
    runner = Runner(
        model=Model(), work_dir=str(folder), train_dataloader=loader(),
        train_cfg={"by_epoch": True, "max_epochs": 3}, custom_hooks=[make(seen, folder)], log_level="ERROR",
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}}, default_scope="mmengine",
        experiment_name=f"r{abs(hash(folder))}", randomness={"seed": 3}, default_hooks={"checkpoint": None},
    )  # fmt: skip
    torch.manual_seed(3)
    runner.train()
    return seen, saved(folder)


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.pth")}


def here(make: Make, folder: Path) -> tuple[Seen, set[str]]:
    """Train by this engine with the same hook."""
    seen, model = Seen(), Model()
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, max_epochs=3,
        train_loader=loader(), writers=[], work_dir=folder,
        hooks=[Foreign(make(seen, folder))], default_hooks={"checkpoint": None},
    )  # fmt: skip
    torch.manual_seed(3)
    trainer.train()
    trainer.close()
    return seen, saved(folder)


@pytest.mark.parametrize(
    "make", [Notes, Freezes, Averages, Stops, Puts, checkpoint], ids=lambda make: make.__name__
)
def test_effect_is_the_same(tmp_path: Path, make: Make) -> None:
    """What a hook notes, stops or saves in this engine's trainer is what it does in a runner."""
    expected = natively(make, tmp_path / "native")

    found = here(make, tmp_path / "here")

    assert any(found)
    assert found == expected


@pytest.mark.parametrize("make", [timer, empty_cache, sync_buffers], ids=lambda make: make.__name__)
def test_hooks_without_a_result_run(tmp_path: Path, make: Make) -> None:
    """Hooks that measure, or work for devices and ranks, run without an error."""
    here(make, tmp_path)


def test_numbers_of_the_message_hub_are_logged(tmp_path: Path) -> None:
    """What a hook puts into the message hub is a metric of this trainer."""
    model = Model()
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, max_epochs=1,
        train_loader=batches(3), writers=[], work_dir=tmp_path, hooks=[Foreign(Puts([]))],
    )  # fmt: skip

    trainer.train()
    trainer.close()

    assert trainer.metrics.latest()["mine"].value == 4.0


def test_priorities_and_names(tmp_path: Path) -> None:
    """A hook keeps its own priority, or has the one that is given, and a name with its system."""
    model, low = Model(), Notes([])
    low.priority = "VERY_LOW"
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, max_epochs=1,
        train_loader=batches(3), writers=[], work_dir=tmp_path, hooks=[Foreign(low), Foreign(Stops([]), priority="HIGH")],
    )  # fmt: skip

    rows = {row.name: row.priority for row in trainer.bus.plan("after_train_epoch")}
    trainer.close()

    assert rows["Notes.after_train_epoch (mmengine)"] == 90
    assert rows["Stops.after_train_epoch (mmengine)"] == 30


def test_random_state_is_kept(tmp_path: Path) -> None:
    """Building the trainer draws nothing from the random state, although a runner seeds everything."""
    model = Model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, max_epochs=1,
        train_loader=batches(1), writers=[], work_dir=tmp_path, hooks=[Foreign(Notes([]))],
    ).close()  # fmt: skip

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (mm.ParamSchedulerHook, ValueError, r"ParamSchedulerHook can have no effect here: give .* schedulers=\[...\]"),
        (mm.DistSamplerSeedHook, ValueError, "DistSamplerSeedHook can have no effect here: this trainer seeds"),
        (mm.LoggerHook, ValueError, r"LoggerHook can have no effect here: .* writers=\[...\] record the numbers"),
        (mm.RuntimeInfoHook, ValueError, "RuntimeInfoHook can have no effect here: this trainer collects"),
        (EventLoopHook, ValueError, "EventLoopHook can have no effect here: give its hooks and writers to this"),
        (lambda: mm.IterTimerHook, TypeError, "got the class IterTimerHook"),
        (Model, TypeError, "Foreign takes a hook of MMEngine, got Model, which does not derive from mmengine.hooks.Hook"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    """A hook that steers a runner's loop, a class and another object are refused by name."""
    with pytest.raises(error, match=words):
        Foreign(make())
