"""Test that a run whose checkpoints were validated elsewhere can be repeated, and that ranks agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop import Trainer
from eventloop.evaluation.schedule import Never
from eventloop.hooks import CheckpointHook
from tests.ranks import run_ranks
from tests.sidecar.jobs import report
from tests.support.trainers import MakeTrainer, batches, collect, tiny_model

SCORES = [0.5, 0.75, 0.6, 0.7]


def job(make_trainer: MakeTrainer, work_dir: Path, **changes: Any) -> Trainer:
    """A training whose learning rate follows the metrics that come."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[ReduceLROnPlateau(optimizer, patience=0)],
        work_dir=work_dir,
        train_loader=batches(2),
        val_loader=batches(1),
        max_epochs=6,
        **changes,
        hooks=[CheckpointHook(1, save_best="loss", max_keep_ckpts=2)],
    )
    trainer.schedule = Never()
    return trainer


def test_a_repeated_run_is_the_same(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A run that repeats the commands of another gets the same metrics at the same iterations, and so the same
    weights and the same best checkpoint."""
    first = job(make_trainer, tmp_path / "first")

    def handle(trainer: Trainer, event: Any) -> None:
        if event.batch_idx == 0 and 1 <= event.epoch <= len(SCORES):
            report(trainer, f"epoch_{event.epoch}", loss=SCORES[event.epoch - 1])

    first.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
    first.train()
    first.close()
    second = job(make_trainer, tmp_path / "second", commands=first.work_dir / "commands.jsonl")
    came = collect(second, "checkpoint_evaluated")
    second.train()

    assert [event.metrics["loss"] for event in came] == SCORES
    results = [
        (
            {name: value.tolist() for name, value in each.model.state_dict().items()},
            each.optimizer.param_groups[0]["lr"],
            next(hook for hook in each.hooks if isinstance(hook, CheckpointHook)).best,
            sorted(path.parent.name for path in each.work_dir.glob("*/manifest.json")),
        )
        for each in (first, second)
    ]
    assert results[0] == results[1]
    assert results[0][1] < 0.1


RANKS = """
import json, sys, torch, torch.distributed as dist
from pathlib import Path
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
from eventloop.evaluation.schedule import Never
from eventloop.hooks import CheckpointHook, EarlyStoppingHook
from tests.sidecar.jobs import report
from tests.support.trainers import batches, build_trainer
hook = CheckpointHook(1, save_best="acc")
trainer = build_trainer(
    Path(meeting).with_name("run"), train_loader=batches(3), val_loader=batches(1), max_epochs=9,
    hooks=[hook, EarlyStoppingHook("acc", patience=2)], val_step=lambda trainer, batch: {"acc": 0.0},
)
trainer.schedule = Never()
came = []
trainer.bus.subscribe(lambda event: came.append((event.iter, event.metrics["acc"])), "checkpoint_evaluated")
def handle(trainer, event):
    if event.batch_idx == 0 and 1 <= event.epoch <= 4:
        trainer.state.finish_saves()
        if rank == 0:
            report(trainer, f"epoch_{event.epoch}", acc=[0.5, 0.75, 0.5, 0.5][event.epoch - 1])
trainer.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
trainer.train()
print(json.dumps([came, trainer.iter, hook.best.score]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_agree(tmp_path: Path) -> None:
    """All ranks get the metrics after the same iteration, and stop at the same one."""
    results = run_ranks(RANKS, tmp_path)

    assert results[0] == results[1]
    came, iterations, best = json.loads(json.dumps(results[0]))
    assert came == [[3, 0.5], [6, 0.75], [9, 0.5], [12, 0.5]]
    assert (
        14 <= iterations <= 15
    )  # the 13th iteration sends the last report, of which all ranks know one later
    assert best == 0.75
    assert (tmp_path / "run" / "best_acc_epoch_2" / "manifest.json").exists()
