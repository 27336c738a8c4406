"""A training by updates that keeps a state of the program's own and validates both weights: it is begun or resumed.

`python -m tests.faults.updates DIRECTORY` prints a line when it begins to train.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eventloop import Bus, Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import EMAHook
from tests.support.interrupted import seed
from tests.support.trainers import DEADLINE, batches, shuffled, tiny_model

UPDATES = 40


def make_trainer(directory: Path) -> Trainer:
    """A trainer whose loss depends on the batch's index and on a state that each batch changes."""
    model = tiny_model()
    hidden = [torch.zeros(3)]

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        scores = trainer.model(batch[0]) + hidden[0] * (trainer.batch_idx > 0)
        hidden[0] = scores.detach().mean(0)
        return F.cross_entropy(scores, batch[1]) * (1 + trainer.batch_idx)

    trainer = Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_step=step,
        train_loader=shuffled(8),
        val_loader=batches(2),
        val_step=lambda trainer, batch: {"loss": F.cross_entropy(trainer.model(batch[0]), batch[1])},
        max_iters=UPDATES,
        val_interval=3,
        unit="update",
        hooks=[EMAHook(momentum=0.1, validate="both")],
        writers=[],
        work_dir=directory,
        bus=Bus(drain_timeout=DEADLINE),
        default_hooks={
            "optimizer": {"cumulative_iters": 3},
            "logger": None,
            "preemption": None,
            "checkpoint": {"interval": 1, "by_epoch": False, "max_keep_ckpts": 2, "save_best": "ema/loss"},
        },
    )
    trainer.remember("hidden", lambda: hidden[0], lambda state: hidden.__setitem__(0, state))
    return trainer


def main(directory: Path) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    trainer = make_trainer(directory)
    seed()
    with suppress(FileNotFoundError):
        trainer.resume("auto")
    trainer.bus.subscribe(lambda event: os.write(1, b"begun\n"), "before_train")
    trainer.train()
    trainer.close()


def end_of(directory: Path) -> dict[str, Any]:
    """Return what the last checkpoint of a training has, and the names of the best ones."""
    state = load_checkpoint(directory / f"iter_{UPDATES}")
    del state["meta"]["time"], state["hooks"]["checkpoint"]["kept"]
    return {**state, "best": sorted(path.name for path in directory.glob("best_*"))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
