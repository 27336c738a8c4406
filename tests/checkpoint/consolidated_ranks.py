"""What each rank does that saves an FSDP2 model; `test_consolidate` and `test_load_sharded` start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_sharded
from eventloop.hooks import CheckpointHook, EMAHook

PROGRAM = (
    "import sys\nfrom tests.checkpoint.consolidated_ranks import main\nmain(int(sys.argv[1]), sys.argv[2])"
)
WIDE = "import sys\nfrom tests.checkpoint.consolidated_ranks import save_wide\nsave_wide(sys.argv[2])"
LAYERS, WIDTH = 24, 1024
"""The layers of a model of 96 MiB, and the width of each, which has 4 MiB."""


class Net(nn.Module):
    """17 rows, which two ranks do not divide evenly, and buffers of other types and without values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.head = nn.Linear(4, 17), nn.Linear(17, 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 5))
        self.register_buffer("halves", torch.arange(6, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each sample."""
        out: torch.Tensor = self.head(self.one(x).relu())
        return out


def begin(rank: int, rendezvous: str, ranks: int) -> DeviceMesh:
    """Join the other ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def save(model: nn.Module, folder: Path, batch: tuple[torch.Tensor, ...], *hooks: Any) -> None:
    """Train two epochs; the run is in `run`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=[batch] * 3,
        max_epochs=2,
        work_dir=folder / "run",
        writers=[],
        hooks=[CheckpointHook(interval=1), *hooks],
    )
    trainer.train()
    trainer.close()


def fill(path: Path, mesh: DeviceMesh, folder: Path, rank: int) -> list[str]:
    """Fill weights that are divided by columns, one rank after the other, and save what they have then."""
    weights = {f"state_dict.{name}": tensor.fill_(0) for name, tensor in Net().state_dict().items()}
    for name in ("state_dict.one.weight", "state_dict.head.weight"):
        weights[name] = distribute_tensor(weights[name], mesh, [Shard(1)])
    left_out = []
    for turn in range(2):  # which never ends if a rank waits for the other one
        if turn == rank:
            left_out = load_sharded(path, weights)
        dist.barrier()
    whole = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in weights.items()}
    torch.save(whole, folder / f"filled_{rank}.pt")
    return left_out


def refused_sum(path: Path, mesh: DeviceMesh) -> str:
    """Ask for the values of an unfinished sum."""
    tensor = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    try:
        load_sharded(path, {"state_dict.head.bias": tensor})
    except CheckpointError as error:
        return str(error)
    return "filled"


def main(rank: int, rendezvous: str) -> None:
    """Do it all, and print what came of it."""
    mesh, folder = begin(rank, rendezvous, 2), Path(rendezvous).parent
    model = fully_shard(Net(), mesh=mesh)
    save(model, folder, (torch.randn(8, 4), torch.randint(3, (8,))), EMAHook())  # type: ignore[arg-type]
    dist.barrier()
    path = folder / "run" / "epoch_2"
    said = {"left_out": fill(path, mesh, folder, rank), "sum": refused_sum(path, mesh)}
    sys.stdout.write(json.dumps(said))
    dist.destroy_process_group()


def save_wide(rendezvous: str) -> None:
    """Save a model of 96 MiB, as one rank, without an optimizer's state."""
    mesh, path = begin(0, rendezvous, 1), Path(rendezvous).parent
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    fully_shard(model, mesh=mesh)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=[(torch.randn(1, WIDTH), torch.tensor([1]))],
        max_epochs=1,
        work_dir=path / "run",
        writers=[],
        hooks=[CheckpointHook(interval=1)],
    )
    trainer.train()
    trainer.close()
    sys.stdout.write("{}")
    dist.destroy_process_group()
