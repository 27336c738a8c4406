"""Resume, say from what, and train until killed; one of the ranks of test_restarts.py."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eventloop import Trainer
from eventloop.hooks import CheckpointHook

RANK, LATE = int(sys.argv[1]), float(sys.argv[3])
STEP = 0.02
"""Seconds of an iteration, in which a save can be under way when the rank is killed."""


def step(trainer: Trainer, batch: Any) -> torch.Tensor:
    time.sleep(STEP)
    inputs, target = batch
    return F.cross_entropy(trainer.model(inputs), target)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(200, 200))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        train_loader=[(torch.randn(4, 200), torch.tensor([0, 1, 2, 0]))] * 1000,
        max_iters=1_000_000,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)],
        work_dir=Path("run"),
        writers=[],
    )
    dist.barrier()
    Path(f"{sys.argv[2]}-{RANK}").touch()
    time.sleep(LATE * RANK)
    try:
        trainer.resume("auto")
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        found: list[Any] = [trainer.iter, hashlib.sha256(weights).hexdigest()]
    except FileNotFoundError:
        found = ["none"]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    trainer.train()


if __name__ == "__main__":
    main()
