"""One rank of the training that `sharded_saves` measures: a model under FSDP2, saved in several ways in turn."""

from __future__ import annotations

import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks.helpers.checkpoint_ways import Ours, Way
from eventloop import Trainer
from eventloop.checkpoint.disk import DISK


class Task(msgspec.Struct, frozen=True):
    """What the ranks do.

    Attributes:
        width, depth: of the model, a stack of linear layers.
        rounds: the turns of each way that count.
        iterations: the iterations of a turn, of which the first ends with a save.
    """

    width: int
    depth: int
    rounds: int
    iterations: int


class Dcp(Way):
    """`torch.distributed.checkpoint.save`, which writes on the training thread."""

    name = "dcp.save"

    def save(self) -> None:
        """Collect the states as its documentation does, and write them."""
        save(self.collected(), storage_writer=self.writer())

    def collected(self) -> dict[str, Any]:
        """Return the states of model and optimizer by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def writer(self) -> FileSystemWriter:
        """Return a writer that syncs the files."""
        self.number += 1
        if dist.get_rank() == 0:  # all ranks have written the save before the last
            DISK.remove(self.directory / str(self.number - 2))
        return FileSystemWriter(self.directory / str(self.number), sync_files=True)


class DcpThread(Dcp):
    """`async_save` with a thread."""

    name = "dcp.async_save, thread"
    kind = AsyncCheckpointerType.THREAD
    _future: Any = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        super().__init__(model, optimizer, directory)
        self._group = dist.new_group(backend="gloo")  # its thread makes collectives beside the training's

    def save(self) -> None:
        """Stage, and hand over."""
        self._future = async_save(
            self.collected(),
            storage_writer=self.writer(),
            process_group=self._group,
            async_checkpointer_type=self.kind,
        )

    def wait(self) -> None:
        """Wait for its future."""
        if self._future is not None:
            self._future.result()


class DcpProcess(DcpThread):
    """`async_save` with a process."""

    name = "dcp.async_save, process"
    kind = AsyncCheckpointerType.PROCESS


WAYS = (Ours, Dcp, DcpThread, DcpProcess)


def main(rank: int, ranks: int, folder: Path, task: Task) -> None:
    """Train, and let rank 0 write the blocked seconds of the slowest rank, by way and turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(task.width, task.width) for _ in range(task.depth)))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(8, task.width), torch.randn(8, task.width)
    ways = [way(model, optimizer, folder / str(n)) for n, way in enumerate(WAYS)]
    running = [_turns(way, batch, task.iterations) for way in ways]
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(-1, task.rounds):
        for way, turns in zip(ways, running, strict=True):
            slowest = torch.tensor(next(turns))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 0:
                taken[way.name].append(float(slowest))
    if rank == 0:
        (folder / "result.json").write_bytes(msgspec.json.encode(taken))
    dist.barrier()


def _turns(way: Way, batch: tuple[torch.Tensor, torch.Tensor], iterations: int) -> Any:
    """Train for ever, a turn at each `next`, and yield the seconds for which it was blocked."""
    default: dict[str, Any] = dict.fromkeys(("preemption", "garbage_collection", "logger"))
    if not (hooks := way.hooks()):
        default["checkpoint"] = None
    trainer = Trainer(
        way.model,
        optimizer=way.optimizer,
        max_iters=10**9,
        hooks=hooks,
        default_hooks=default,
        writers=[],
        work_dir=way.directory.with_name(f"run_{way.directory.name}"),
    )
    way.attach(trainer)
    way.due = True
    done = 0
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(repeat(batch)):
            if done == iterations:
                way.wait()
                yield way.blocked
                way.blocked, way.due, done = 0.0, True, 0
            done += 1
            trainer.outputs = {"loss": F.mse_loss(way.model(inputs), target)}


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        msgspec.json.decode(sys.argv[4], type=Task),
    )
