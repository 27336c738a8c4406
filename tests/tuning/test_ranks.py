"""Two ranks: a range test, a limit and a dev run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

from eventloop import Trainer

torch.manual_seed(0)
data = [(torch.randn(4, 2), torch.randint(3, (4,))) for _ in range(10)][rank::2]

def build(**options):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 3))
    return Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=data, val_loader=data, max_epochs=2, work_dir="run", **options)

trainer = build(limit_batches=3)
before = [p.clone() for p in trainer.model.parameters()]
curve = trainer.find_lr(0.001, 100.0, 12)
kept = all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
trainer.train()
short = build(fast_dev_run=2)
short.train()
print(json.dumps({"curve": [curve.lrs, curve.losses], "kept": kept, "iters": [trainer.iter, short.iter]}))
"""


def test_ranks_go_together(tmp_path: Path) -> None:
    """Both ranks have the same curve, of the mean of their losses, and end at the same iteration."""
    first, second = run_ranks(PROGRAM, tmp_path)

    assert first == second
    assert first["kept"]
    assert first["iters"] == [6, 2]
    assert len(first["curve"][0]) > 3
