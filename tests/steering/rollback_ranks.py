"""Go back on two ranks; one of the ranks of test_rollback_ranks.py, which prints what happened there as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, RollbackHook
from tests.support.rolled_back import go_back, once, skip_by_hand

RANK = int(sys.argv[1])
FOLDER = Path(sys.argv[2]).parent


def model_of(kind: str) -> nn.Module:
    """Return the model, the same weights on all ranks, divided or wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(model)


def make(kind: str, directory: Path, **options: Any) -> Trainer:
    """Return a trainer of 16 iterations in two epochs whose ranks have random numbers of their own."""
    model = model_of(kind)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    )
    torch.manual_seed(10 + RANK)
    hooks = [CheckpointHook(2, by_epoch=False), *options.pop("hooks", [])]
    return Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn=F.cross_entropy,
        hooks=hooks,
        train_loader=DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, RANK)),
        max_epochs=2,
        work_dir=directory,
        writers=[],
        **options,
    )


def result(trainer: Trainer) -> dict[str, Any]:
    """Return the counters, and a digest of the weights, the optimizer's state and the random state of this rank."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    for value in (*trainer.model.state_dict().values(), *states):
        local = getattr(value, "to_local", lambda value=value: value)()
        digest.update(local.detach().contiguous().numpy().tobytes())
    trainer.close()
    return {"iter": trainer.iter, "epoch": trainer.epoch, "bits": digest.hexdigest()}


def events_of(trainer: Trainer) -> list[Any]:
    """Return a list that gets what the run does about going back, on this rank."""
    events: list[Any] = []

    def add(event: Any) -> None:
        about = getattr(event, "skipped", None), getattr(event, "reason", "")
        events.append([type(event).__name__, event.iter, *about])

    trainer.bus.subscribe(add, "rolled_back", "command_refused", "stop_requested", name="events")
    return events


def one_rank_requests(kind: str) -> dict[str, Any]:
    """Rank 1 alone asks, in iteration 9; then a new trainer resumes from that checkpoint."""
    trainer = make(kind, FOLDER / kind)
    events = events_of(trainer)
    if RANK == 1:
        go_back(trainer, 9, "iter_6", 3)
    trainer.train()
    went = result(trainer)
    fresh = make(kind, FOLDER / f"{kind}-fresh")
    fresh.resume(FOLDER / kind / "iter_6")
    skip_by_hand(fresh, 3)
    fresh.train()
    return {"events": events, "went": went, "fresh": result(fresh)}


def resume_after(kind: str) -> dict[str, Any]:
    """All ranks ask, and the run is stopped in the first iteration behind; a resume goes on as one that was not."""
    whole = make(kind, FOLDER / f"{kind}-whole")
    go_back(whole, 9, "iter_6", 3)
    whole.train()
    expected = result(whole)
    trainer = make(kind, FOLDER / f"{kind}-stopped")
    go_back(trainer, 9, "iter_6", 3)
    once(
        trainer,
        "rolled_back",
        6,
        lambda: once(trainer, "after_train_iter", 6, lambda: trainer.stop("enough")),
    )
    trainer.train()
    stopped = trainer.iter
    trainer.close()
    resumed = make(kind, FOLDER / f"{kind}-stopped")
    resumed.resume()
    resumed.train()
    return {"stopped": stopped, "expected": expected, "resumed": result(resumed)}


def refused(kind: str) -> dict[str, Any]:
    """Rank 1 asks for a checkpoint that does not exist, and the run ends as one in which nobody asks."""
    trainer = make(kind, FOLDER / f"{kind}-refused")
    events = events_of(trainer)
    if RANK == 1:
        go_back(trainer, 9, "iter_5")
    trainer.train()
    asked = result(trainer)
    plain = make(kind, FOLDER / f"{kind}-plain")
    plain.train()
    return {"events": events, "asked": asked, "plain": result(plain)}


def hook(kind: str) -> dict[str, Any]:
    """The loss of rank 0 is lost once, and that of rank 1 never."""
    trainer = make(
        kind,
        FOLDER / f"{kind}-hook",
        hooks=[RollbackHook("strange", margin=1, consecutive=1, max_rollbacks=1)],
        default_hooks={"logger": {"interval": 2}},
    )
    events = events_of(trainer)
    lost = [8, 12]

    def put(trainer: Trainer, event: Any) -> None:
        is_lost = RANK == 0 and event.batch_idx + 8 * event.epoch in lost[:1]
        if is_lost:
            del lost[0]
        trainer.metrics.put_scalar("strange", float("nan") if is_lost else 1.0)

    trainer.bus.subscribe(put, "after_train_iter")
    trainer.bus.subscribe(
        lambda trainer, event: trainer.bus.flush(), "after_train_iter", priority="LOWEST", name="read"
    )
    trainer.train()
    reason = trainer.stop_reason
    return {"events": events, "reason": reason, **result(trainer)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "asks DDP": lambda: one_rank_requests("DDP"),
    "asks FSDP2": lambda: one_rank_requests("FSDP2"),
    "resumes DDP": lambda: resume_after("DDP"),
    "resumes FSDP2": lambda: resume_after("FSDP2"),
    "refused": lambda: refused("DDP"),
    "hook": lambda: hook("DDP"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    sys.stdout.write(json.dumps({name: case() for name, case in CASES.items()}))
    dist.destroy_process_group()
