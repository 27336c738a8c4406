"""Test that runs of two ranks resume exactly on each rank, and that the ranks agree on what is saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.resume.gathering import gather
from eventloop.resume.loading import state_of_rank
from tests.ranks import run_ranks
from tests.support.trainers import MakeTrainer, shuffled

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]

BEGIN = """
import hashlib, json, random, sys
import numpy as np
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, SyncBuffersHook
from eventloop.data.worker_random_state import pack
from tests.support.interrupted import Augmented, stop_after

def seed(number):
    random.seed(number); np.random.seed(number); torch.manual_seed(number)

def digest(*parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""

EXACT = (
    BEGIN
    + """
def loader_of(kind):
    data = Augmented(20 if kind == "workers" else 10)
    if kind == "workers":
        return DataLoader(data, 2, sampler=DistributedSampler(data, seed=3), num_workers=2)
    return DataLoader(data, 2, shuffle=True)

def train(kind, folder, number, resume=False, stop=None):
    seed(10 * number + rank)  # no rank draws what another one does
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2)
    model = DistributedDataParallel(nn.Sequential(*layers), broadcast_buffers=kind == "shuffled")
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn=F.cross_entropy, train_loader=loader_of(kind), max_epochs=3,
        hooks=[CheckpointHook(), *([SyncBuffersHook()] if kind == "synced" else [])], work_dir=f"{kind}/{folder}")
    losses = {}
    trainer.bus.subscribe(
        lambda trainer, event: losses.update({event.iter: trainer.outputs["loss"].item()}), "after_train_iter")
    if resume:
        trainer.resume()
    if stop:
        stop_after(trainer, stop)
    trainer.train()
    trainer.close()
    weights = [p.detach().numpy().tobytes() for p in model.parameters()]
    buffers = [buffer.numpy().tobytes() for buffer in model.buffers()]
    return {"losses": losses, "weights": digest(*weights), "buffers": digest(*buffers), "rng": digest(*pack())}

said = {}
for kind in ("workers", "shuffled", "synced"):
    whole = train(kind, "whole", 1)
    first = train(kind, "parts", 1, stop=7)
    dist.barrier()  # rank 0 writes
    said[kind] = {"whole": whole, "first": first, "second": train(kind, "parts", 99, resume=True)}
print(json.dumps(said))
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that the ranks work in."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """Return the results of each rank for the whole run and its two parts."""
    return run_ranks(EXACT, folder)


@pytest.mark.parametrize("kind", ["workers", "shuffled"])
def test_each_rank_goes_on_exactly(ranks: Ranks, kind: str) -> None:
    """On every rank losses, weights, buffers and random state of the resumed run equal those of the
    uninterrupted one."""
    for said in (rank[kind] for rank in ranks):
        losses = {**said["first"]["losses"], **said["second"]["losses"]}
        assert (len(said["first"]["losses"]), len(losses)) == (7, 15)
        assert losses == said["whole"]["losses"]
        for what in ("weights", "buffers", "rng"):
            assert said["second"][what] == said["whole"][what], what
    assert ranks[0][kind]["whole"]["losses"] != ranks[1][kind]["whole"]["losses"]
    for what in ("buffers", "rng"):
        assert ranks[0][kind]["whole"][what] != ranks[1][kind]["whole"][what]


def test_each_rank_goes_on_exactly_with_synced_buffers(ranks: Ranks) -> None:
    """SyncBuffersHook syncs at the ends of epochs only, so a stop within an epoch changes nothing."""
    for said in (rank["synced"] for rank in ranks):
        for what in ("weights", "buffers", "rng"):
            assert said["second"][what] == said["whole"][what], what
    assert ranks[0]["synced"]["whole"]["buffers"] == ranks[1]["synced"]["whole"]["buffers"]
    assert ranks[0]["synced"]["first"]["buffers"] != ranks[1]["synced"]["first"]["buffers"]


def test_the_checkpoint_has_all_ranks(ranks: Ranks, folder: Path) -> None:
    """A checkpoint has rank 0's state in the usual place, and the states of other ranks by number."""
    checkpoint = load_checkpoint(folder / "workers" / "parts" / "iter_7")

    first, second = checkpoint["ranks"]
    assert first is None
    assert second.keys() == {"rng", "position", "buffers"}
    assert second["position"]["batch_idx"] == checkpoint["meta"]["position"]["batch_idx"] == 2
    assert sorted(second["position"]["loader"]["workers"]) == [0, 1]
    assert not torch.equal(second["rng"]["torch"], checkpoint["rng"]["torch"])
    assert "1.running_mean" in second["buffers"]
    assert not load_checkpoint(folder / "shuffled" / "parts" / "iter_7")["ranks"][1]["buffers"]


def test_fewer_ranks(
    ranks: Ranks, folder: Path, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run with fewer ranks takes their states, and logs that random numbers differ."""
    path = folder / "shuffled" / "parts" / "iter_7"
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
    trainer = make_trainer(model=model, train_loader=shuffled(5, 2), max_epochs=3)

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.resume(path, changed="keep")

    assert (
        f"{path}: it was saved by 2 ranks, and this run has 1: random numbers differ from here on"
        in caplog.text
    )
    assert torch.equal(torch.get_rng_state(), load_checkpoint(path)["rng"]["torch"])


def test_more_ranks(make_trainer: MakeTrainer) -> None:
    """A rank that the checkpoint lacks keeps its own random state, at the position of rank 0."""
    trainer = make_trainer(train_loader=shuffled(4))
    checkpoint = gather(trainer.state, "")
    checkpoint["meta"]["position"]["batch_idx"] = 3

    part = state_of_rank(checkpoint, 1, 2, trainer.loader)

    assert (part.rng, part.position["batch_idx"], part.position["loader"]) == (None, 3, {})
    assert "it was saved by 1 ranks, and this run has 2" in part.inexact
    assert part.inexact.endswith("; rank 1 continues with its own random state")
    assert state_of_rank(checkpoint, 0, 2, trainer.loader).rng is checkpoint["rng"]
    assert state_of_rank(checkpoint, 0, 1, trainer.loader).inexact == ""


def test_a_checkpoint_of_an_earlier_version(make_trainer: MakeTrainer) -> None:
    """If the checkpoint of several ranks has only rank 0's state, every rank takes it, and a text says so."""
    trainer = make_trainer()
    checkpoint = gather(trainer.state, "")
    checkpoint["meta"]["settings"]["run"]["world_size"] = 2

    part = state_of_rank(checkpoint, 1, 2, trainer.loader)

    assert part.rng is checkpoint["rng"]
    assert part.inexact == (
        "it has the random state and the loader position of rank 0 alone: every rank continues with them"
    )


GONE = (
    BEGIN
    + """
import logging, os
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("eventloop").addHandler(Keep())

def leave():
    if rank == GONE:
        print("{}", flush=True)
        os._exit(0)

model = nn.Linear(2, 2)
hook = CheckpointHook()
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
    train_loader=[(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))], max_epochs=1, hooks=[hook], work_dir="run")
trainer.bus.subscribe(lambda event: leave(), "after_train", priority="HIGHEST")
closed, error = [], None
trainer.bus.subscribe(lambda event: closed.append(event.reason), "after_run")
try:
    trainer.train()
except Exception as raised:
    error = [type(raised).__name__, str(raised)]
trainer.close()
print(json.dumps({"closed": closed, "error": error, "lines": lines, "running": trainer.running}), flush=True)
os._exit(0)
"""
)


def test_rank_0_saves_without_a_rank_that_is_gone(tmp_path: Path) -> None:
    """If another rank ends before the last save, rank 0 saves without its state, says so, and closes the
    run."""
    said = run_ranks(f"GONE = 1\n{GONE}", tmp_path)[0]

    assert (said["error"], said["closed"], said["running"]) == (None, ["completed"], False)
    assert "ranks" not in load_checkpoint(tmp_path / "run" / "epoch_1")
    gathering = "the random state of the other ranks cannot be gathered: "
    assert any(line.startswith(gathering) for line in said["lines"])


def test_a_run_without_rank_0_closes_with_an_error(tmp_path: Path) -> None:
    """If rank 0 ends before the last save, no other rank decides for it: the run closes, and raises."""
    said = run_ranks(f"GONE = 0\n{GONE}", tmp_path)[1]

    assert (said["closed"], said["running"]) == (["error"], False)
    kind, text = said["error"]
    assert kind == "RuntimeError"
    assert "expected a decision of rank 0, which cannot be reached" in text


FAILING = (
    BEGIN
    + """
import pytest
from tests.support.saving import Writes
failing = ["best_acc_epoch_1", "epoch_4"]

def fail_once(path):
    if path.name in failing:
        failing.remove(path.name)
        raise OSError("no space left on device")

Writes.of_hooks(pytest.MonkeyPatch(), fail_once)
scores = iter([0.5, 0.4, 0.3, 0.45])
model = DistributedDataParallel(nn.Linear(2, 2))
hook = CheckpointHook(interval=4, save_best="acc")
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
    train_loader=[(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))], val_loader=[torch.zeros(1)], max_epochs=4,
    val_step=lambda trainer, batch: {"acc": next(scores)}, sanity_val=0, hooks=[hook], work_dir="run")
saves, bests = [], []
def gather(trainer, event):
    ranks = [None, None]
    dist.all_gather_object(ranks, event.path.rpartition("/")[2])
    saves.append(ranks)
trainer.bus.subscribe(gather, "before_save_checkpoint")
trainer.bus.subscribe(lambda event: bests.append(hook.best.name), "after_val_epoch", priority="LOWEST")
def wait(event):
    for saving in hook.saves.under_way:
        saving.written.wait(60.0)
trainer.bus.subscribe(wait, "before_val_epoch")
trainer.train()
trainer.close()
print(json.dumps({"saves": saves, "bests": bests}))
"""
)


def test_ranks_agree_on_what_is_saved(tmp_path: Path) -> None:
    """Rank 0, which alone knows of failed saves, decides for all ranks what is saved and compared."""
    ranks = run_ranks(FAILING, tmp_path)

    expected = ["best_acc_epoch_1", "best_acc_epoch_2", "epoch_4", "best_acc_epoch_4", "epoch_4"]
    for said in ranks:
        assert said["saves"] == [[name, name] for name in expected]
        # whether the first save has failed is known by the next validation at the latest
        assert said["bests"][0] in ("", "best_acc_epoch_1")
        assert said["bests"][1:] == ["best_acc_epoch_2", "best_acc_epoch_2", "best_acc_epoch_4"]
    there = {path.name for path in (tmp_path / "run").glob("*epoch*")}
    assert there == {"best_acc_epoch_4", "epoch_4"}
