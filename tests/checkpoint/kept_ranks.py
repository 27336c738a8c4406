"""What each of two ranks does with the checkpoints that a run keeps; `test_sharded_kept` starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.checkpoint.sharded.places import Place
from eventloop.checkpoint.sharded.plan import plan_of
from eventloop.checkpoint.weights import unwrap
from eventloop.hooks import CheckpointHook
from tests.checkpoint.sharded_ranks import Net, Rank, Recorder, full


class Tied(Net):
    """Net, with two names of one weight, a number, and types that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(5, 5, bias=False)
        self.more_tied = self.more
        self.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("less", torch.arange(6.0).view(3, 2).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of all ranks, by name."""
    return {name: full(value) for name, value in unwrap(trainer.model).state_dict().items()}


def best(own: Rank, run: Path) -> dict[str, Any]:
    """Keep two checkpoints and the best one, publish, and load the best one."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
    hook = CheckpointHook(1, max_keep_ckpts=2, save_best="loss", published_keys="state_dict")
    recorder = Recorder(12)
    trainer = own.build(
        run, hook, recorder, max_epochs=4, val_loader=DataLoader(data, batch_size=8), sanity_val=0
    )
    trainer.train()
    chosen = hook.best.name
    trainer.load_checkpoint("best")
    found = weights(trainer)
    trainer.close()
    if own.rank == 0:
        torch.save({"best": found, "last": recorder.whole["average"]}, run.with_name("expected.pth"))
    return {"best": chosen, "same": sorted(found) == sorted(recorder.whole["average"])}


def line(own: Rank, run: Path) -> str:
    """Save four epochs, go back to the second one, train one more, and resume the newest."""
    trainer = own.build(run, CheckpointHook(interval=1), max_epochs=4)
    trainer.train()
    trainer.close()
    trainer = own.build(run, CheckpointHook(interval=1), max_epochs=3)
    trainer.resume("epoch_2", changed="apply")
    trainer.train()
    trainer.close()
    trainer = own.build(run, CheckpointHook(interval=1), max_epochs=3)
    return trainer.resume("auto").name


def weights_alone(own: Rank, run: Path) -> None:
    """Save weights of several kinds without an optimizer, and record them."""
    hook = CheckpointHook(save_optimizer=False, published_keys="state_dict", published_format="safetensors")
    trainer = own.build(run, hook, model=own.divided(Tied()), max_epochs=1, hooks=[hook])
    trainer.train()
    found = weights(trainer)
    trainer.load_checkpoint(run / "epoch_1")
    loaded = weights(trainer)
    trainer.close()
    if own.rank == 0:  # the running averages of others are their own
        assert all(value.equal(found[name]) for name, value in loaded.items())
        torch.save(found, run.with_name("weights.pth"))


def elsewhere(own: Rank) -> str:
    """The error of a plan for a tensor that rank 0 has no part of; "" on the rank that has it."""
    tensor = distribute_tensor(torch.ones(3), DeviceMesh("cpu", [1]), [Replicate()])
    place = Place(("state_dict", "x"), ("state_dict", "x"), "x")
    try:
        plan_of({place: tensor}, own.rank, own.ranks)
    except TypeError as error:
        return str(error)
    return ""


def kept(kind: str, rank: int, rendezvous: str, folder: str) -> None:
    """Do it all."""
    own, runs = Rank(kind, rank, rendezvous), Path(folder)
    said = {**best(own, runs / "best"), "resumed": line(own, runs / "line")}
    weights_alone(own, runs / "alone")
    said["elsewhere"] = elsewhere(own)
    dist.barrier()
    own.report(said)
