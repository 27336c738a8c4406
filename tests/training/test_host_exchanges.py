"""Two ranks whose default group carries nothing between them, as NCCL on one GPU: objects go through gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("fake", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)

from eventloop import Trainer
from eventloop.model.batchnorm_statistics import update_bn_stats

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
batches = [torch.full((2, 1), float(rank))]
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=1,
    train_loader=batches, train_step=lambda trainer, batch: model(batch).sum(),
    val_loader=batches * (rank + 1), val_step=lambda trainer, batch: {"rank": batch.mean()})
trainer.train()
scores = trainer.val()
ran = update_bn_stats(torch.nn.BatchNorm1d(1), batches * (rank + 1), num_iters=rank + 1)
print(json.dumps({"work_dir": str(trainer.work_dir), "scores": scores, "ran": ran}))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks have to say."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("ranks"))


def test_one_directory(ranks: list[dict[str, Any]]) -> None:
    """The directory that rank 0 makes is that of both."""
    assert ranks[0]["work_dir"] == ranks[1]["work_dir"]


def test_scores_of_all_samples(ranks: list[dict[str, Any]]) -> None:
    """A validation has the samples of both: 2 of value 0 and 4 of value 1."""
    assert [rank["scores"]["rank"] for rank in ranks] == [pytest.approx(4 / 6)] * 2


def test_precise_statistics_end_on_each_rank(ranks: list[dict[str, Any]]) -> None:
    """A rank with more batches runs them, after the other rank has finished."""
    assert [rank["ran"] for rank in ranks] == [1, 2]
