"""Sweep a learning rate with Optuna: trials that are worse than the median of the others are pruned.

    pip install 'torch-eventloop[demo,optuna]' && python examples/optuna_sweep.py

The study is a SQLite file, so a second start, or a second process at the same time, adds trials to it. Each trial has
its own folder, where a pruned one can be resumed.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import optuna
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.bridges.optuna import OptunaPruningHook
from eventloop.cli.demo import load_digits
from eventloop.events import AfterValEpoch
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter


def train(trial: optuna.Trial, folder: Path) -> float:
    """Train a linear classifier of handwritten digits with the rate of a trial, and return its validation loss."""
    torch.manual_seed(0)
    digits, held_out = load_digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 10.0, log=True)),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(digits, batch_size=64, shuffle=True),
        val_loader=DataLoader(held_out, batch_size=360),
        max_epochs=6,
        hooks=[OptunaPruningHook(trial, "loss"), CheckpointHook(interval=1, max_keep_ckpts=1)],
        writers=[JSONLWriter()],
        work_dir=folder / f"trial_{trial.number}",
    )
    with closing(trainer):  # ends the trial's threads; the next trial has its own
        trainer.train()  # raises optuna.TrialPruned if the trial is pruned
    last = trainer.bus.latest(AfterValEpoch)
    assert last is not None
    return last.metrics["loss"]


def main(folder: str = "runs/sweep", seed: str | None = None) -> None:
    """Run ten trials, and print what became of each. With a seed the sampler tries the same rates again."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="digits",
        storage=f"sqlite:///{folder}/study.db",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=None if seed is None else int(seed)),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    study.optimize(lambda trial: train(trial, Path(folder)), n_trials=10)
    for trial in study.trials:
        print(f"lr {trial.params['lr']:8.4f}  {trial.state.name:8}  epochs {len(trial.intermediate_values)}")
    print(f"best: lr {study.best_params['lr']:.4f}, validation loss {study.best_value:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
