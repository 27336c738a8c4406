"""The examples of several processes learn under torchrun, are stopped or killed, and continue from their checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import find_checkpoints, load_checkpoint, read_manifest
from eventloop.writers import read_jsonl
from tests import forked
from tests.forked import ROOT, Forked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's lists of child processes"),
]

EXAMPLES = Path(ROOT) / "examples"
PAGE = Path(ROOT) / "docs" / "howto" / "several_processes.md"
RUN = "runs/fsdp2"
"""The run directory in each test's folder, as the page has it."""
DEADLINE = 180.0
"""Seconds against hangs."""
ENDLESS = 100_000
"""More epochs than are trained before the job is ended."""
STEPS = 23
"""The iterations of an epoch: 1437 images in batches of 64, those of all ranks together."""


class Job:
    """A torchrun with its ranks; what they print is in a file."""

    def __init__(self, process: Forked, output: Path) -> None:
        self.process, self._output = process, output

    def output(self) -> str:
        """What all ranks have printed so far."""
        return self._output.read_text()

    def continued_after(self) -> dict[int, int]:
        """The iteration after which each rank says that it continues."""
        said = re.findall(r"rank (\d) continues after (\d+) iterations", self.output())
        return {int(rank): int(iteration) for rank, iteration in said}

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that run, by rank."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with suppress(OSError):
                    if own := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
                        found[int(own[1])] = pid
        return found

    def await_that(self, condition: Callable[[], object]) -> None:
        """Wait for what the ranks do."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the end of the job, and return its exit code."""
        return self.process.wait(DEADLINE)

    def kill(self) -> None:
        """Kill torchrun and all ranks at once, as a machine that fails does."""
        processes = [self.process.pid, *self.ranks().values()] if self.process.poll() is None else []
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLINE)


@contextmanager
def started(example: str, ranks: int, folder: Path, epochs: int, *options: str) -> Iterator[Job]:
    """Start an example by torchrun, in the run directory `RUN`."""
    output = folder / f"output-{epochs}"
    # without the last variable the ranks of a restart may find the addresses of those before (pytorch#135712)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    with output.open("w") as stream:
        process = Forked(
            [*launch, EXAMPLES / f"{example}.py", RUN, str(epochs)],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": ROOT,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=stream.fileno(),
            stderr=stream.fileno(),
        )
    job = Job(process, output)
    try:
        yield job
    finally:
        job.kill()


def interrupt(example: str, ranks: int, folder: Path, how: Callable[[Job], object]) -> None:
    """Start an example, and end it in some way once it has saved a second epoch."""
    with started(example, ranks, folder, ENDLESS) as job:
        job.await_that((folder / RUN / "epoch_2").exists)
        how(job)
        assert job.end() != 0


def assert_continues(example: str, ranks: int, folder: Path) -> None:
    """Start an example again: all ranks continue from the newest checkpoint, and end two epochs later."""
    newest = read_manifest(find_checkpoints(folder / RUN)[-1])
    epochs = newest.epoch + 2
    with started(example, ranks, folder, epochs) as job:
        assert job.end() == 0, job.output()
    assert job.continued_after() == dict.fromkeys(range(ranks), newest.iter)

    last = read_manifest(folder / RUN / f"epoch_{epochs}")
    assert (last.iter, last.epoch) == (epochs * STEPS, epochs)
    assert_learnt(folder)


def assert_learnt(folder: Path) -> None:
    """The loss of the validations has fallen."""
    losses = [
        line["loss"] for line in read_jsonl(folder / RUN / "metrics.jsonl") if line.get("mode") == "val"
    ]
    assert losses[-1] < losses[0] / 1.5


def terminate(job: Job) -> None:
    """Send the signal of a scheduler to torchrun, which passes it on."""
    os.kill(job.process.pid, signal.SIGTERM)


@pytest.mark.parametrize(("example", "again"), [("ddp", 1), ("tp", 2)])
def test_stopped_by_a_scheduler(example: str, again: int, tmp_path: Path) -> None:
    """After SIGTERM the newest checkpoint is that of the last iteration, and the next start, on another number of ranks
    too, continues there."""
    interrupt(example, 2, tmp_path, terminate)
    lines = [*read_jsonl(tmp_path / RUN / "metrics.jsonl")]
    assert lines[-1]["event"] == "after_run"
    assert lines[-1]["signal"] == "SIGTERM"
    assert read_manifest(find_checkpoints(tmp_path / RUN)[-1]).iter == lines[-1]["iter"]

    assert_continues(example, again, tmp_path)


def test_all_killed(tmp_path: Path) -> None:
    """After a kill of all four processes the next start continues from the newest whole checkpoint."""
    interrupt("hsdp", 4, tmp_path, Job.kill)

    assert_continues("hsdp", 4, tmp_path)


def test_one_killed_and_restarted(tmp_path: Path) -> None:
    """After a kill of one rank torchrun restarts all of them, and they continue from the newest whole checkpoint."""
    run = tmp_path / RUN
    with started("fsdp2", 2, tmp_path, ENDLESS, "--max-restarts", "1") as job:
        job.await_that((run / "epoch_2").exists)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.await_that(lambda: len(job.continued_after()) == 2)
        (iteration,) = {*job.continued_after().values()}
        assert iteration >= 2 * STEPS
        assert iteration % STEPS == 0  # it was the end of an epoch
        job.await_that((run / f"epoch_{iteration // STEPS + 2}").exists)
        terminate(job)
        assert job.end() != 0
    assert_learnt(tmp_path)


def test_another_program_reads_a_checkpoint(tmp_path: Path) -> None:
    """The program of the page reads the weights of a sharded checkpoint without eventloop, and makes one file of it."""
    with started("fsdp2", 2, tmp_path, 3) as job:
        assert job.end() == 0, job.output()
    (program,) = re.findall(
        r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    look = "import sys\nassert 'eventloop' not in sys.modules\ntorch.save(model.state_dict(), 'weights.pth')"
    ran = forked.run(["-c", f"{program}\n{look}"], cwd=tmp_path, env={"PATH": "", "PYTHONPATH": ROOT})
    assert ran.returncode == 0, ran.stderr

    expected = load_checkpoint(tmp_path / RUN / "epoch_3")["state_dict"]
    for found in (torch.load(tmp_path / "weights.pth"), torch.load(tmp_path / "whole.pth")["state_dict"]):
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)
