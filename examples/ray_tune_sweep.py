"""Sweep a learning rate with Ray Tune: ASHA stops the trials that fall behind.

    pip install 'torch-eventloop[demo,ray]' && python examples/ray_tune_sweep.py

Ray calls `train` on a thread of a worker process for each trial. A trial that it stops has its process ended within moments,
so everything is in its files before each report.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.cli.demo import load_digits
from eventloop.events import AfterValEpoch
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter


def report(trainer: Trainer, event: AfterValEpoch) -> None:
    """Send the metrics of a validation to Ray Tune, which raises SystemExit here to stop the trial."""
    for hook in trainer.hooks:
        if isinstance(hook, CheckpointHook):
            hook.saves.finish(trainer)  # waits until the checkpoint of this epoch is durable
    trainer.bus.flush()  # waits for the writers
    try:
        tune.report({**event.metrics, "epoch": event.epoch})
    except SystemExit:
        trainer.stop("stopped by Ray Tune")  # a worker that is reused serves the next trial


def train(config: dict[str, Any]) -> None:
    """Train a linear classifier of handwritten digits with the rate of a trial."""
    torch.manual_seed(0)
    digits, held_out = load_digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"]),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(digits, batch_size=64, shuffle=True),
        val_loader=DataLoader(held_out, batch_size=360),
        max_epochs=6,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)],
        writers=[JSONLWriter()],
        work_dir=Path(tune.get_context().get_trial_dir()) / "run",
    )
    trainer.bus.subscribe(report, AfterValEpoch, priority="LOWEST")
    with closing(trainer):
        trainer.train()


def main(folder: str = "runs/ray") -> None:
    """Run three trials, and print what became of each."""
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([3.0, 0.3, 0.03])},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            max_concurrent_trials=1,
            scheduler=ASHAScheduler(grace_period=2, reduction_factor=2, max_t=6),
        ),
        run_config=tune.RunConfig(storage_path=str(Path(folder).absolute())),
    )
    results = tuner.fit()
    for result in (results[number] for number in range(len(results))):
        assert result.config is not None
        assert result.metrics is not None
        print(
            f"lr {result.config['lr']:6.3f}  epochs {result.metrics['epoch']}  loss {result.metrics['loss']:.4f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
