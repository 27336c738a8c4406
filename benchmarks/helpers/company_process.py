"""Run one training of `company` in a process of its own: import everything, say "ready", wait for a line, train, end.

    python -m benchmarks.helpers.company_process '{"engine": "by hand", "training": {...}, ...}'

It answers with a `Seen` as JSON, and ends as any Python program does. Two ranks are two such processes, which find each
other by the environment variables that torchrun sets.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.helpers.company_engines import ENGINES
from benchmarks.helpers.company_job import Job, Notes, Seen, Training
from benchmarks.helpers.company_peers import PEERS

READY = b"ready\n"
WRAPS_ITSELF = "Lightning"


class Task(msgspec.Struct, frozen=True):
    """What a process is to do."""

    engine: str
    training: Training
    directory: str
    loader_workers: bool = False
    sharded: bool = False


def main() -> None:
    """Prepare, wait, train, answer."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train = ENGINES[task.engine]() if task.engine in ENGINES else PEERS[task.engine][1]()
    if task.sharded:
        import_module("benchmarks.helpers.company_shards")
    warm_up(task.training)
    answers.write(READY)
    if not sys.stdin.readline():
        return
    job = Job(task.training, workers=task.loader_workers)
    if task.sharded:
        import_module("benchmarks.helpers.company_shards").shard(job)
    elif dist.is_initialized() and task.engine != WRAPS_ITSELF:
        job.model = DistributedDataParallel(job.model)
    notes = Notes(job)
    train(job, notes, Path(task.directory), rank)
    answers.write(msgspec.json.encode(Seen.of(job, notes)) + b"\n")
    if dist.is_initialized():
        dist.destroy_process_group()
        # A DistributedDataParallel is in a cycle that keeps gloo's threads: if the interpreter's end finds them,
        # it aborts (one process in six, torch 2.13).
        del job, notes, train
        gc.collect()


def warm_up(training: Training) -> None:
    """Take a step with a model that is thrown away; the first one of a process imports more of torch."""
    job = Job(msgspec.structs.replace(training, width=8, inputs=8, batch=2, iterations=1))
    job.step(job.val_batch)


if __name__ == "__main__":
    main()
