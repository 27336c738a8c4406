"""Two ranks: metrics are those of all samples, rank 0 writes, samplers shuffle anew in each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_checkpoint
from tests.ranks import run_ranks

PROGRAM = """
import json, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)

from eventloop import Trainer
from eventloop.writers import JSONLWriter

torch.manual_seed(0)
inputs = torch.randn(12, 2)
target = (inputs[:, 0] > 0).long()
train = TensorDataset(inputs, target, torch.arange(12))
sampler = DistributedSampler(train, shuffle=True, seed=3)
share = slice(0, 8) if rank == 0 else slice(8, 12)
val = list(zip(inputs[share].split(4), target[share].split(4)))
seen = []

def step(trainer, batch):
    seen.append(batch[2].tolist())
    return F.cross_entropy(trainer.model(batch[0]), batch[1])

def run(**unit):
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step,
        train_loader=DataLoader(train, batch_size=3, sampler=sampler), val_loader=val, test_loader=val,
        val_step=lambda t, b: {"loss": F.cross_entropy(t.model(b[0]), b[1]), "preds": t.model(b[0]), "target": b[1]},
        writers=[JSONLWriter()], **unit)
    return trainer

trainer = run(max_epochs=2)
trainer.train()
metrics = trainer.val()
epochs, orders = sampler.epoch, [seen[:2], seen[2:]]

seen.clear()
by_iter = run(max_iters=6)
by_iter.train()
passes = [seen[:2], seen[2:4], seen[4:]]
announced = []
by_iter.bus.subscribe(lambda event: announced.append(event.metrics), "after_test_epoch")
tested = by_iter.test()

def expected(trainer):
    with torch.no_grad():
        preds = trainer.model.module(inputs)
    return {"loss": F.cross_entropy(preds, target).item(),
            "accuracy": (preds.argmax(1) == target).float().mean().item()}

print(json.dumps({
    "rank": [trainer.rank, trainer.world_size], "work_dir": [str(trainer.work_dir), str(by_iter.work_dir)],
    "metrics": metrics, "orders": orders, "passes": passes,
    "expected": expected(trainer), "tested": [tested, *announced], "expected of the test": expected(by_iter),
}))
trainer.close(); by_iter.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks work."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What two processes of one training have to say."""
    return run_ranks(PROGRAM, folder)


def test_ranks_know_themselves(ranks: list[dict[str, Any]]) -> None:
    """`rank` and `world_size` are those of the process group."""
    assert [rank["rank"] for rank in ranks] == [[0, 2], [1, 2]]


def test_metrics_are_of_all_samples(ranks: list[dict[str, Any]]) -> None:
    """A validation or test that is split unequally over ranks has the metrics of the whole set on each of them, in what
    `val()` and `test()` return and in after_test_epoch alike."""
    for rank in ranks:
        expected, of_test = (
            {name: pytest.approx(value) for name, value in rank[which].items()}
            for which in ("expected", "expected of the test")
        )
        assert rank["metrics"] == expected
        assert rank["tested"] == [of_test, of_test]


def test_one_work_dir_for_all(ranks: list[dict[str, Any]]) -> None:
    """Ranks that are given no work dir agree on one, a new one for each run."""
    first, second = ranks[0]["work_dir"]

    assert ranks[1]["work_dir"] == [first, second]
    assert first != second


def test_only_rank_0_writes(ranks: list[dict[str, Any]], folder: Path) -> None:
    """But for costs and traces there is one log and one set of checkpoints, which have the names of the model inside DistributedDataParallel."""
    work_dir = folder / ranks[0]["work_dir"][0]

    assert sorted(path.name for path in work_dir.iterdir()) == [
        "costs.json",
        "costs.rank1.json",
        "epoch_1",
        "epoch_2",
        "heartbeat.json",
        "metrics.jsonl",
        "run.json",
        "traces",
    ]
    assert (work_dir / "metrics.jsonl").read_text().count('"before_run"') == 2
    assert set(load_checkpoint(work_dir / "epoch_2")["state_dict"]) == {"weight", "bias"}


@pytest.mark.parametrize("unit", ["orders", "passes"])
def test_samplers_shuffle_anew(ranks: list[dict[str, Any]], unit: str) -> None:
    """Each epoch, or each pass of a run measured in iterations, has an order of its own, and in each the ranks
    share all samples out between them."""
    orders = [rank[unit] for rank in ranks]

    assert len({json.dumps(order) for order in orders[0]}) == len(orders[0])
    for parts in zip(*orders, strict=True):
        assert sorted(sample for part in parts for batch in part for sample in batch) == list(range(12))
