"""Accumulating over two ranks: gradients are exchanged once a step, and none of any rank is lost."""

from __future__ import annotations

from typing import Any

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

from eventloop.hooks.amp import GradientCumulativeFp16OptimizerHook
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.gradient_cumulative import GradientCumulativeOptimizerHook
from eventloop.training.trainer import Trainer

generator = torch.Generator().manual_seed(3)
data = [(torch.randn(2, 2, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(10)]
own, exchanged = data[rank::2], []

class Unsized:
    def __iter__(self):
        return iter(own)

def net():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)

def count(state, bucket):
    exchanged.append(1)
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

def train(hook, work_dir, loader=own, resume=None, **options):
    exchanged.clear()
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, count)
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.mse_loss,
        train_loader=loader, max_epochs=1, hooks=[hook, *options.pop("hooks", ())], work_dir=work_dir,
        unit=options.pop("unit", "batch"), default_hooks=options)
    if resume:
        trainer.resume(resume)
    trainer.train()
    trainer.close()
    return {"weights": [p.flatten().tolist() for p in model.module.parameters()], "exchanged": len(exchanged)}

Cumulative, none = GradientCumulativeOptimizerHook, {"checkpoint": None}
said = {
    "tail": train(Cumulative(2), "tail", hooks=[CheckpointHook(1, by_epoch=False)]),
    "unsized": train(Cumulative(4), "unsized", Unsized(), **none),
    "update": train(Cumulative(2), "update", unit="update", **none),
    "unsized update": train(Cumulative(4), "unsized_update", Unsized(), unit="update", **none),
    "fp16": train(GradientCumulativeFp16OptimizerHook(2), "fp16", **none),
}
dist.barrier()  # rank 0 writes
said["resumed"] = train(Cumulative(2), "resumed", resume="tail/iter_3", **none)

def by_hand(windows):
    model, left = net(), iter(zip(data[::2], data[1::2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            for inputs, target in next(left):
                (F.mse_loss(model(inputs), target) / window / 2).backward()
        optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]

said["expected"] = {"2": by_hand([2, 2, 1]), "4": by_hand([4, 1])}
print(json.dumps(said))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes of one training have to say."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("run", "exchanged"), [("tail", 3), ("update", 3), ("fp16", 3), ("resumed", 2)])
def test_gradients_are_exchanged_once_a_step(ranks: list[dict[str, Any]], run: str, exchanged: int) -> None:
    """The iterations between are under `no_sync`, from the forward pass on."""
    assert [said[run]["exchanged"] for said in ranks] == [exchanged] * 2


@pytest.mark.parametrize(
    ("run", "windows", "tolerance"),
    [
        ("tail", "2", 1e-6),
        ("fp16", "2", 1e-2),
        ("unsized", "4", 1e-6),
        ("resumed", "2", 1e-6),
        ("update", "2", 1e-6),
        ("unsized update", "4", 1e-6),
    ],
    ids=[
        "tail",
        "float16",
        "loader of unknown length",
        "resumed within a window",
        "updates",
        "updates of unknown length",
    ],
)
def test_training_is_that_of_one_process(
    ranks: list[dict[str, Any]], run: str, windows: str, tolerance: float
) -> None:
    """Each step is made with the mean over ranks and iterations, also one that ended early, and one resumed from
    what rank 0 saved within a window."""
    for said in ranks:
        for ours, expected in zip(said[run]["weights"], said["expected"][windows], strict=True):
            assert ours == pytest.approx(expected, rel=tolerance, abs=tolerance)
