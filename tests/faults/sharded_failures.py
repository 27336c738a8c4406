"""A training of two ranks in which the third save fails on one of them; `test_sharded_failures` starts it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving import group_writer
from eventloop.checkpoint.sharded import encode, session
from eventloop.events import CheckpointFailed, CheckpointSaved, Event
from eventloop.hooks import CheckpointHook
from tests.faults.sharded_training import (
    different,
    join_ranks,
    make_trainer,
    saved_state,
    wait_for_saves,
    whole_state,
)

KIND, FAILS = "FSDP2", 3
"""What divides the model, and the number of the save that fails."""
LIMIT = 2000
"""The largest size of a file where the disk is full; a vote is smaller, a shard is larger."""
PATIENCE = 1.0


class Disturbed:
    """The training of one rank.

    Args:
        folder: the folder of all ranks.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.run = folder, rank, folder / "run"
        self.trainer = make_trainer(KIND, rank, self.run)
        (self.hook,) = (hook for hook in self.trainer.hooks if isinstance(hook, CheckpointHook))
        self.printed: dict[str, Any] = {"saved": [], "failed": [], "former": "no save has failed"}
        self.former: dict[str, torch.Tensor] = {}
        bus = self.trainer.bus
        bus.subscribe(self._store_former, "after_train_iter", priority=80, name="store")
        bus.subscribe(lambda event: self.printed["saved"].append(Path(event.path).name), CheckpointSaved)
        bus.subscribe(self._failed, CheckpointFailed)
        wait_for_saves(self.trainer)

    def around_save(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Call functions before the save that fails begins, and once it has ended on this rank."""

        self.at(1, before)
        self.at(100, after)

    def at(self, priority: int, call: Callable[[], object]) -> None:
        """Call a function in the iteration of the save that fails."""

        def handler(event: Event) -> None:
            if self.trainer.iter + 1 == FAILS:
                call()

        self.trainer.bus.subscribe(handler, "after_train_iter", priority=priority, name=f"at {priority}")

    def _store_former(self, event: Event) -> None:
        if self.trainer.iter + 1 == FAILS - 1:
            self.former = whole_state(self.trainer)

    def _failed(self, event: CheckpointFailed) -> None:
        self.printed["failed"].append([Path(event.path).name, event.error])
        state = load_checkpoint(self.run / f"iter_{FAILS - 1}")
        self.printed["former"] = different(saved_state(KIND, state), self.former)

    @property
    def saver(self) -> int:
        """The process id of the saver."""
        assert self.hook.saves.saver is not None
        assert self.hook.saves.saver.process is not None
        return self.hook.saves.saver.process.pid

    def wait(self) -> None:
        """Wait until the saves have ended on this rank."""
        for saving in self.hook.saves.under_way:
            saving.written.wait(60.0)

    @property
    def work(self) -> Path:
        """The directory to which all ranks write the save."""
        return next(self.run.glob(f".iter_{FAILS}.*.tmp"))


def full(training: Disturbed) -> None:
    """Let no file of the second rank's saver be larger than a limit."""
    if training.rank == 1:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(size: int) -> None:
            resource.prlimit(training.saver, resource.RLIMIT_FSIZE, (size, most))

        training.around_save(lambda: limit(LIMIT), lambda: limit(most))


def silent(training: Disturbed) -> None:
    """Stop the second rank's training and saver until the first one has lost its patience."""
    mark = training.folder / "stopped"
    if training.rank == 1:

        def stop() -> None:
            mark.with_suffix(".part").write_text(f"{training.saver} {os.getpid()}")
            mark.with_suffix(".part").rename(mark)
            os.kill(os.getpid(), signal.SIGSTOP)

        training.at(95, stop)
        training.around_save(lambda: os.kill(training.saver, signal.SIGSTOP), lambda: None)
        return

    def go_on() -> None:
        training.wait()
        encode.PATIENCE_SECONDS = former
        for process in mark.read_text().split():
            os.kill(int(process), signal.SIGCONT)

    former = encode.PATIENCE_SECONDS
    training.around_save(lambda: setattr(encode, "PATIENCE_SECONDS", PATIENCE), go_on)


def removed(training: Disturbed) -> None:
    """Remove the directory of all ranks while the second rank's saver stands still, which then makes it again."""
    if training.rank == 1:

        def remove() -> None:
            whole = (training.run / f"iter_{FAILS - 1}" / "__0_0.distcp").stat().st_size
            while [file.stat().st_size for file in training.run.glob(".iter_*.tmp/__0_0.distcp")] != [whole]:
                os.sched_yield()
            shutil.rmtree(training.work)
            os.kill(training.saver, signal.SIGCONT)

        training.at(95, remove)
        training.around_save(lambda: os.kill(training.saver, signal.SIGSTOP), lambda: None)


def other(training: Disturbed) -> None:
    """Add a weight on the second rank alone."""

    def add(event: Event) -> None:
        checkpoint: Any = training.trainer.checkpoint
        if checkpoint["meta"]["iter"] == FAILS:
            checkpoint["state_dict"]["extra"] = torch.ones(2)

    if training.rank == 1:
        training.trainer.bus.subscribe(add, "before_save_checkpoint")


CASES = {"full": full, "silent": silent, "removed": removed, "other": other}


def main(case: str, rank: int, rendezvous: str) -> None:
    """Train, and print what was announced and what is left."""
    folder = Path(rendezvous).parent
    join_ranks(KIND, rank, Path(rendezvous))
    if case == "not shared":
        sys.stdout.write(json.dumps(refused(folder, rank)))
        return
    group_writer.STARTING_BYTES = -1  # no thread writes while the process starts
    training = Disturbed(folder, rank)
    CASES[case](training)
    training.trainer.train()
    training.trainer.close()
    dist.barrier()
    training.printed["iter"] = training.trainer.iter
    training.printed["left"] = sorted(path.name for path in training.run.iterdir() if "iter_" in path.name)
    sys.stdout.write(json.dumps(training.printed))
    sys.stdout.flush()
    dist.destroy_process_group()


def refused(folder: Path, rank: int) -> dict[str, str]:
    """Return the error of a training whose ranks have directories of their own."""
    session.SHARED_SECONDS = 0.5
    trainer: Trainer = make_trainer(KIND, rank, folder / f"run{rank}")
    try:
        trainer.train()
    except OSError as error:
        return {"error": str(error), "iter": str(trainer.iter)}
    return {"error": "not refused"}
