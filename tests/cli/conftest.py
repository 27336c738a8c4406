"""What the tests of the command share: `eventloop demo`, run as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests import forked
from tests.forked import Forked
from tests.support.trainers import batches, tiny_model

torch.set_num_threads(1)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",  # two threads that share a busy core wait for each other
}
COMMAND = ["-m", "eventloop", "demo"]


def demo(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return forked.run([*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, timeout=timeout)


class Finished(NamedTuple):
    """A demo that ran to its end: where its files are, and what it printed."""

    directory: Path
    output: str


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole demo."""
    cwd = tmp_path_factory.mktemp("demo")
    ran = demo(cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return Finished(cwd / "runs" / "demo", ran.stdout)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a demo in `run`; whatever is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        started.append(
            Forked(
                [*COMMAND, "--work-dir", "run", *arguments],
                cwd=tmp_path,
                env=ENVIRONMENT,
                stdout=stdout,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


SCORES = [0.25, 0.75, 0.5, 0.625]


def train(directory: Path, **options: Any) -> None:
    """Four epochs, each saved; the second is the best."""
    model, scores = tiny_model(), iter(SCORES)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(3),
        val_loader=[0],
        val_step=lambda trainer, batch: {"acc": next(scores)},
        sanity_val=0,
        max_epochs=len(SCORES),
        work_dir=directory,
        hooks=[CheckpointHook(**{"interval": 1, "save_best": "acc", **options})],
    )
    trainer.train()
    trainer.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left; not to be changed."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(directory)
    return directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def wait_until(ready: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a condition, as long as the process lives."""
    looked = threading.Event()
    while not ready():
        assert process.poll() is None, process.communicate()
        looked.wait(0.01)
