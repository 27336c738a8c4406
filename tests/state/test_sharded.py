"""Test FSDP2 on two ranks: training is right, and saving one rank's part of a tensor is refused on both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = """
import json, logging, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from eventloop.bridges.host_numbers import numbers_of
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

from eventloop.checkpoint import save_checkpoint
from eventloop.hooks import AmpOptimizerHook, CheckpointHook, EMAHook, Hook
from eventloop.model.averages import StochasticWeightAverage
from eventloop.model.batchnorm_statistics import update_bn_stats
from eventloop.hooks.check_invalid_loss import CheckInvalidLossHook
from eventloop.hooks.gradient_cumulative import GradientCumulativeOptimizerHook
from eventloop.hooks.optimizer import OptimizerHook
from eventloop.hooks.sync_buffers import SyncBuffersHook
from eventloop.metrics import EventStorage
from eventloop.training.trainer import Trainer

generator = torch.Generator().manual_seed(3)
data = [(torch.randn(2, 2, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(24)]
own, none = data[rank::2], {"checkpoint": None}

class Unsized:
    def __iter__(self):
        return iter(own[:11])

class Short(Unsized):
    def __len__(self):
        return 12

class Rest(Short):
    def __iter__(self):
        return iter(own[11:])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.unused = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(2, 2)
    def forward(self, x):
        return self.other(self.one(x).relu())

def sharded(model):
    for part in (model.one, model.other):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def build(model, hooks=(), loader=own, **options):
    options = {"default_hooks": none, "loss_fn": F.mse_loss, **options}
    return Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), train_loader=loader,
        max_epochs=1, hooks=hooks, work_dir=folder / "run", **options)

class Reductions(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))

def train(model, hook, **options):
    trainer = build(model, [hook], **options)
    with Reductions() as reductions:
        trainer.train()
    norms = [value for value, _ in trainer.metrics.histories()["grad_norm"].values()]
    trainer.close()
    return {"weights": whole(model), "reduced": reductions.count, "norms": norms}

def whole(model):
    names = ("one.weight", "one.bias", "other.weight", "other.bias")
    return [p.full_tensor().flatten().tolist() for n, p in model.named_parameters() if n in names]

def by_hand(windows):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    left, norms = iter(zip(data[::2], data[1::2])), []
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            for inputs, target in next(left):
                (F.mse_loss(model(inputs), target) / window / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return {"weights": [p.flatten().tolist() for p in list(model.parameters())[:4]], "norms": norms}

def refused(call):
    try:
        call()
    except (TypeError, RuntimeError) as error:
        dist.barrier()  # both ranks are here: none waits for the other in a collective
        return str(error)
    return "not refused"

folder = Path(sys.argv[2]).parent
Cumulative, clip = GradientCumulativeOptimizerHook, dict(max_norm=0.5)
said = {
    "plain": train(sharded(Net()), OptimizerHook(clip)),
    "by 4": train(sharded(Net()), Cumulative(4, clip)),
    "unsized": train(sharded(Net()), Cumulative(4, clip), loader=Unsized()),
    "updates": train(sharded(Net()), Cumulative(4, clip), unit="update"),
    "expected": {"updates": by_hand([4] * 3), "plain": by_hand([1] * 12), "by 4": by_hand([4] * 3), "unsized": by_hand([4, 4, 3])},
}

class Record(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("eventloop").addHandler(Record())
model = sharded(Net())
anomalous = train(model, OptimizerHook(clip, detect_anomalous_params=True))
said["anomalous"], said["anomalous weights"] = lines[:], anomalous["weights"]

lines.clear()
model = sharded(Net())
trainer = build(model, [Cumulative(4, clip)], loader=Short())
trainer.train()
said["short"], said["left"] = {"weights": whole(model)}, lines[:]
trainer.max_epochs, trainer.train_loader = 2, Rest()
trainer.train()
trainer.close()
said["longer"] = {"weights": whole(model)}
said["expected"].update(short=by_hand([4, 4]), longer=by_hand([4, 4, 4]))

weight = model.one.weight
state = {"meta": {}, "state_dict": {"one.weight": weight}}
storage = EventStorage()
storage.put_scalar("was plain", torch.ones(()))

class Keeps(Hook):
    def state_dict(self):
        return {"list": [weight]}
    def load_state_dict(self, state):
        pass

def averaged_late():
    model = Net()
    average = StochasticWeightAverage(model)
    average.update_parameters(FullyShardedDataParallel(model, device_id=torch.device("cpu")))

def fsdp1():
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))

def shards():
    return sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 2)

def old_shards():
    net = Net()
    net.table = nn.Parameter(shards())
    return net

def partial_loss(trainer, batch):
    return (weight.detach().requires_grad_() * 2).sum()

def replicated_score(trainer, batch):
    return {"score": distribute_tensor(torch.ones(()), mesh, [Replicate()])}

def with_bn():
    return distribute_module(nn.Sequential(nn.BatchNorm1d(2)), mesh)

said["numbers of a host"] = [*numbers_of({"loss": 1.0, "grad_norm": weight.norm(), "lr": torch.tensor(0.1)})]
whole_file = folder / "whole.pth"
if rank == 0:
    torch.save(Net().state_dict(), whole_file)
dist.barrier()
plain = lambda *hooks, **options: build(Net(), [*hooks], **options)
said["refused"] = {
    "checkpoint of FSDP1": refused(lambda: build(fsdp1(), default_hooks={})),
    "average of FSDP1": refused(lambda: build(fsdp1(), [EMAHook()])),
    "clipping of FSDP1": refused(lambda: build(fsdp1(), [OptimizerHook(clip)])),
    "loss scale of FSDP1": refused(lambda: build(fsdp1(), [AmpOptimizerHook("dynamic", "float16")])),
    "clipping of a ShardedTensor": refused(lambda: build(old_shards(), [OptimizerHook(clip)])),
    "checkpoint of a ShardedTensor": refused(lambda: build(old_shards(), default_hooks={})),
    "average of a ShardedTensor": refused(lambda: build(old_shards(), [EMAHook()])),
    "average by hand of a ShardedTensor": refused(lambda: StochasticWeightAverage(old_shards())),
    "average by hand, later of FSDP1": refused(averaged_late),
    "state of a hook": refused(plain(Keeps(), CheckpointHook(1, by_epoch=False), default_hooks={}).train),
    "saved by hand": refused(lambda: save_checkpoint(state, folder / "own")),
    "loaded into FSDP1": refused(lambda: build(fsdp1()).load_checkpoint(whole_file)),
    "loaded into a ShardedTensor": refused(lambda: build(old_shards()).load_checkpoint(whole_file)),
    "scalar": refused(lambda: storage.put_scalar("was plain", weight.norm())),
    "scalars": refused(lambda: storage.put_scalars({"several": weight.sum()})),
    "histogram": refused(lambda: storage.put_histogram("weights", weight)),
    "histogram of a ShardedTensor": refused(lambda: storage.put_histogram("shards", shards())),
    "image": refused(lambda: storage.put_image("picture", distribute_tensor(torch.ones(1, 2, 2), mesh, [Shard(1)]))),
    "loss": refused(plain(loss_fn=None, train_step=partial_loss).train),
    "loss that is checked": refused(plain(CheckInvalidLossHook(), loss_fn=None, train_step=partial_loss,
        default_hooks={**none, "runtime_info": None, "optimizer": None}).train),
    "validation": refused(plain(val_loader=own, val_step=replicated_score).val),
    "buffers": refused(build(with_bn(), [SyncBuffersHook()]).train),
    "batch norm": refused(lambda: update_bn_stats(with_bn().train(), [torch.ones(4, 2)], None)),
}
said["short update"] = refused(build(sharded(Net()), [Cumulative(4)], loader=Short(), unit="update").train)
said["files"] = sorted(path.name for path in folder.glob("**/state.pth"))

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
fully_shard(layers[0], mesh=mesh)
said["batches of precise statistics"] = update_bn_stats(layers.train(), [torch.ones(4, 2)] * (2 + rank), None)
print(json.dumps(said))
dist.destroy_process_group()
"""

REFUSED = {
    "checkpoint of FSDP1": ("CheckpointHook", "''", "default_hooks=dict(checkpoint=None)", "fully_shard"),
    "checkpoint of a ShardedTensor": ("CheckpointHook", "'table'", "default_hooks=dict(checkpoint=None)"),
    "average of FSDP1": ("EMAHook", "''", "fully_shard"),
    "clipping of FSDP1": ("grad_clip by norm", "''", "fully_shard"),
    "loss scale of FSDP1": ("the loss scale", "''", "fully_shard"),
    "clipping of a ShardedTensor": ("grad_clip by norm", "'table'", "(4, 2)", "fully_shard"),
    "average of a ShardedTensor": ("EMAHook", "'table'", "(4, 2)", "fully_shard"),
    "average by hand of a ShardedTensor": ("StochasticWeightAverage", "'table'", "fully_shard"),
    "average by hand, later of FSDP1": ("StochasticWeightAverage", "''", "FullyShardedDataParallel"),
    "state of a hook": ("['Keeps']['list'][0]", "(4, 2)", "full_tensor()"),
    "saved by hand": ("state_dict.one.weight", "(4, 2)"),
    "loaded into FSDP1": ("whole.pth", "''", "fully_shard"),
    "loaded into a ShardedTensor": ("whole.pth", "'table'", "(4, 2)", "fully_shard"),
    "scalar": ("'was plain'", "NormPartial"),
    "scalars": ("'several'", "Partial"),
    "histogram": ("'weights'", "(4, 2)", "Shard(dim=0)"),
    "histogram of a ShardedTensor": ("'shards'", "(4, 2)"),
    "image": ("'picture'", "Shard(dim=1)"),
    "loss": ("'loss'", "Partial"),
    "loss that is checked": ("['loss']", "Partial"),
    "validation": ("'score'", "Replicate"),
    "buffers": ("'0.running_mean'", "Replicate"),
    "batch norm": ("'0.running_mean'", "Replicate"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two processes of one sharded training print."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("what", REFUSED)
def test_sharded_tensors_are_refused(ranks: list[dict[str, Any]], what: str) -> None:
    """The error names the tensor, the fault and the remedy; both ranks raise it, and none waits."""
    for said in ranks:
        error = said["refused"][what]
        kind = {"FSDP1": "FullyShardedDataParallel", "ShardedTensor": "ShardedTensor"}.get(
            what.split()[-1], "DTensor"
        )
        assert "sharded over ranks: expected" in error
        assert f"got a {kind}" in error
        for part in REFUSED[what]:
            assert part in error
    assert ranks[0]["files"] == []


def test_numbers_of_a_host(ranks: list[dict[str, Any]]) -> None:
    """A bridge leaves out a sharded number, whose reading would wait for the other ranks, and keeps the others."""
    assert [said["numbers of a host"] for said in ranks] == [["loss", "lr"]] * 2


@pytest.mark.parametrize("run", ["plain", "by 4", "unsized", "updates"])
def test_training_is_that_of_one_process(ranks: list[dict[str, Any]], run: str) -> None:
    """Weights and gradient norms equal those of the whole model, with and without accumulation, also if the
    last window is shorter than expected."""
    for said in ranks:
        expected = said["expected"][run]
        assert said[run]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for ours, theirs in zip(said[run]["weights"], expected["weights"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_gradients_are_reduced_once_a_window(ranks: list[dict[str, Any]]) -> None:
    """Gradients are reduced once for each accumulation window, and in each iteration if the length is
    unknown."""
    counts = [
        (said["plain"]["reduced"], said["by 4"]["reduced"], said["unsized"]["reduced"]) for said in ranks
    ]

    assert counts == [(24, 6, 22)] * 2
    assert [said["updates"]["reduced"] for said in ranks] == [6, 6]


@pytest.mark.parametrize("run", ["short", "longer"])
def test_gradients_that_are_not_reduced_wait(ranks: list[dict[str, Any]], run: str) -> None:
    """If a loader ends early within a window, the log has the number of unreduced iterations, and a longer
    training completes the window."""
    for said in ranks:
        (line,) = [line for line in said["left"] if "not yet in a step" in line]
        assert "gradients of 3 iterations" in line
        assert "FSDP2 keeps them" in line
        for ours, theirs in zip(said[run]["weights"], said["expected"][run]["weights"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_update_that_a_loader_cuts_short_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Its gradients are not reduced, and an update does not wait for batches of another epoch."""
    for said in ranks:
        assert (
            "expected 12 batches, the length of the train loader, got 11: FSDP2 reduces"
            in said["short update"]
        )
        assert "give a loader whose length is right, or none" in said["short update"]


def test_unreached_parameters_are_named(ranks: list[dict[str, Any]]) -> None:
    """Only parameters that the loss does not reach are named, once, and the training is unchanged by the
    check."""
    for said in ranks:
        (line,) = said["anomalous"]
        assert line.splitlines()[1:] == ["  unused.weight, (2, 2)", "  unused.bias, (2,)"]
        assert said["anomalous weights"] == said["plain"]["weights"]


def test_precise_statistics_of_unequal_loaders(ranks: list[dict[str, Any]]) -> None:
    """The pass of PreciseBN ends with the shorter loader, because each forward pass needs all ranks."""
    assert [said["batches of precise statistics"] for said in ranks] == [2, 2]
