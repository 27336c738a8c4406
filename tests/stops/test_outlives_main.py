"""A training on a thread that outlives the main thread: from then on executors take no work, and on Python 3.12 no thread
starts; what the training owes is written all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventloop import read_events
from eventloop.checkpoint import load_checkpoint, verify_checkpoint
from eventloop.costs.records import read_costs
from eventloop.events import AfterRun, AfterTrainIter
from tests import forked
from tests.no_threads import REFUSE

PROGRAM = """
import threading
import torch
from eventloop import Trainer
from eventloop.hooks import CheckpointHook, Hook
from eventloop.writers import EventLogWriter

class WaitsForMain(Hook):
    def after_train_iter(self, trainer, event):
        begun.set()
        if event.iter == 1:
            threading.main_thread().join()
            if {refuse}:
                refuse()

def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), max_epochs=2,
        train_loader=[torch.ones(1, 4)] * 4, train_step=lambda trainer, batch: trainer.model(batch).sum(), work_dir="run",
        hooks=[WaitsForMain()], default_hooks=dict(checkpoint=CheckpointHook(interval=1), costs=dict(interval_seconds=1e-9)),
        writers=[EventLogWriter(fsync_seconds=0.001)],
    )
    trainer.train()

begun = threading.Event()
threading.Thread(target=train).start()
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [False, True])
def test_nothing_is_lost(tmp_path: Path, refuse: bool) -> None:
    """Checkpoints, whose first one is saved then, the event log and the cost record are whole."""
    program = REFUSE + PROGRAM.format(refuse=refuse)

    ran = forked.run(["-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert (ran.returncode, ran.stderr) == (0, "")
    run = tmp_path / "run"
    for epoch in (1, 2):
        verify_checkpoint(run / f"epoch_{epoch}")
    assert load_checkpoint(run / "epoch_2")["meta"]["iter"] == 8
    events = [record.event for record in read_events(run)]
    assert [event.iter for event in events if isinstance(event, AfterTrainIter)] == list(range(8))
    assert isinstance(events[-1], AfterRun)
    assert read_costs(run).complete
