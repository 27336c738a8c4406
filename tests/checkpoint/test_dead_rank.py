"""A rank dies with its saver while a checkpoint of several ranks is written, and its training is gone for good."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from eventloop.checkpoint import find_checkpoints, verify_checkpoint

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from eventloop import Trainer
from eventloop.checkpoint.saving import saver
from eventloop.hooks import CheckpointHook, Hook

saver.QUEUE_BYTES = int(sys.argv[3])
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2000, 2000), nn.Linear(2000, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

class Die(Hook):
    priority = "LOWEST"
    def after_train_iter(self, trainer, event):
        if event.iter + 1 == 3 and rank == 1:
            os.killpg(os.getpgid(0), signal.SIGKILL)  # with the saver, which has no time to vote

trainer = Trainer(model, optimizer=torch.optim.AdamW(model.parameters()), train_loader=[torch.ones(2, 2000)] * 6,
    train_step=lambda trainer, batch: model(batch).mean(), max_iters=6, work_dir=f"{sys.argv[2]}/run", writers=[],
    hooks=[Die()], default_hooks=dict(checkpoint=CheckpointHook(interval=1)))
trainer.train()
"""


@pytest.mark.parametrize("queue_bytes", [0, 1 << 40], ids=["no room", "room"])
def test_a_dead_rank_is_not_waited_for(tmp_path: Path, queue_bytes: int) -> None:
    """Rank 0 ends long before the vote of the dead rank would be given up: by the error of its next exchange with
    it, or, where it waits for room for its next save, once the launcher's SIGTERM comes. It says which checkpoint
    is not whole yet, and the former ones are."""
    logs = [(tmp_path / f"{rank}.log").open("w+") for rank in range(2)]  # which the savers may outlive
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), str(queue_bytes)],
            stderr=logs[rank],
            start_new_session=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        ranks[1].wait(timeout=100)
        ranks[0].terminate()  # as torchrun does
        ranks[0].wait(timeout=100)  # at least 120 s are left for a vote
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        said = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
        for log in logs:
            log.close()

    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode in (1, 128 + signal.SIGTERM)
    assert re.search(r"iter_[23] is still being written; its process finishes it", said[0])
    found = find_checkpoints(tmp_path / "run")
    assert {path.name for path in found} >= {"iter_1"}
    for path in found:
        verify_checkpoint(path)
