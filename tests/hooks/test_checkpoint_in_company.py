"""Test that a training waits for no best checkpoint, that loads do, and what a signal and failures change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.directory import scan
from eventloop.checkpoint.retention.best import Best, BestMetrics
from eventloop.checkpoint.retention.retention import Replaced, Retention
from eventloop.hooks import CheckpointHook
from eventloop.temporary.leftovers import running_saves
from eventloop.temporary.names import process_of
from tests.support.company import busy_machine, check_grace
from tests.support.saving import DEADLINE, Gate, Writes

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Hold the writes of all hooks."""
    gate = Gate()
    Writes.of_hooks(monkeypatch, gate.hold)
    return gate


# --- best checkpoints --------------------------------------------------------------------------------------


def test_no_best_checkpoint_is_waited_for(
    make_trainer: Make, scripted: Scripted, files: Files, gate: Gate
) -> None:
    """While best checkpoints are being written the training goes on, and validates and saves further ones."""
    trainer = make_trainer(
        max_epochs=4, hooks=[CheckpointHook(save_best="acc")], **scripted(0.25, 0.5, 0.375, 0.75)
    )
    reached: list[int] = []
    trainer.bus.subscribe(lambda event: reached.append(event.epoch), "after_val_epoch")
    trainer.bus.subscribe(lambda event: gate.open.set(), "after_train", priority=0, name="open")
    trainer.train()

    assert gate.names[0] == "best_acc_epoch_1"
    assert reached == [1, 2, 3, 4]
    assert files() == ["epoch_4", "best_acc_epoch_4"]


@pytest.mark.parametrize("what", ["load_checkpoint", "resume"])
def test_a_load_within_a_training_waits_for_the_best(
    make_trainer: Make, scripted: Scripted, gate: Gate, what: str
) -> None:
    """A handler that loads the best checkpoint gets the one of the validation before it, not an older one."""
    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(save_best="acc")], **scripted(0.25, 0.5))
    weights: dict[str, torch.Tensor] = {}

    @trainer.bus.on("after_val_epoch", priority="LOWEST")
    def load(trainer: Trainer, event: Any) -> None:
        if event.epoch == 2:
            weights["best"] = trainer.model.state_dict()["weight"].clone()
            with torch.no_grad():
                trainer.model.get_parameter("weight").zero_()
            gate.open.set()
            getattr(trainer, what)("best")
            weights["loaded"] = trainer.model.state_dict()["weight"].clone()

    trainer.train()

    assert torch.equal(weights["best"], weights["loaded"])


def record(keep_best: int = 1) -> Retention:
    """Return the record of a hook that watches "acc", with durable checkpoints "a" of 0.25 and "b" of 0.5."""
    made = Retention(BestMetrics("acc"), keep_best=keep_best)
    for name, score in (("a", 0.25), ("b", 0.5)):
        made.begin_best(Best(score, name, "acc"))
        made.done(name)
    return made


@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        (("done", "done"), ["d"]),
        (("done", "failed"), ["c"]),
        (("failed", "done"), ["d"]),
        (("failed", "failed"), ["b"]),
    ],
)
def test_two_running_best_saves(ends: tuple[str, str], kept: list[str]) -> None:
    """Whichever of two running best saves fail, the best durable checkpoint is the best one."""
    made = record()
    for name, score in (("c", 0.75), ("d", 1.0)):
        made.begin_best(Best(score, name, "acc"))
    assert [*made.bests] == ["d"]

    for name, end in zip("cd", ends, strict=True):
        getattr(made, end)(name)

    assert [*made.bests] == kept


def test_a_best_save_spares_what_its_predecessor_leaves() -> None:
    """With `keep_best=2` a save removes all but the best other one that exists when it is durable."""
    made = record(keep_best=2)

    assert made.begin_best(Best(0.75, "c", "acc")) == Replaced(("a", "b"), 1)
    assert made.begin_best(Best(1.0, "d", "acc")) == Replaced(("a", "b", "c"), 1)


def test_a_best_checkpoint_that_was_not_written_does_not_count_after_a_resume(
    make_trainer: Make, scripted: Scripted, files: Files, tmp_path: Path
) -> None:
    """If a kill took a best checkpoint that the resumed one lists, a lower score may become the best."""
    hook = CheckpointHook(interval=1, save_best="acc")
    make_trainer(max_epochs=3, hooks=[hook], **scripted(0.25, 0.75, 0.5)).train()
    os.rename(tmp_path / "run" / "best_acc_epoch_2", tmp_path / "killed")
    resumed = make_trainer(
        max_epochs=4, hooks=[CheckpointHook(interval=1, save_best="acc")], **scripted(0.5, 0.625)
    )
    resumed.resume("auto")
    resumed.train()

    assert [name for name in files() if name.startswith("best")] == ["best_acc_epoch_4"]


# --- saves that all fail -----------------------------------------------------------------------------------


SCRIPT = """
import resource, sys, torch, torch.nn.functional as F
from eventloop import Trainer
from eventloop.hooks import CheckpointHook

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1 << 16)
batch = torch.ones(2, 4), torch.zeros(2, 1 << 16)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.mse_loss,
    train_loader=[batch] * 4, max_epochs=int(sys.argv[1]), work_dir="run", writers=[], hooks=[CheckpointHook(interval=1)])
trainer.bus.subscribe(lambda event: print("iter", event.iter, flush=True), "after_train_iter")
if "limit" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
trainer.train()
"""


@pytest.mark.slow
def test_a_run_without_any_checkpoint_ends_with_an_error(tmp_path: Path) -> None:
    """If each save fails, as with a limit of files' sizes, the program's exit code is not 0."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, "3", "limit"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 1
    assert "expected a checkpoint of this training, got none: all " in ran.stderr
    assert not scan(tmp_path / "run").manifests


def test_one_durable_checkpoint_is_enough(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    """A training of which one checkpoint was saved ends without an error, though later saves failed."""

    def fail(path: Path) -> None:
        if path.name != "epoch_1":
            raise OSError("input/output error")

    Writes.of_hooks(monkeypatch, fail)
    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1)]).train()

    assert files() == ["epoch_1"]


def test_the_error_names_directory_and_cause(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says where a checkpoint was expected, how many saves failed, and the last cause."""

    def fail(path: Path) -> None:
        raise OSError("input/output error")

    Writes.of_hooks(monkeypatch, fail)
    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)])
    with pytest.raises(
        CheckpointError, match=r"got none: all 3 saves .*/run/epoch_2: OSError: input/output error"
    ):
        trainer.train()


# --- a busy machine ----------------------------------------------------------------------------------------


BUSY = """
import os, sys, time, torch, torch.nn.functional as F
from eventloop import Trainer
from eventloop.hooks import CheckpointHook

torch.set_num_threads(1)
inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
loader = [(x, (x.sum(1) > 0).long()) for x in inputs.split(16)]
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best = CheckpointHook(interval=1, save_best="loss")
trainer = Trainer(model, optimizer=optimizer, loss_fn=F.cross_entropy, train_loader=loader, val_loader=loader,
    max_epochs=32, work_dir="run", writers=[], hooks=[best])

def save(name):
    with open(name + ".tmp", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(name + ".tmp", name)
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)

def by_hand():
    for epoch in range(32):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        save(f"epoch_{epoch}")
        with torch.no_grad():
            sum(F.cross_entropy(model(x), y) for x, y in loader)
        save("best")

began = time.monotonic()
by_hand()
middle = time.monotonic()
trainer.train()
print((time.monotonic() - middle) / (middle - began))
"""


@pytest.mark.slow
def test_beside_a_busy_machine_a_training_takes_as_long_as_by_hand(tmp_path: Path) -> None:
    """With a best checkpoint each epoch and two busy processes a CPU, a run is no multiple of the loop by hand.

    It was 60 times as long. The least of three ratios counts, and the bound is wide, because others may load the
    machine; `benchmarks.company` has the figures.
    """
    ratios = []
    with busy_machine(2):
        for number in range(3):
            (where := tmp_path / f"{number}").mkdir()
            ran = subprocess.run(
                [sys.executable, "-c", BUSY], cwd=where, capture_output=True, text=True, check=True
            )
            ratios.append(float(ran.stdout))
            assert len(scan(where / "run").paths) >= 32

    assert min(ratios) < 15.0


# --- signals -----------------------------------------------------------------------------------------------


HANGS = """
import threading
trainer.bus.subscribe(lambda event: threading.Event().wait(), "after_train_iter", offload="thread", name="hangs")
trainer.train()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
def test_beside_all_that_hangs_a_signal_ends_the_program_soon(tmp_path: Path) -> None:
    """Beside a saver that is stopped within a save, a writer that hangs and a busy machine, the program is gone within
    5 s of SIGTERM, with the newest checkpoint whole."""
    with busy_machine(2):
        check_grace(
            lambda attempt: seconds_to_the_exit(tmp_path / f"hangs {attempt}", hangs=True),
            lambda attempt: seconds_to_the_exit(tmp_path / f"alone {attempt}", hangs=False),
        )


def seconds_to_the_exit(folder: Path, *, hangs: bool) -> float:
    """Send SIGTERM to a training that has begun to save, and return how long it takes to exit.

    Args:
        folder: a new folder for its run.
        hangs: whether its saver is stopped and a writer hangs.
    """
    folder.mkdir()
    script = SCRIPT.replace("[batch] * 4", "[batch] * 1000000").replace(
        "interval=1", "interval=20, by_epoch=False"
    )
    script = script.replace("trainer.train()", HANGS) if hangs else script
    process = subprocess.Popen(
        [sys.executable, "-c", script, "9"], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        last = _read_until_it_saves(process, folder / "run", stops=hangs)
        began = monotonic()
        process.send_signal(signal.SIGTERM)
        for line in process.stdout:
            last = line
        code = process.wait(DEADLINE)
        seconds = monotonic() - began
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

    assert code == 128 + signal.SIGTERM
    newest = scan(folder / "run").paths[-1]
    assert load_checkpoint(newest)["meta"]["iter"] == int(last.split()[1]) + 1
    return seconds


def _read_until_it_saves(process: subprocess.Popen[str], run: Path, *, stops: bool) -> str:
    """Read what a program prints until its saver's process writes a checkpoint; return the last line.

    Args:
        stops: whether to stop the saver's process there.
    """
    assert process.stdout is not None
    for line in process.stdout:
        for path in running_saves(run):
            writer = process_of(path)
            if writer is None or writer.pid == process.pid:
                continue  # a thread writes while the process starts
            if not stops:
                return line
            os.kill(writer.pid, signal.SIGSTOP)
            if path.exists():
                return line
            os.kill(writer.pid, signal.SIGCONT)  # the save is complete
    raise AssertionError("the program ended without a save of its saver's process")
