"""Metrics reduced over two processes, of which one is killed: the other logs its own, and closes in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist

torch.set_num_threads(1)
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)

from eventloop import Bus, Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook

def step(trainer, batch):
    if rank == 1 and trainer.iter == 5:  # both have been told of the first three by then
        print("{}", flush=True)
        os._exit(0)
    if trainer.iter == 4:
        trainer.bus.flush(60)
    trainer.metrics.put_scalar("number", trainer.iter + 10.0 * rank, smoothing_hint=False)
    return trainer.model(batch).sum()

model = torch.nn.Linear(2, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step, max_iters=20,
    train_loader=[torch.ones(1, 2)] * 20, hooks=[LoggerHook(3, reduce=True)], default_hooks={"checkpoint": None},
    work_dir="run", bus=Bus(drain_timeout=60.0))
logged = []
trainer.bus.subscribe(logged.append, ScalarsLogged, offload="thread")
try:
    trainer.train()
except RuntimeError as error:
    failed = type(error).__name__
(stats,) = [row for row in trainer.bus.stats() if row.runs_on == "thread" and "append" in row.name]
print(json.dumps({"logged": [(e.iter, e.scalars["number"]) for e in logged], "closed": trainer.bus.closed,
                  "failed": failed, "dropped": stats.dropped, "iter": trainer.iter}))
"""


def test_a_run_whose_other_rank_is_killed(tmp_path: Path) -> None:
    """Values that both have are reduced, later ones are the rank's own; its run ends by the error, and drops nothing."""
    first, _ = run_ranks(PROGRAM, tmp_path)

    assert first["failed"] == "RuntimeError"
    assert (first["closed"], first["dropped"]) == (True, 0)
    assert first["logged"][:3] == [[iteration, iteration + 5.0] for iteration in range(3)]
    assert first["logged"][3:] == [[iteration, iteration] for iteration in range(3, first["iter"])]
    assert first["iter"] >= 5
