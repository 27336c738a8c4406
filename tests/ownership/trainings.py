"""Trainings in processes of their own, which wait where a test wants them to, with all saved and written."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.forked import ROOT, Forked
from tests.support.process_support import until

PROGRAM = """
import json, os, sys, time
from pathlib import Path

options = json.loads(sys.argv[1])
if slow := options.get("slow_sync"):
    import eventloop.checkpoint.disk as disk
    sync = disk.Disk.sync
    def delayed(self, file):
        path = Path(str(file.name))
        if path.name == "state.pth" and path.parent.name.startswith(".iter_"):  # not the best one, which is awaited
            time.sleep(slow)
        sync(self, file)
    disk.Disk.sync = delayed

import torch
import torch.nn.functional as F
from eventloop import Trainer
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving.saver import Saver
from eventloop.hooks import CheckpointHook
from eventloop.ownership import WorkDirInUseError
from eventloop.writers import CSVWriter, EventLogWriter, JSONLWriter

if options.get("thread"):
    pending.Saver = lambda **options: Saver(process=False, **options)
torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(16, 4)
loader = list(zip(inputs.split(4), (inputs[:, 0] > 0).long().split(4)))
model = torch.nn.Linear(4, 3)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
    train_loader=loader, val_loader=loader, max_iters=options["iters"], val_interval=5,
    work_dir=options["run"], writers=[JSONLWriter(), EventLogWriter(), CSVWriter()],
    hooks=[CheckpointHook(options.get("interval", 5), max_keep_ckpts=2, save_best="accuracy")],
    default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
)

def wait(what):
    print(what, flush=True)
    sys.stdin.readline()

@trainer.bus.on("after_train_iter", priority=100)
def hold(trainer, event):
    if event.iter + 1 in options.get("holds", ()):
        trainer.state.finish_saves()
        trainer.bus.flush(60)
        wait("holding")

wait("ready")
try:
    if options.get("resume"):
        print(json.dumps({"resumed": trainer.resume("auto").name}), flush=True)
        if options.get("between"):
            wait("resumed")
    trainer.train()
except WorkDirInUseError as error:
    print(json.dumps({"refused": str(error)}), flush=True)
    sys.exit(3)
print(json.dumps({"trained": trainer.iter}), flush=True)
"""


class Training:
    """A training in another process; `go` lets it go on from where it waits, `next_line` reads what it says."""

    def __init__(self, run: Path, iters: int = 20, **options: Any) -> None:
        self.process = Forked(
            ["-c", PROGRAM, json.dumps({"run": str(run), "iters": iters, **options})],
            cwd=run.parent,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def next_line(self) -> Any:
        """Return its next line: a word, or what its JSON says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()[1]
        return json.loads(line) if line.startswith("{") else line.strip()

    def reach(self, word: str) -> None:
        """Read up to the line in which it says that it waits."""
        while (said := self.next_line()) != word:
            assert isinstance(said, dict) or said == "ready"
            if said == "ready":
                self.go()

    def go(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, signum: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, signum)

    def stand_still(self) -> None:
        """Stop it as Ctrl-Z does, so that its writers write nothing, and wait until each of its threads stands."""
        self.send(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        if threads.exists():
            until(
                lambda: all(
                    stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads.glob("*/stat")
                )
            )

    def end(self) -> tuple[str, str]:
        """Let it end, and return what else it says, on both streams."""
        return self.process.communicate("\n\n\n", timeout=120)

    def run(self) -> dict[str, Any]:
        """Let it train to its end, and return what it said last."""
        out, err = self.end()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert lines, err
        merged: dict[str, Any] = {}
        for line in lines:
            merged |= line
        return merged


@contextmanager
def training(run: Path, iters: int = 20, **options: Any) -> Iterator[Training]:
    """A training that is killed at the end of the block, if it has not ended by then."""
    one = Training(run, iters, **options)
    try:
        yield one
    finally:
        one.process.kill()
        with suppress(Exception):
            one.process.communicate()


@contextmanager
def alive(run: Path, **options: Any) -> Iterator[Training]:
    """A training that holds after its second iteration, with its directory its own."""
    with training(run, holds=[2], **options) as one:
        one.reach("holding")
        yield one


def contents(directory: Path) -> dict[str, str]:
    """Return the hash of every file in a directory, by its path; what its heartbeat's thread writes is left out."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("heartbeat.json", "run.json")
    }


def steps(run: Path) -> list[tuple[str, int]]:
    """Return the mode and step of each line of losses and scores in the file of lines."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["mode"], line["step"]) for line in lines if "event" not in line]


KILL = signal.SIGKILL
