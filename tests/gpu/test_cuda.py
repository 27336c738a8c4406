"""What holds on a real CUDA device; skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Priority, Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.costs.records import read_costs
from eventloop.events import AfterTrainIter, ScalarsLogged
from eventloop.hooks import (
    AmpOptimizerHook,
    CheckInvalidLossHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    GarbageCollectionHook,
    Hook,
    LoggerHook,
    MemoryHook,
    OptimizerHook,
    ThroughputHook,
)
from eventloop.metrics import EventStorage
from eventloop.metrics.device import HostCopy, PinnedPool
from eventloop.writers import JSONLWriter
from tests.support.inside_torch import run_kernel
from tests.support.saving import begun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SAMPLES, BATCH = 256, 32


def make_trainer(work_dir: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), BATCH, shuffle=True, pin_memory=True)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=loader,
        work_dir=work_dir,
        device="cuda",
        schedulers=[torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)],
        **options,
    )


class NoSync(Hook):
    """Lets torch raise on every synchronising call from the first iteration's end to the last one's."""

    priority = Priority.HIGHEST

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        if event.iter == 2:  # the first iterations initialise libraries, which may wait
            torch.cuda.set_sync_debug_mode("error")

    def after_train(self, trainer: Trainer, event: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def default_sync_mode() -> Iterator[None]:
    """Whatever a test did, the next one starts with the default."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_default_stack_never_waits_for_the_device(tmp_path: Path) -> None:
    """With logging and clipping every iteration and a checkpoint every 4, no step synchronises."""
    trainer = make_trainer(
        tmp_path,
        max_iters=40,
        hooks=[
            NoSync(),
            LoggerHook(interval=1),
            OptimizerHook(grad_clip={"max_norm": 1.0}),
            CheckpointHook(interval=4, max_keep_ckpts=2),
        ],
        writers=[JSONLWriter()],
    )

    trainer.train()

    assert trainer.iter == 40


def test_full_stack_never_waits_for_the_device(tmp_path: Path) -> None:
    """Nor with an average of the weights, bfloat16, accumulated and clipped gradients, every loss checked, memory and
    throughput measured, early stopping and garbage collected at every second iteration."""
    trainer = make_trainer(
        tmp_path,
        max_epochs=5,
        val_loader=[(torch.randn(8, 16), torch.zeros(8, dtype=torch.long))],
        val_interval=5,
        hooks=[
            NoSync(),
            AmpOptimizerHook(dtype="bfloat16", cumulative_iters=2, grad_clip={"max_norm": 1.0}),
            EMAHook(),
            CheckInvalidLossHook(interval=4),
            MemoryHook(interval=1, reset_peak=True),
            ThroughputHook(1, {"ones": lambda batch: batch[1].sum()}, flops=True),
            EarlyStoppingHook(monitor="loss", patience=100),
            GarbageCollectionHook(interval=2),
            LoggerHook(interval=1),
            CheckpointHook(interval=4, max_keep_ckpts=2),
        ],
        writers=[JSONLWriter()],
    )
    trainer.bus.on("after_train_epoch", priority="HIGHEST", every=5)(  # the validation may wait
        lambda event: torch.cuda.set_sync_debug_mode("default")
    )

    trainer.train()

    assert trainer.iter == 5 * SAMPLES // BATCH
    assert len(trainer.metrics.history("memory/max_allocated").values()) == trainer.iter


def test_every_value_reaches_the_background_with_its_iteration(tmp_path: Path) -> None:
    """Losses logged through the pinned buffers equal those read at once, each at its own step."""
    read: dict[int, float] = {}
    trainer = make_trainer(tmp_path, max_iters=30, hooks=[LoggerHook(interval=4)])

    @trainer.bus.on("after_train_iter", priority=35)
    def read_at_once(trainer: Trainer, event: AfterTrainIter) -> None:
        trainer.metrics.put_scalar("exact", trainer.outputs["loss"].detach(), smoothing_hint=False)
        read[event.iter + 1] = trainer.outputs["loss"].item()

    with trainer.bus.capture(ScalarsLogged) as seen:
        trainer.train()
    logged = {
        e.step: e.scalars["exact"] for e in seen if isinstance(e, ScalarsLogged) and "exact" in e.scalars
    }

    assert logged == read


def test_a_read_of_a_pending_value_is_a_wait() -> None:
    """It is counted once, with the time that the device took; a second read of the value waits for nothing."""
    with EventStorage() as storage:
        run_kernel(10_000_000)
        storage.put_scalar("loss", torch.ones((), device="cuda"))
        storage.latest()
        storage.latest()

    (read,) = storage.device_reads.records()
    assert (read.name, read.calls) == ("test_a_read_of_a_pending_value_is_a_wait", 1)


def test_the_peak_memory_of_the_device_is_recorded(tmp_path: Path) -> None:
    """`costs.json` has at least what was planted in a tensor."""
    trainer = make_trainer(tmp_path, max_iters=4)
    planted = torch.ones(1 << 24, device="cuda")
    trainer.train()

    (device,) = read_costs(tmp_path).memory.devices
    assert device.name == "cuda:0"
    assert device.reserved >= device.allocated >= planted.nbytes


def test_host_copy_reads_the_values_of_its_moment() -> None:
    """What is done to a tensor after the copy was started does not show in it."""
    pool = PinnedPool()
    for turn in range(50):
        tensors = [torch.full((), float(i + turn), device="cuda") for i in range(5)]
        run_kernel(1_000_000)
        started = HostCopy(tensors, pool)
        for tensor in tensors:
            tensor.fill_(-1.0)

        assert started.values() == [float(i + turn) for i in range(5)]


def test_snapshot_is_of_its_moment() -> None:
    """A snapshot taken while kernels are queued holds the state between those before it and those after it."""
    buffers = Buffers()
    for turn in range(50):
        state = {
            "state_dict": {"w": torch.full((1000,), float(turn), device="cuda"), "n": torch.tensor(turn)}
        }
        run_kernel(1_000_000)
        state["state_dict"]["w"].add_(1.0)
        snapshot = begun(state, buffers=buffers)
        state["state_dict"]["w"].fill_(-1.0)
        state["state_dict"]["n"].fill_(-1)
        taken = snapshot.wait()

        assert torch.equal(taken["state_dict"]["w"], torch.full((1000,), turn + 1.0))
        assert taken["state_dict"]["n"].item() == turn


def test_what_comes_later_is_of_its_moment_too() -> None:
    """What a stream of its own copies is the state at the call, although it is changed as soon as `join` returns."""
    buffers = Buffers()
    for turn in range(50):
        weight = torch.full((1 << 20,), float(turn), device="cuda")
        run_kernel(1_000_000)
        weight.add_(1.0)
        snapshot = begun({"state_dict": {"w": weight}}, {weight.data_ptr()}, buffers=buffers)
        snapshot.join()
        weight.fill_(-1.0)

        assert torch.equal(snapshot.wait()["state_dict"]["w"], torch.full((1 << 20,), turn + 1.0))


def test_resumed_run_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """On the device too, three epochs and three more are six, dropout's random state included."""
    whole = make_trainer(tmp_path / "whole", max_epochs=6)
    whole.train()
    first = make_trainer(tmp_path / "halves", max_epochs=6)
    first.bus.on("after_train_epoch", priority="LOWEST", every=3, once=True)(
        lambda trainer, event: trainer.stop("enough for now")
    )
    first.train()
    second = make_trainer(tmp_path / "halves", max_epochs=6)
    second.resume()
    second.train()

    assert second.iter == whole.iter == 6 * SAMPLES // BATCH
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_checkpoint_of_a_device_loads_on_the_cpu(tmp_path: Path) -> None:
    """The file holds host tensors, equal to the model's."""
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.train()
    weights = copy.deepcopy(trainer.model.state_dict())

    loaded = load_checkpoint(tmp_path / "epoch_1")["state_dict"]

    assert {t.device.type for t in loaded.values()} == {"cpu"}
    assert all(torch.equal(weights[name].cpu(), tensor) for name, tensor in loaded.items())


def test_a_snapshot_of_what_only_a_flag_conjugates() -> None:
    """Copies that nobody waits for have the numbers that the flags stand for."""
    buffers = Buffers()
    for _ in range(50):
        value = torch.randn(1 << 16, dtype=torch.complex64, device="cuda")
        state = {"conj": value.conj(), "neg": value.conj().imag}
        snapshot = begun({"state_dict": state}, buffers=buffers)

        taken = snapshot.wait()["state_dict"]
        assert all(torch.equal(taken[key], tensor.cpu()) for key, tensor in state.items())


def test_a_snapshot_takes_memory_on_no_other_device() -> None:
    """What it pins, it pins on the device of the state; needs two."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    before = torch.cuda.mem_get_info(0)[0]
    snapshot = begun(
        {"state_dict": {"w": torch.ones(1 << 20, device="cuda:1")}}, buffers=Buffers(shared=True)
    )
    snapshot.wait()

    assert torch.cuda.mem_get_info(0)[0] >= before - (1 << 20)
