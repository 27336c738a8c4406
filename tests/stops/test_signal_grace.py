"""A program is gone within seconds of a signal, whatever hangs: schedulers kill it soon after."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from eventloop.eventlog.reader import EventReader
from tests.forked import ROOT, Forked
from tests.support.company import busy_machine, check_grace

PROGRAM = """
import asyncio, sys, threading, time
import torch
from torch.utils.data import DataLoader
from eventloop import Bus, Trainer
from tests.support.process_handlers import hang

torch.set_num_threads(1)
kinds = sys.argv[1].split()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index >= 8:
            time.sleep(60)
        return torch.ones(1)

loader = [torch.ones(1, 1)] * 10**6
if "loader" in kinds:
    loader = DataLoader(Slow(), batch_size=2, num_workers=2)
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_iters=10**9, work_dir="run",
    train_step=lambda trainer, batch: model(batch).sum(), train_loader=loader, default_hooks={"checkpoint": None})
other = Bus()

def wait(event):
    threading.Event().wait()

async def sleep(event):
    await asyncio.sleep(1000)

async def block(event):
    time.sleep(1000)

for name in kinds:
    if name in ("thread", "process"):
        trainer.bus.subscribe(hang if name == "process" else wait, "after_train_iter", offload=name, name=name)
    elif name in ("sleep", "block"):
        trainer.bus.subscribe({"sleep": sleep, "block": block}[name], "after_train_iter", name=name)
    elif name == "other":
        other.subscribe(wait, "after_train_iter", offload="thread", name=name)

class Note:
    def __init__(self):
        self.itself, self.file = self, open("open.txt", "w")
    def __call__(self, event):
        self.file.write(f"{event.iter}\\n")

if "file" in kinds:
    trainer.bus.subscribe(Note(), "after_train_iter")

@trainer.bus.on("after_train_iter")
def step(event):
    if "other" in kinds:
        other.emit(event)
    if event.iter == 3:
        print("ready", flush=True)
        sys.stdin.readline()

trainer.train()
"""


@contextmanager
def training(folder: Path, kinds: str) -> Iterator[Forked]:
    """Run PROGRAM until its fourth iteration."""
    environment = {"PATH": os.defpath, "PYTHONPATH": ROOT, "LOG": str(folder / "log.txt")}
    process = Forked(
        ["-c", PROGRAM, kinds],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def seconds_to_the_exit(process: Forked) -> float:
    """Send SIGTERM, let the iteration end, and return how long the process took to exit."""
    began = monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    process.wait(timeout=60)
    return monotonic() - began


def seconds_to_exit(folder: Path, kinds: str, attempt: int) -> float:
    """Return how long the program takes from the signal to the exit, in a folder of its own."""
    (where := folder / f"{kinds} {attempt}").mkdir()
    with training(where, kinds) as process:
        seconds = seconds_to_the_exit(process)
        assert process.returncode == 128 + signal.SIGTERM
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["thread", "process", "sleep", "block", "other", "loader"])
def test_a_program_is_gone_soon(tmp_path: Path, kinds: str) -> None:
    """One subscriber that hangs on a thread, in a process, in a coroutine, in one that blocks the loop, or on another
    bus; or a loader whose workers take a minute for a batch."""
    check_grace(
        lambda attempt: seconds_to_exit(tmp_path, kinds, attempt),
        lambda attempt: seconds_to_exit(tmp_path, "", attempt),
    )


@pytest.mark.slow
def test_a_busy_machine_adds_nothing_to_a_wait(tmp_path: Path) -> None:
    """All that hangs together is waited for at the same time."""
    everything = "thread process sleep block other loader"
    with busy_machine(2):
        check_grace(
            lambda attempt: seconds_to_exit(tmp_path, everything, attempt),
            lambda attempt: seconds_to_exit(tmp_path, "", attempt),
        )


@pytest.mark.slow
def test_what_is_left_is_kept(tmp_path: Path) -> None:
    """The events that a hanging subscriber has not handled are in the run's folder, the one under way too."""
    with training(tmp_path, "thread") as process:
        seconds_to_the_exit(process)

    events = [record.event for record in EventReader(tmp_path / "run" / "undelivered" / "thread.evl")]

    assert [event.iter for event in events] == [0, 1, 2, 3]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_open_file_is_whole(tmp_path: Path) -> None:
    """The exit frees no reference cycle after a signal, and the file that one holds has its last lines even so."""
    with training(tmp_path, "file") as process:
        seconds_to_the_exit(process)

    assert (tmp_path / "open.txt").read_text() == "0\n1\n2\n3\n"
