"""The training of several ranks that is disturbed: what every checkpoint of it must hold is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.directory import scan
from eventloop.events import Event
from eventloop.hooks import CheckpointHook, EMAHook, Hook

RANKS = {"FSDP2": 2, "TP": 2, "HSDP": 4}
"""The number of ranks, by what divides the model."""
ITERATIONS, BATCHES = 8, 3
KEPT = 2
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """A network with 17 rows where FSDP2 divides it, which no number of ranks divides, and with dropout."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Linear(8, rows), nn.Linear(rows, 6), nn.Linear(6, 3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each sample."""
        self.seen.add_(len(x))
        out: torch.Tensor = self.head(F.dropout(self.two(self.one(x).relu()), 0.3))
        return out


def plain_model(kind: str) -> Net:
    """Return the model of one process."""
    return Net(16 if kind == "TP" else 17)


def divided(kind: str) -> Net:
    """Return the model divided over the ranks."""
    model, ranks = plain_model(kind), RANKS[kind]
    if kind == "TP":
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(model, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})
        return model
    names = ("copies", "shards") if kind == "HSDP" else ("shards",)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    fully_shard(model.one, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def join_ranks(kind: str, rank: int, rendezvous: Path) -> None:
    """Begin to exchange messages with the other ranks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS[kind],
        timeout=timedelta(seconds=60),
    )


def make_trainer(kind: str, rank: int, directory: Path, others: Sequence[Hook] = (), **hook: Any) -> Trainer:
    """Return a trainer that saves after each iteration, on one rank."""
    share = 0 if kind == "TP" else rank
    generator = torch.Generator().manual_seed(1 + share)
    data = [
        (torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(BATCHES)
    ]
    model = divided(kind)
    torch.manual_seed(2 + share)  # of the dropout, which is another one on each rank with other data
    options = {"interval": 1, "by_epoch": False, "max_keep_ckpts": KEPT, **hook}
    return Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn=F.cross_entropy,
        train_loader=data,
        max_iters=ITERATIONS,
        work_dir=directory,
        writers=[],
        hooks=[EMAHook(momentum=0.3), CheckpointHook(**options), *others],
        default_hooks={"garbage_collection": None, "preemption": None, "logger": None},
    )


def whole_state(trainer: Trainer) -> Tensors:
    """Return the whole tensors of the weights, of the optimizer and of the average; a collective."""
    (average,) = (hook.ema_model for hook in trainer.hooks if isinstance(hook, EMAHook))
    assert average is not None
    optimizer: Any = trainer.optimizer
    found = dict(_named("model", trainer.model.state_dict()))
    found |= _named("average", average.state_dict())
    for name, parameter in trainer.model.named_parameters():
        found |= _named(f"optimizer.{name}", optimizer.state[parameter])
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in found.items()
    }


def _named(prefix: str, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, each in tensors.items():
        if isinstance(each, torch.Tensor) and name != "steps":
            yield f"{prefix}.{name.removeprefix('module.')}", each


def saved_state(kind: str, checkpoint: Mapping[str, Any]) -> Tensors:
    """Return the same of a checkpoint that one process has loaded: the average is in the model's place."""
    found = dict(_named("average", checkpoint["state_dict"]))
    found |= _named("model", checkpoint["ema_state_dict"])
    for number, (name, _) in enumerate(plain_model(kind).named_parameters()):
        found |= _named(f"optimizer.{name}", checkpoint["optimizer"]["state"][number])
    return found


def different(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return the names that only one has, and those of tensors that differ in a bit."""
    return sorted(
        {*ours} ^ {*theirs}
        | {name for name in {*ours} & {*theirs} if not torch.equal(ours[name], theirs[name])}
    )


def record(kind: str, rank: int, folder: Path) -> None:
    """Train without checkpoints, and store the whole state after each iteration."""
    trainer = make_trainer(kind, rank, folder / "run", interval=-1, save_last=False)

    def store(event: Event) -> None:
        state = whole_state(trainer)
        if rank == 0:
            torch.save(state, folder / f"{event.iter + 1}.pth")  # type: ignore[attr-defined]

    trainer.bus.subscribe(store, "after_train_iter", priority=100)
    trainer.train()
    trainer.close()


def check_whole(kind: str, directory: Path, expected: Path) -> list[int]:
    """Compare every checkpoint with the undisturbed run at its iteration; return the iterations.

    A saver that outlived its training may replace a checkpoint meanwhile.
    """
    found = scan(directory)
    assert not found.damaged, found.damaged
    iterations = []
    for path in found.paths:
        try:
            state = load_checkpoint(path)
        except Exception:
            if path.exists():
                raise
            continue
        iteration = int(state["meta"]["iter"])
        iterations.append(iteration)
        wrong = different(saved_state(kind, state), torch.load(expected / f"{iteration}.pth"))
        assert not wrong, f"{path} holds other values than the undisturbed run had: {wrong}"
    return iterations


def wait_for_saves(trainer: Trainer, under_way: int = 0) -> None:
    """Let each iteration wait until at most so many saves are under way."""
    (hook,) = (hook for hook in trainer.hooks if isinstance(hook, CheckpointHook))

    def wait(event: Event) -> None:
        running = hook.saves.under_way
        for saving in running[: len(running) - under_way]:
            saving.written.wait(60.0)

    for priority in (0, 100):  # before the hook reports them, and after it has begun others
        trainer.bus.subscribe(wait, "after_train_iter", priority=priority, name=f"wait at {priority}")


def finish(
    kind: str, rank: int, directory: Path, expected: Path, prepare: Callable[[Trainer], object]
) -> None:
    """Resume where there is a checkpoint, go on to the end, and compare with the undisturbed run."""
    trainer = make_trainer(kind, rank, directory)
    try:
        trainer.resume("auto")
    except FileNotFoundError:
        assert trainer.iter == 0
    else:
        wrong = different(whole_state(trainer), torch.load(expected / f"{trainer.iter}.pth"))
        assert not wrong, f"resumed at {trainer.iter} with other values: {wrong}"
    prepare(trainer)
    trainer.train()
    trainer.close()
    wrong = different(whole_state(trainer), torch.load(expected / f"{ITERATIONS}.pth"))
    assert not wrong, f"the run ended with other values: {wrong}"
