"""Metrics reduced over two processes, of which one ends, or stays away: the other logs its own, and closes in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

BEGIN = """
import json, logging, os, sys
import torch, torch.distributed as dist

torch.set_num_threads(1)
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)

from eventloop import Bus, Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook

said = []

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("eventloop").addHandler(Said())
"""

KILLED = """
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

AWAY = """
from eventloop.metrics import EventStorage
from eventloop.metrics.reduce import Reducer

bus, storage, reducer = Bus(drain_timeout=60.0), EventStorage(), Reducer([])
logged = []
bus.subscribe(logged.append, ScalarsLogged, offload="thread")
reducer.begin_run()

def log(iteration):
    storage.put_scalar("loss", iteration + 10.0 * rank, False, iteration)
    bus.post(reducer.reduce(storage.collect(), iteration), ScalarsLogged)
    return bus.flush(60.0).complete

complete = [log(0)]
if rank == 0:
    reducer.hurry(0.0)
    complete.append(log(1))
dist.barrier()  # until then rank 1 lives, and takes no part
if rank == 1:
    complete.append(log(1))
    reducer.begin_run()
    bus.close()
    print(json.dumps({"logged": [e.scalars["loss"] for e in logged], "complete": complete, "said": said}), flush=True)
    os._exit(0)
reducer.begin_run()
complete.append(log(2))
print(json.dumps({"logged": [e.scalars["loss"] for e in logged], "complete": complete, "said": said}))
bus.close()
"""


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 say where rank 1 stays away for one log, and is gone at the third."""
    return run_ranks(BEGIN + AWAY, tmp_path_factory.mktemp("away"))


def test_a_run_whose_other_rank_is_killed(tmp_path: Path) -> None:
    """What both had is reduced, what came later is the rank's own; its run ends by the error, and drops nothing."""
    said, _ = run_ranks(BEGIN + KILLED, tmp_path)

    assert said["failed"] == "RuntimeError"
    assert (said["closed"], said["dropped"]) == (True, 0)
    assert said["logged"][:3] == [[iteration, iteration + 5.0] for iteration in range(3)]
    assert said["logged"][3:] == [[iteration, iteration] for iteration in range(3, said["iter"])]
    assert said["iter"] >= 5


def test_a_rank_that_stays_away(away: list[dict[str, Any]]) -> None:
    """While one that lives takes no part the other logs its own values; when it comes it has those of both."""
    first, second = away

    assert first["logged"][:2] == [5.0, 1.0]
    assert second["logged"] == [5.0, 6.0]
    assert "rank 0 logs its own metrics: it has waited" in first["said"][0]


def test_a_rank_that_has_ended(away: list[dict[str, Any]]) -> None:
    """Gloo's error is told, what waits is logged with the rank's own values, and nothing is lost."""
    first, _ = away

    assert first["logged"][2] == 2.0
    assert "rank 0 logs its own metrics from here on" in first["said"][1]
    assert first["complete"] == [True] * 3
