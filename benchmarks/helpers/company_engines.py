"""The engines of `company`: the bare loop, the loop by hand and eventloop; the peers are in `company_peers`.

An engine is imported first, by `Engine.prepare`, before anything is measured; what it returns trains a job in a directory.
What each has: three writers (console, JSON lines, TensorBoard) every 10 iterations, checkpoints of model and optimizer at
the interval and of the best score.
"""

from __future__ import annotations

import functools
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

import torch

from benchmarks.helpers.company_job import EVERY, Job, Notes, save_by_hand

Train = Callable[[Job, Notes, Path, int], None]
"""Trains the job in a directory, as this rank, until all is written and durable, if the engine waits for that."""
BARE, BY_HAND, WHOLE = "bare", "by hand", "eventloop"


def prepare_bare() -> Train:
    """Nothing but the training and its validations."""

    def train(job: Job, notes: Notes, directory: Path, rank: int) -> None:
        for number, batch in enumerate(job.loader, start=1):
            job.step(batch)
            if number % job.training.val_each == 0:
                job.validate()

    return train


class Lines:
    """What is logged by hand: values as a line on a console, as a JSON line that is flushed, and in TensorBoard."""

    def __init__(self, job: Job, notes: Notes, directory: Path, *, board: bool = True) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._notes, self._slow = notes, job.training.slow_seconds
        self._console: TextIO = io.StringIO()
        self._file = open(directory / "metrics.jsonl", "w")  # noqa: SIM115
        self._board: Any = SummaryWriter(str(directory)) if board else None

    def write(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write everywhere."""
        values = {name: float(value) for name, value in tensors.items()}
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        print(step, *(f"{name}: {value:.4f}" for name, value in values.items()), file=self._console)
        self.write_line(step, values)

    def write_line(self, step: int, values: dict[str, float]) -> None:
        """Write the JSON line alone, on a disk that may take its time."""
        time.sleep(self._slow)
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        self._notes.logged(step)

    def close(self) -> None:
        """Close all."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def prepare_by_hand() -> Train:
    """What people write; a disk that takes its time is written to by one thread, everything else inline."""
    import_module("torch.utils.tensorboard")
    return _train_by_hand


def _train_by_hand(job: Job, notes: Notes, directory: Path, rank: int) -> None:
    lines = Lines(job, notes, directory) if rank == 0 else None
    pool = ThreadPoolExecutor(1) if job.training.slow_seconds else None
    for number, batch in enumerate(job.loader, start=1):
        loss = job.step(batch)
        if lines is not None and number % EVERY == 0:
            notes.emit(number)
            if pool is None:
                lines.write(number, job.values(loss))
            else:
                pool.submit(lines.write, number, job.values(loss))
        if number % job.training.save_each == 0:
            save_by_hand(job, notes, directory / f"iter_{number // job.training.save_each % 2}", rank)
        if number % job.training.val_each == 0:
            job.validate()
            save_by_hand(job, notes, directory / "best", rank)
    if pool is not None:
        pool.shutdown()
    if lines is not None:
        lines.close()


def prepare_eventloop() -> Train:
    """The default hooks, with a CheckpointHook that keeps two and the best one, and the three writers."""
    eventloop = import_module("eventloop")
    import_module("eventloop.hooks")
    import_module("eventloop.writers.tensorboard_records")  # as by hand: the library, too
    return functools.partial(_train_eventloop, eventloop.Trainer)


def _train_eventloop(trainer_class: Any, job: Job, notes: Notes, directory: Path, rank: int) -> None:
    from eventloop.events import AfterTrainIter, CheckpointSaved
    from eventloop.writers import ConsoleWriter, TensorBoardWriter

    training = job.training
    save = counted_checkpoints(notes)(
        interval=training.save_each, by_epoch=False, max_keep_ckpts=2, save_best="score", rule="greater"
    )
    trainer = trainer_class(
        job.model,
        optimizer=job.optimizer,
        max_iters=training.iterations,
        train_loader=job.loader,
        train_step=lambda trainer, batch: job.values(job.loss(batch)),
        val_loader=[job.val_batch],
        val_step=lambda trainer, batch: {"score": job.validate()},
        val_interval=training.val_each,
        sanity_val=0,
        hooks=[save],
        work_dir=directory,
        writers=[ConsoleWriter(stream=io.StringIO()), stamped_lines(job, notes), TensorBoardWriter()],
    )
    join = trainer.copying.join

    def counted_join() -> None:
        with notes.saving():
            join()

    trainer.copying.join = counted_join
    trainer.bus.subscribe(
        lambda event: notes.emit(event.iter + 1), AfterTrainIter, priority=59, every=EVERY, name="stamp"
    )
    trainer.bus.subscribe(lambda event: notes.durable.append(event.seconds), CheckpointSaved, name="durable")
    trainer.train()
    trainer.close()


def counted_checkpoints(notes: Notes) -> Any:
    """A CheckpointHook whose handlers within the training are counted as blocking it; what the end takes is seen there."""
    from eventloop.hooks import CheckpointHook

    at_the_ends = {"before_run", "before_train", "after_train", "after_run"}

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, trainer: Any, event: Any) -> None:
            with notes.saving():
                method(self, trainer, event)

        return call

    handlers = {
        name: counted(method)
        for name, method in vars(CheckpointHook).items()
        if name.startswith(("before_", "after_")) and name not in at_the_ends
    }
    return type("CountedCheckpoints", (CheckpointHook,), handlers)


def stamped_lines(job: Job, notes: Notes) -> Any:
    """A JSONLWriter that notes when a log is in the file, on a disk that may take its time."""
    from eventloop.events import Event, ScalarsLogged
    from eventloop.writers import JSONLWriter

    class StampedLines(JSONLWriter):
        def write_batch(self, events: list[Event]) -> None:
            for event in events:
                step = event.step if isinstance(event, ScalarsLogged) and event.mode == "train" else None
                if step is not None:
                    time.sleep(job.training.slow_seconds)
                super().write_batch([event])
                if step is not None:
                    notes.logged(step)

    return StampedLines()


ENGINES: dict[str, Callable[[], Train]] = {
    BARE: prepare_bare,
    BY_HAND: prepare_by_hand,
    WHOLE: prepare_eventloop,
}


def timed(notes: Notes, save: Callable[..., Any]) -> Callable[..., Any]:
    """A peer's function that saves, which is noted as blocking the thread and as the time until the file is there."""

    @functools.wraps(save)
    def call(*args: Any, **options: Any) -> Any:
        began = monotonic()
        with notes.saving():
            result = save(*args, **options)
        notes.durable.append(monotonic() - began)
        return result

    return call
