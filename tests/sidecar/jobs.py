"""What the tests of evaluators share: a job whose trainer is built by a function, and reports to a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from eventloop import Bus, Trainer
from eventloop.checkpoint.manifest import read_identified
from eventloop.hooks import AsyncValidationHook, CheckpointHook, EMAHook
from eventloop.sidecar.outstanding import Candidate
from eventloop.sidecar.reports import Reports, id_of
from eventloop.writers import JSONLWriter
from tests.support.trainers import DEADLINE, samples

BUILD = "tests.sidecar.jobs:build"
EPOCHS = 4


def build(work_dir: Path | str | None = "the directory of the run", **changes: Any) -> Trainer:
    """A model whose buffers count in a validation, with a dropout, shuffled batches and an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss_fn": F.cross_entropy,
        "train_loader": DataLoader(samples(32), batch_size=8, shuffle=True),
        "val_loader": DataLoader(samples(64), batch_size=16, generator=torch.Generator()),
        "max_epochs": EPOCHS,
        "hooks": [CheckpointHook(interval=1, save_best="accuracy"), EMAHook()],
        "writers": [JSONLWriter()],
        "work_dir": work_dir,
        "bus": Bus(drain_timeout=DEADLINE),
    }
    return Trainer(model, **{**arguments, **changes})


def build_aside(work_dir: Path | str | None = "the directory of the run", **changes: Any) -> Trainer:
    """The same job, whose checkpoints another process validates."""
    hooks = [
        CheckpointHook(interval=1, save_best="accuracy"),
        EMAHook(),
        AsyncValidationHook(BUILD, wait=DEADLINE),
    ]
    return build(work_dir, **{"hooks": hooks, **changes})


def build_both(work_dir: Path | str | None = "the directory of the run", **changes: Any) -> Trainer:
    """The same job, which validates the average beside the weights, and follows it."""
    hooks = [CheckpointHook(interval=1, save_best="ema/accuracy"), EMAHook(validate="both")]
    return build(work_dir, **{"hooks": hooks, **changes})


def build_both_aside(work_dir: Path | str | None = "the directory of the run") -> Trainer:
    """The job that validates both, whose checkpoints another process validates."""
    hooks = [
        CheckpointHook(interval=1, save_best="ema/accuracy"),
        EMAHook(validate="both"),
        AsyncValidationHook("tests.sidecar.jobs:build_both", wait=DEADLINE),
    ]
    return build(work_dir, hooks=hooks)


def build_and_train() -> Trainer:
    """A function that does too much."""
    trainer = build()
    trainer.train()
    return trainer


def build_nothing() -> None:
    """A function that returns no trainer."""


def build_without_validation() -> Trainer:
    """A trainer that cannot validate."""
    return build(val_loader=None, hooks=[])


def build_wrongly() -> Trainer:
    """A function with a fault."""
    raise RuntimeError("the data set is not there")


def fail(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """A validation with a fault."""
    raise RuntimeError("the validation is wrong")


def build_with_faulty_validation() -> Trainer:
    """A trainer whose validation fails."""
    return build(val_step=fail)


def report(trainer: Trainer, name: str, **metrics: float) -> str:
    """Send metrics to the training as an evaluator does, and let it receive them now; return the command's id."""
    trainer.state.finish_saves()
    path = trainer.work_dir / name
    manifest, sha256 = read_identified(path)
    candidate = Candidate(path, manifest.iter, manifest.epoch, sha256)
    Reports(trainer.work_dir, "a test").send(id_of(candidate), candidate, metrics)
    for look in trainer.ownership.each_second:
        look()
    return id_of(candidate)
