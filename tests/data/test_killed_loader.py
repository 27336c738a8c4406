"""Test the worker processes of a loader whose training process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import ROOT, Forked

PROGRAM = """
import multiprocessing, os, random, sys
import numpy, torch
from torch.utils.data import DataLoader, Dataset, _utils
from eventloop import Trainer

class Noisy(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.rand(1) + random.random() + numpy.random.rand()

_utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1  # how often workers look for their parent
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_epochs=1,
    train_step=lambda trainer, batch: model(batch).sum(),
    train_loader=DataLoader(Noisy(), 1, num_workers=2, prefetch_factor=8), work_dir=sys.argv[1])

@trainer.bus.on("after_train_iter", once=True)
def ready(event):
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()

trainer.train()
"""


@pytest.mark.slow
def test_they_end_with_it(tmp_path: Path) -> None:
    """All worker processes end with the training process, although nobody reads the states they sent."""
    process = Forked(
        ["-c", PROGRAM, "run"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    try:
        process.kill()

        out, _ = process.communicate(timeout=60)  # each worker holds the other end

        assert (len(workers), out, process.returncode) == (2, "", -signal.SIGKILL)
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
