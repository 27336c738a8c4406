"""Signals from outside, and the exit codes that a scheduler sees."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.checkpoint import find_checkpoints
from tests.forked import ROOT, Forked

PROGRAM = """
import sys, torch
from eventloop import Trainer

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1, 1)

torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_iters=10**9,
    train_step=lambda trainer, batch: model(batch).sum(), train_loader=Endless(), work_dir=sys.argv[1])

@trainer.bus.on("after_train_iter", once=True)
def ready(event):
    print("ready", flush=True)
    sys.stdin.readline()

@trainer.bus.on("after_run")
def ended(event):
    print(event.reason, flush=True)

if sys.argv[2:] == ["left"]:
    for epoch in trainer.epochs():
        for batch in trainer.batches(Endless()):
            trainer.outputs = {"loss": model(batch).sum()}
            if trainer.asked_to_stop:
                break
        break
else:
    trainer.train()
print("went on", flush=True)
"""
CASES: dict[str, tuple[list[str], int, int]] = {
    "SIGTERM": ([], signal.SIGTERM, 143),
    "SIGUSR1": ([], signal.SIGUSR1, 138),
    "left": (["left"], signal.SIGTERM, -signal.SIGTERM),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, list[str], Path]]]:
    """How each program ended, what it said, and where its checkpoints are; all are started at once."""
    folder = tmp_path_factory.mktemp("preempted")
    started = {
        name: Forked(
            ["-c", PROGRAM, name, *arguments], cwd=folder, env={"PATH": "", "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, (arguments, _, _) in CASES.items()
    }  # fmt: skip
    try:
        said = {}
        for name, process in started.items():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
            process.send_signal(CASES[name][1])
            out, _ = process.communicate("go on\n", timeout=60)
            said[name] = process.returncode, out.splitlines(), folder / name
        yield said
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES])
def test_exit_codes(ended: dict[str, tuple[int, list[str], Path]], name: str) -> None:
    """128 + the signal's number; a loop that was left dies of the signal. Nothing of the script after it is run."""
    code, said, _ = ended[name]

    assert code == CASES[name][2]
    assert "went on" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_checkpoint_is_there(ended: dict[str, tuple[int, list[str], Path]], name: str) -> None:
    """Closed with the signal's reason, and saved."""
    _, said, folder = ended[name]

    assert said == [f"preempted by {name}"]
    assert find_checkpoints(folder)
