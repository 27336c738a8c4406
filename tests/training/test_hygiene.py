"""A trainer and the processes around it: loader workers, the interpreter's exit, signals."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from eventloop import Bus
from eventloop.events import AfterVal, Event
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.forking import forked
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.trainers import DEADLINE, MakeTrainer

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Holder(Dataset[torch.Tensor]):
    """Emits on the bus it holds, and says what became of it: process, subscribers, closed or not."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(100):
            self.bus.emit(AfterVal(iter=index))
        complete = self.bus.flush(DEADLINE).complete
        facts = [os.getpid(), len(self.bus.stats()), self.bus.closed, complete]
        return torch.tensor([float(fact) for fact in facts], dtype=torch.float64)


@needs_fork
@ignore_fork_warning
@pytest.mark.parametrize("persistent", [False, True], ids=["workers of an epoch", "persistent workers"])
def test_forked_workers_have_an_inert_bus(
    make_trainer: MakeTrainer, tmp_path: Path, persistent: bool
) -> None:
    """What a dataset emits in a forked worker reaches nobody, neither there nor here, writes nothing and holds
    nothing up, while the bus it is a copy of goes on."""
    seen: list[Event] = []
    workers: set[float] = set()
    bus = Bus(drain_timeout=DEADLINE)
    bus.subscribe(seen.append, "after_val")
    bus.subscribe(seen.append, "after_val", offload="thread", name="in the background")

    def step(trainer: Any, batch: torch.Tensor) -> torch.Tensor:
        workers.update(batch[:, 0].tolist())
        subscribers_closed_complete = batch[:, 1:].tolist()
        assert subscribers_closed_complete == [[0, 1, 1]] * 2
        loss: torch.Tensor = trainer.model(batch[:, :2].float() * 0).sum()
        return loss

    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(Holder(bus), batch_size=2, persistent_workers=persistent, **options)
    trainer = make_trainer(train_step=step, train_loader=loader, bus=bus, writers=[JSONLWriter()])

    trainer.train()
    trainer.close()

    assert seen == []
    assert os.getpid() not in workers
    assert len(workers) == (2 if persistent else 4)
    assert len(logged_steps(tmp_path)) == 2


@pytest.mark.slow
@needs_fork
@ignore_fork_warning
def test_logging_does_not_lock_up_forked_processes(tmp_path: Path) -> None:
    """A subscriber's thread logs all the time, and processes forked meanwhile log too. None of them finds a lock of a
    file held by a thread that it does not have."""
    logger, handler = logging.getLogger("mine"), logging.FileHandler(tmp_path / "log.txt")
    logger.addHandler(handler)
    stop, logged, children = threading.Event(), threading.Event(), set[int]()

    def log_until_stopped(event: Event) -> None:
        while not stop.is_set():
            logger.warning("%s", "x" * 200)
            logged.set()

    try:
        with Bus(drain_timeout=DEADLINE) as bus:
            bus.subscribe(log_until_stopped, "after_val", offload="thread")
            bus.emit(AfterVal())
            for _ in range(20):
                logged.clear()
                assert logged.wait(DEADLINE)
                child = forked(lambda: logger.warning("here"))
                children.add(child)
                until(lambda child=child: os.waitpid(child, os.WNOHANG) == (child, 0))  # type: ignore[misc]
                children.remove(child)
            stop.set()
    finally:
        stop.set()
        for child in children:
            os.kill(child, signal.SIGKILL)
        logger.removeHandler(handler)
        handler.close()

    assert (tmp_path / "log.txt").read_text().count("here\n") == 20


@needs_fork
@ignore_fork_warning
def test_a_log_line_that_never_ends_holds_up_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork waits for log lines that are being written, but no longer than a moment."""
    substitute(monkeypatch, "process_exit.FORK_SECONDS", 0.05)
    handler, writing, read = logging.StreamHandler(), threading.Event(), threading.Event()

    def write() -> None:
        with handler.lock or nullcontext():
            writing.set()
            read.wait(DEADLINE)

    logging.getLogger("somebody's").addHandler(handler)
    thread = threading.Thread(target=write)
    thread.start()
    writing.wait(DEADLINE)
    try:
        with Bus() as bus:
            bus.subscribe(lambda event: None, "after_val", offload="thread")
            assert os.waitpid(forked(lambda: 0), 0)[1] == 0
    finally:
        read.set()
        thread.join()
        logging.getLogger("somebody's").removeHandler(handler)


TRAINING = """
import logging, os, signal, sys, threading, time
import torch
from eventloop import Trainer
from eventloop.hooks import LoggerHook
from eventloop.writers import JSONLWriter
from eventloop.writers.writer import Writer

class Slow(Writer):
    def open(self, run):
        self.file = open(os.path.join(run.work_dir, "slow.txt"), "w")

    def write(self, event):
        time.sleep(0.01)
        print(event.step, file=self.file)

    def close(self):
        print("closed", file=self.file)
        self.file.close()

torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
trainer = Trainer(  # it has no optimizer, for whose sake torch would import as much again
    model, train_step=lambda t, b: t.model(b).sum(), train_loader=[torch.zeros(1, 2)] * 20, max_epochs=1_000_000,
    hooks=[LoggerHook(interval=1)], writers=[JSONLWriter(), Slow()], work_dir="run",
    default_hooks=dict(checkpoint=None, optimizer=None),
)
"""

ENDINGS = {
    "falls off its end": (
        """
trainer.max_epochs = 1
trainer.train()
trainer.metrics.put_scalar("loss", 1.0)
trainer.bus.post(trainer.metrics.collect())
""",
        0,
        20,
    ),
    "sys.exit within a loop": (
        """
for epoch in trainer.epochs():
    for batch in trainer.batches(trainer.train_loader):
        trainer.outputs = {"loss": model(batch).sum()}
        if trainer.iter == 19:
            sys.exit(3)
""",
        3,
        19,
    ),
    "SIGTERM, made an exit": (
        """
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
trainer.bus.subscribe(lambda event: os.kill(os.getpid(), signal.SIGTERM), "after_train_iter", start=19, priority=80)
trainer.train()
""",
        143,
        20,
    ),
}


def logged_steps(folder: Path) -> list[int]:
    """Return the steps of the losses in the file of the run."""
    return [row["step"] for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*ENDINGS])
def test_a_program_that_ends_delivers_what_was_logged(python: Any, tmp_path: Path, how: str) -> None:
    """However a program ends that never closes its trainer: every line that was due is written, also by a writer
    that lags behind, and writers are closed."""
    ending, code, due = ENDINGS[how]

    ran = python(TRAINING + ending)

    assert ran.returncode == code, ran.stderr
    steps = logged_steps(tmp_path)
    assert steps[:due] == [*range(1, due + 1)]
    slow = (tmp_path / "run" / "slow.txt").read_text().split()
    assert slow == [*map(str, steps), "closed"]


HANGS = """
from eventloop.background import closing
closing.monotonic = lambda: 0.0  # so that the log names the timeout, also on a busy machine
trainer.bus.drain_timeout = 0.3
hanging = threading.Event()
def hang(event):
    hanging.set()
    threading.Event().wait()
def press(event):
    hanging.wait()
    os.kill(os.getpid(), signal.SIGINT)
trainer.bus.subscribe(hang, "scalars_logged", offload="thread", name="hangs")
trainer.bus.subscribe(press, "after_train_iter", start=19)
trainer.train()
"""


@pytest.mark.slow
def test_ctrl_c_does_not_wait_longer_than_the_deadline(python: Any, tmp_path: Path) -> None:
    """The rest is delivered, the subscriber that hangs is named, and the program ends."""
    ran = python(TRAINING + HANGS)

    assert ran.returncode == -signal.SIGINT, ran.stderr
    # at most a fifth of the deadline after a signal, less what the flush before has taken
    assert re.search(r"closed after 0\.0[0-6] s; events left undelivered: ", ran.stderr)
    assert "hangs (" in ran.stderr
    steps = logged_steps(tmp_path)
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 19
