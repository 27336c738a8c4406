"""What the tests of the command share: `eventloop demo`, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

torch.set_num_threads(1)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",  # two threads that share a busy core wait for each other
}
COMMAND = [sys.executable, "-m", "eventloop", "demo"]


def demo(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


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
            subprocess.Popen(
                [*COMMAND, "--work-dir", "run", *arguments],
                cwd=tmp_path, env=ENVIRONMENT, stdout=stdout, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
