"""A training that takes commands opens no port."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import forked

SCRIPT = """
import json, os, socket, sys
import torch
from eventloop import Trainer
from eventloop.commands.client import post
from eventloop.hooks import CheckpointHook
from eventloop.writers import EventLogWriter, JSONLWriter

def listening():
    inodes = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            inodes |= {row.split()[9] for row in list(table)[1:] if row.split()[3] == "0A"}
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link)[8:-1] in inodes for link in links if os.path.lexists(link))

model = torch.nn.Linear(2, 1)
data = [(torch.ones(4, 2), torch.ones(4, 1))] * 20
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss_fn=torch.nn.functional.mse_loss,
    train_loader=data, max_epochs=100_000, work_dir=sys.argv[1],
    hooks=[CheckpointHook(interval=1000, max_keep_ckpts=1)], writers=[JSONLWriter(), EventLogWriter()],
)
counts = []

@trainer.bus.on("after_train_iter", once=True)
def ask(trainer, event):
    post(sys.argv[1], "note", "hello")

@trainer.bus.on("command_applied")
def count(trainer, event):
    counts.append(listening())
    trainer.stop("counted")

trainer.train()
with socket.create_server(("127.0.0.1", 0)):
    counts.append(listening())
print(json.dumps(counts))
"""
"""Counts its listening sockets when a command from outside is applied, and with one that it opens itself."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the tables of sockets in /proc")
def test_a_training_that_takes_a_command_listens_nowhere(tmp_path: Path) -> None:
    """The system's table of sockets has no listening one of the training's process."""
    ran = forked.run(["-c", SCRIPT, str(tmp_path / "run")])

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [0, 1]
