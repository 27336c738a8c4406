"""Resume again and again beside a saver that lags; one of the ranks of test_restarts.py.

Each restart makes a new process group and a new trainer, and each rank comes late by a random time. Meanwhile the
saver's process (`saver`, started as rank 2) completes, replaces and removes checkpoints in the same directory.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.manifest import Label

RANK, RESTARTS = int(sys.argv[1]), int(sys.argv[3])
RUN = Path("run")
LATE = 0.03
"""Seconds that a rank comes late at most."""
DEADLINE = timedelta(seconds=60)


def make(work_dir: Path, iterations: int = 1_000_000) -> Trainer:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    return Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=[batch] * 4,
        max_iters=iterations,
        work_dir=work_dir,
        writers=[],
    )


def resumed(random_times: random.Random) -> list[Any]:
    """Resume as a restarted rank does; return the iteration and a digest of the weights, or "none"."""
    trainer = make(RUN)
    time.sleep(random_times.uniform(0, LATE))
    try:
        trainer.resume("auto", changed="keep")  # the saver is of a run of one rank
    except FileNotFoundError:
        return ["none"]
    finally:
        trainer.bus.close()
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    return [trainer.iter, hashlib.sha256(weights).hexdigest()]


def restart_often() -> list[list[Any]]:
    found, random_times = [], random.Random(RANK)
    for number in range(RESTARTS):
        place = f"file://{Path.cwd()}/rendezvous-{number}"
        dist.init_process_group("gloo", init_method=place, rank=RANK, world_size=2, timeout=DEADLINE)
        found.append(resumed(random_times))
        dist.destroy_process_group()
    Path("over").touch()
    return found


def save_beside() -> None:
    """Complete checkpoints of other weights each, keep one or two, and now and then remove all."""
    random_times = random.Random(2)
    source = make(Path("source"), 1)
    source.train()
    source.close()
    state = load_checkpoint(source.work_dir / "iter_1")
    number = 1
    while not Path("over").exists():
        number += 1
        state["meta"]["iter"] = number
        state["state_dict"]["weight"].fill_(number)
        save_checkpoint(state, RUN / f"iter_{number}", Label(sequence=number))
        kept = 0 if number % 5 == 0 else random_times.choice([1, 2])
        for old in sorted(RUN.glob("iter_*"), key=lambda path: int(path.name[5:]))[: -kept or None]:
            hidden = RUN / f".{old.name}.old"
            with suppress(FileNotFoundError):
                old.rename(hidden)
                shutil.rmtree(hidden)
        time.sleep(random_times.uniform(0, LATE))


def main() -> None:
    torch.set_num_threads(1)
    if RANK == 2:
        save_beside()
        said: Any = []
    else:
        said = restart_often()
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
