"""What each rank of a steered training does; `test_steered_ranks` starts it. Prints what happened as JSON.

Commands reach rank 0 alone, as from an inbox, unless a case says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from eventloop import Trainer
from eventloop.commands.messages import Command, new_id
from eventloop.commands.record import NAME
from eventloop.hooks import CheckpointHook

RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
SAID: dict[str, Any] = {}
POLL = 0.005
Sent = dict[int, list[tuple[str, ...]]]


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return as many batches, others on each rank."""
    inputs = torch.randn(count * 3, 2, generator=torch.Generator().manual_seed(RANK))
    return list(zip(inputs.split(3), (inputs[:, 0] > 0).long().split(3), strict=True))


def trainer_of(name: str, per_epoch: int = 4, **options: Any) -> Trainer:
    """Return a trainer of all ranks, of twelve iterations.

    The model has one parameter: DistributedDataParallel adds up several ones of three ranks in another order in the
    first iteration of a process, so that a resumed run differs in the last bits.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Dropout(0.2)))
    arguments: dict[str, Any] = {
        "train_loader": batches(per_epoch),
        "val_loader": batches(2),
        "max_epochs": 12 // per_epoch,
        "hooks": [CheckpointHook(interval=5, by_epoch=False)],
        "writers": [],
        "default_hooks": {"garbage_collection": None, "trace": None},
        **options,
    }
    if "max_iters" in options:
        arguments.pop("max_epochs")
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        work_dir=Path("runs") / name,
        **arguments,
    )
    trainer.command(scale)
    trainer.command(fail)
    return trainer


def scale(trainer: Trainer, amount: float) -> None:
    """Scale the weights."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(amount)


def fail(trainer: Trainer, rank: int) -> None:
    """Fail on one rank, or on all of them."""
    if rank in (RANK, -1):
        raise ValueError("no luck")


def give(trainer: Trainer, *words: str) -> None:
    """Give a command on this rank."""
    trainer.stops.commands.append(Command(id=new_id(), command=words[0], words=[*words[1:]], source="anna"))


def run(trainer: Trainer, sent: Sent, *, name: str = "", ranks: tuple[int, ...] = (0,), **more: Any) -> None:
    """Train, with commands in iterations on some ranks, and note what became of it."""
    happened: list[Any] = []

    def send(event: Any) -> None:
        if RANK in ranks:
            for words in sent.get(event.iter + 1, ()):
                give(trainer, *words)

    def record(event: Any) -> None:
        reason = getattr(event, "reason", "")
        happened.append([event.iter, event.epoch, event.command, *([reason] if reason else [])])

    trainer.bus.subscribe(send, "after_train_iter", name="send")
    trainer.bus.subscribe(record, "command_applied", "command_refused", name="record")
    code: Any = None
    try:
        trainer.train()
    except SystemExit as ended:
        code = ended.code
    values = [
        getattr(value, "to_local", lambda value=value: value)()
        for value in trainer.model.state_dict().values()
    ]
    state = b"".join(value.numpy().tobytes() for value in values)
    SAID[name or trainer.work_dir.name] = {
        "happened": happened,
        "at": trainer.iter,
        "weights": hashlib.sha256(state).hexdigest(),
        "code": code,
        "saved": sorted(path.name for path in trainer.work_dir.glob("*_*")),
        "reason": trainer.stop_reason,
        **more,
    }
    trainer.close()
    dist.barrier()


def saving_on(ranks: tuple[int, ...], event: str = "after_train_iter") -> None:
    """Save by a handler, on some ranks."""
    trainer = trainer_of(f"save on {ranks} {event}", hooks=[CheckpointHook(save_last=False)])

    def save(each: Any) -> None:
        if each.iter in (1, 8) and RANK in ranks:
            trainer.save_checkpoint()
            trainer.save_checkpoint()

    trainer.bus.subscribe(save, event)
    run(trainer, {})


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the test has a timeout."""
    while not condition():
        time.sleep(POLL)


def paused(name: str, act: Callable[[Trainer], object], rank: int) -> None:
    """Pause, and let one rank do something meanwhile."""
    trainer = trainer_of(name)

    def work() -> None:
        wait_until(lambda: trainer.commands.paused)
        act(trainer)

    thread = threading.Thread(target=work)
    if rank == RANK:
        thread.start()
    run(trainer, {3: [("pause",)]})
    if rank == RANK:
        thread.join()


def save_and_go(trainer: Trainer) -> None:
    """End a pause, after a checkpoint."""
    give(trainer, "checkpoint")
    give(trainer, "go")


def signalled(name: str, ranks: tuple[int, ...]) -> None:
    """Save on a signal that some ranks get."""
    trainer = trainer_of(
        name,
        hooks=[CheckpointHook(save_last=False)],
        default_hooks={"preemption": {"checkpoint_signals": ("SIGUSR1",)}, "trace": None},
    )

    def kill(event: Any) -> None:
        if event.iter == 5 and RANK in ranks:
            os.kill(os.getpid(), signal.SIGUSR1)

    trainer.bus.subscribe(kill, "before_train_iter")
    run(trainer, {})


def sharded() -> None:
    """Save a model that is divided over the ranks, by a handler on all of them and by a command."""
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def build() -> Trainer:
        return Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=F.cross_entropy,
            writers=[],
            train_loader=batches(4),
            max_epochs=2,
            hooks=[CheckpointHook(save_last=False)],
            work_dir=Path("runs/sharded"),
        )

    trainer, kept = build(), dict[int, torch.Tensor]()
    trainer.bus.subscribe(
        lambda event: trainer.save_checkpoint() if event.iter == 1 else None, "after_train_iter"
    )
    trainer.bus.subscribe(lambda event: kept.update({event.iter: whole(model)}), "command_applied")
    answers: list[str] = []
    trainer.bus.subscribe(lambda event: answers.append(Path(event.path).name), "checkpoint_saved")
    run(trainer, {5: [("checkpoint",)]})
    equal = []
    for at, weights in kept.items():
        build().resume(f"iter_{at}")
        equal.append([at, bool(torch.equal(whole(model), weights))])
    SAID["sharded"] |= {"equal": equal, "weights": ""}
    if RANK == 0:
        SAID["sharded"]["durable"] = answers


def whole(model: Any) -> torch.Tensor:
    """Return the weights of all ranks."""
    full: torch.Tensor = model.weight.full_tensor().detach().clone()
    return full


PLAN: Sent = {
    2: [("scale", "0.5")],
    4: [("scale", "2.0"), ("checkpoint",)],
    7: [("validate",), ("scale", "0.9")],
}


def repetition() -> None:
    """Steer, repeat, stop in the middle and resume."""
    run(trainer_of("steered"), PLAN)
    run(trainer_of("repeated", commands=Path("runs/steered") / NAME), {})
    first = trainer_of("resumed", hooks=[CheckpointHook(interval=5, by_epoch=False, save_last=False)])
    first.bus.subscribe(lambda event: first.stop("test") if event.iter == 8 else None, "before_train_iter")
    run(first, PLAN, name="stopped")
    then = trainer_of("resumed")
    then.resume("auto")
    run(then, {})
    for per_epoch in (1, 2):
        run(trainer_of(f"epochs of {per_epoch}", per_epoch), {4: [("scale", "2.0")]})
        run(
            trainer_of(
                f"repeated, {per_epoch}", per_epoch, commands=Path(f"runs/epochs of {per_epoch}") / NAME
            ),
            {},
        )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=RANK,
        world_size=int(sys.argv[3]),
        timeout=timedelta(seconds=60),
    )
    repetition()
    run(trainer_of("by iteration", max_iters=12, val_interval=4), PLAN)
    run(
        trainer_of(
            "again by iteration", max_iters=12, val_interval=4, commands=Path("runs/by iteration") / NAME
        ),
        {},
    )
    run(trainer_of("each validated", max_iters=12, val_interval=1), {4: [("scale", "2.0")]})
    last = dist.get_world_size() - 1
    run(
        trainer_of("failures"),
        {2: [("fail", str(last)), ("scale", "0.5")], 5: [("fail", "-1")], 6: [("much",)]},
    )
    run(trainer_of("stop"), {5: [("stop", "enough")]})
    saving_on((*range(last + 1),))
    saving_on((last,))
    saving_on((*range(last + 1),), "after_val_epoch")
    paused("go", save_and_go, 0)
    paused("signal in a pause", lambda trainer: os.kill(os.getpid(), signal.SIGTERM), last)
    sharded()
    signalled("signal to one", (last,))
    signalled("signal to all", (*range(last + 1),))
    sys.stdout.write(json.dumps(SAID))


if __name__ == "__main__":
    main()
