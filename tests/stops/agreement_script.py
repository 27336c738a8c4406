"""One of the two ranks of test_agreement.py: stops that one of them asks for, and what both of them do then.

Arguments: the rank, a rendezvous file. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, PreciseBN
from tests.training.test_hand_written import train_by_hand

RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
SAID: dict[str, Any] = {}
TOLD: list[str] = []
"""What is logged in a run."""
TRIALS = [(1, 0), (3, 1), (4, 0), (6, 1)]
"""Which iteration (of two epochs of four) a signal comes in, and to which rank."""


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A loader."""
    inputs = torch.randn(count * 3, 2, generator=torch.Generator().manual_seed(RANK))
    return list(zip(inputs.split(3), (inputs[:, 0] > 0).long().split(3), strict=True))


def trainer_of(name: str, **options: Any) -> tuple[Trainer, list[Any]]:
    """A trainer of both ranks, and a list of what it announces."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model = plain if options.pop("plain", False) else DistributedDataParallel(plain)
    options = {"train_loader": batches(4), "max_epochs": 2, **options}
    hooks = options.pop("hooks", [])
    if "max_iters" in options:
        del options["max_epochs"]
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        work_dir=Path("runs") / name,
        default_hooks={"garbage_collection": None},
        hooks=[CheckpointHook(interval=-1), *hooks],
        **options,
    )
    seen: list[Any] = []
    trainer.bus.subscribe(
        lambda event: seen.append([event.__struct_config__.tag, event.reason]),
        *(
            "stop_requested",
            "preemption_requested",
            "after_train_epoch",
            "after_val",
            "after_train",
            "after_run",
        ),
    )
    return trainer, seen


def print_run(name: str, trainer: Trainer, seen: list[Any], **more: Any) -> None:
    """What became of a run."""
    saved = [path.name for path in trainer.work_dir.glob("*_*")] if RANK == 0 else []
    SAID[name] = {"at": [trainer.iter, trainer.epoch], "seen": seen, "saved": saved, **more}


def run(
    name: str, act: Callable[[Trainer], None], event: str, count: int, rank: int | None = None, **options: Any
) -> None:
    """Train; at the `count`-th event one rank, or each of them, does something."""
    trainer, seen = trainer_of(name, **options)
    happened = []
    logged: list[int] = []
    TOLD.clear()
    trainer.bus.subscribe(lambda event: logged.append(event.step), "scalars_logged", offload="thread")

    def maybe(event: Any) -> None:
        happened.append(event)
        if len(happened) == count and rank in (None, RANK):
            act(trainer)

    trainer.bus.subscribe(maybe, event)
    trainer.train()
    print_run(name, trainer, seen, logged=logged, told=[*TOLD])
    trainer.close()


def send(trainer: Trainer) -> None:
    """To this rank."""
    os.kill(os.getpid(), signal.SIGTERM)


def stop(trainer: Trainer) -> None:
    """As a handler does."""
    trainer.stop("enough")


def signals() -> None:
    """A signal to one rank, in iterations, in passes, between them."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # it decides: `train` returns
    for iteration, rank in TRIALS:
        run(f"signal {iteration} {rank}", send, "after_train_iter", iteration, rank)
    run("by iteration", send, "after_train_iter", 3, 1, max_iters=8)
    # rank 0 has more batches of the validation than rank 1
    run("validation", send, "before_val_iter", 2, 1, val_loader=batches(6 - RANK))
    run("long validation", send, "before_val_iter", 5, 0, val_loader=batches(6 - 2 * RANK))
    run("no length", send, "before_val_iter", 2, 0, val_loader=NoLength(3))
    run("edge", send, "after_train_epoch", 1, 0)
    # without collectives of the model's own the ranks may train unequally many iterations
    run("uneven", send, "after_train_iter", 2, 1, train_loader=batches(4 + RANK), plain=True)
    loaders: dict[str, Any] = {"train_loader": batches(2 + RANK), "val_loader": batches(2 + RANK)}
    run("unequal", send, "before_run", 99, plain=True, **loaders)
    run("longer rank", send, "after_train_iter", 5, 1, train_loader=batches(4 + 2 * RANK), plain=True)
    ran: list[Any] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        """Run, and send a signal to rank 1 in the second batch of the pass."""
        ran.append(batch)
        if len(ran) == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(batch[0])

    run("precise", send, "before_run", 99, 1, hooks=[PreciseBN(1, 4, forward=forward)])
    SAID["precise"]["ran"] = len(ran)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class NoLength:
    """A loader that does not say how many batches it has."""

    def __init__(self, count: int) -> None:
        self._batches = batches(count)

    def __iter__(self) -> Any:
        return iter(self._batches)


def stops() -> None:
    """`trainer.stop` on one rank, and on both."""
    run("stop of one", stop, "after_train_iter", 2, 1)
    run("stop of both", stop, "after_train_iter", 2)
    run("early stop", stop, "after_val_epoch", 1, val_loader=batches(2))
    run("before training", stop, "before_train", 1, 0)
    run("too late", stop, "after_train", 1, 0)


def numbers() -> None:
    """A score that the ranks have in common but for what a float of 32 bits has no room for."""
    trainer, _ = trainer_of("numbers", val_loader=batches(2), val_step=lambda t, b: {"x": 1 + RANK * 2e-12})
    SAID["numbers"] = trainer.val()


def again() -> None:
    """A run that was stopped goes on, in the same process; a hand-written loop stops too."""
    trainer, seen = trainer_of("again")
    if RANK == 1:
        trainer.bus.subscribe(lambda event: trainer.stop("enough"), "after_train_iter", once=True)
    trainer.train()
    stopped = trainer.iter
    trainer.train()
    print_run("again", trainer, seen, stopped=stopped)

    trainer, seen = trainer_of("own loop")
    if RANK == 1:
        trainer.bus.subscribe(lambda event: trainer.stop("enough"), "after_train_iter", start=4, once=True)
    train_by_hand(trainer, batches(4))
    print_run("own loop", trainer, seen)


def exits() -> None:
    """Without a handler of the program's own both ranks end alike."""
    trainer, seen = trainer_of("exit")
    if RANK == 1:
        trainer.bus.subscribe(
            lambda event: os.kill(os.getpid(), signal.SIGTERM), "after_train_iter", once=True
        )
    code: Any = None
    try:
        trainer.train()
    except SystemExit as ended:
        code = ended.code
    print_run("exit", trainer, seen, code=code)


def record_message(record: logging.LogRecord) -> bool:
    """Of what is logged."""
    TOLD.append(record.getMessage())
    return True


def main() -> None:
    """All of them, in one process group."""
    torch.set_num_threads(1)
    logging.getLogger("eventloop").addFilter(record_message)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    for part in (signals, stops, numbers, again, exits):
        part()
    sys.stdout.write(json.dumps(SAID))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
