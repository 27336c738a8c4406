"""Two ranks, one of which is late: the other one waits for it, and its record and the report say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from eventloop.costs.records import RunCosts, read_costs
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

LATE = 0.5
"""The seconds by which rank 1 comes late, once in each epoch."""

PROGRAM = f"""
import json, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{{sys.argv[2]}}", rank=rank, world_size=2)

from eventloop import Trainer

batches = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))] * 5
said = {{}}
for place, event in (("epoch", "after_train_epoch"), ("evaluation", "after_val_iter"), ("iteration", "after_train_iter")):
    model = torch.nn.Linear(2, 2)
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
                      train_loader=batches, val_loader=batches, max_epochs=2, work_dir=place, writers=[],
                      default_hooks=dict(checkpoint=None))

    @trainer.bus.on(event)
    def late(trainer, event):
        if rank == 1 and getattr(event, "batch_idx", 2) == 2:
            time.sleep({LATE})

    began = time.perf_counter()
    trainer.train()
    said[place] = dict(seconds=time.perf_counter() - began)
    trainer.close()
print(json.dumps(said))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of the runs, and what each rank measured."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(PROGRAM, folder)


def waited(costs: RunCosts, place: str | None = None) -> float:
    return sum(w.seconds for w in costs.waits if w.cause == "ranks" and place in (None, w.place))


@pytest.mark.parametrize(
    ("run", "place"), [("epoch", "between"), ("evaluation", "evaluations"), ("iteration", "iterations")]
)
def test_the_early_rank_waits_for_the_late_one(
    ran: tuple[Path, list[dict[str, Any]]], run: str, place: str
) -> None:
    """Twice as long as the other is late, at the next place where both meet, and the late one does not wait."""
    folder, said = ran
    early, late = (read_costs(folder / run, rank) for rank in range(2))

    assert LATE < waited(early, place) < said[0][run]["seconds"]
    assert waited(early, place) > 0.6 * waited(early)
    assert waited(late) < 0.5 * waited(early)
    for costs, own in zip((early, late), said, strict=True):
        apart = sum(wait.seconds for wait in costs.waits if wait.place != "iterations")
        assert costs.phases.wall + costs.evaluation + apart < own[run]["seconds"]
        assert costs.phases.unaccounted >= -1e-6
        assert costs.phases.ranks == pytest.approx(waited(costs, "iterations"), abs=1e-6)


def test_the_report_names_the_late_rank(
    ran: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the time that the other one waited for it; programs have both."""
    folder, _ = ran

    assert cli.main(["report", str(folder / "epoch")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(folder / "epoch"), "--json"]) == 0
    (advice, *_) = json.loads(capsys.readouterr().out)["advice"]

    assert "waiting for other ranks took rank 0 " in shown
    assert advice.startswith("waiting for other ranks took rank 0 ")
    assert "rank 1 came last, and waited" in advice
