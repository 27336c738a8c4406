"""The training thread asks no tensor for its value. Hook by hook: test_no_waiting_hooks.py."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from eventloop.hooks import (
    AmpOptimizerHook,
    CheckInvalidLossHook,
    EarlyStoppingHook,
    EMAHook,
    GarbageCollectionHook,
    LoggerHook,
    MemoryHook,
)
from eventloop.writers import JSONLWriter
from tests.support.reading import SCALAR, Operators, Reads
from tests.support.trainers import MakeTrainer, batches


def test_default_stack_reads_no_tensor_while_training(make_trainer: MakeTrainer, reads: Reads) -> None:
    """With the default hooks, a log of every iteration and a writer, the training thread reads not one tensor; the
    values arrive all the same."""

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.model(batch[0]).square().mean()
        return {"loss": loss, "twice": loss.detach() * 2, "rate": 0.5}

    trainer = make_trainer(
        train_step=step, train_loader=batches(20), hooks=[LoggerHook(interval=1)], writers=[JSONLWriter()]
    )
    during: list[Reads] = []
    trainer.bus.subscribe(lambda event: reads.clear(), "before_train_epoch", once=True, priority="LOWEST")
    trainer.bus.subscribe(lambda event: during.append(reads.copy()), "after_train_epoch", start=1, priority=0)

    trainer.train()

    main = threading.main_thread().name
    assert [name for thread, name in during[0] if thread == main] == []
    assert any(name in ("item", "tolist") for _, name in reads)
    assert len(trainer.metrics.history("twice")) == 40


@pytest.mark.slow
def test_a_full_stack_reads_no_tensor_while_training(make_trainer: MakeTrainer, reads: Reads) -> None:
    """Nor with an average of the weights, bfloat16, accumulated and clipped gradients, invalid losses looked for,
    memory measured, early stopping, validations in between, and a log of every iteration. Reads of
    evaluations, and of copies that have arrived on the host, are not counted."""

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.model(batch[0]).float().square().mean()
        return {"loss": loss, "twice": loss.detach() * 2}

    trainer = make_trainer(
        train_step=step,
        train_loader=batches(20),
        val_loader=batches(2),
        max_epochs=3,
        val_step=lambda trainer, batch: {"loss": trainer.model(batch[0]).float().square().mean()},
        hooks=[
            AmpOptimizerHook(dtype="bfloat16", cumulative_iters=2, grad_clip={"max_norm": 1.0}),
            EMAHook(),
            CheckInvalidLossHook(interval=5),
            MemoryHook(interval=1),
            EarlyStoppingHook(monitor="loss", patience=100),
            GarbageCollectionHook(interval=2),
            LoggerHook(interval=1),
        ],
        writers=[JSONLWriter()],
    )
    during: list[Reads] = []
    counts: list[Counter[str]] = []
    mode = ExitStack()

    def begin(event: Any) -> None:
        reads.clear()
        mode.enter_context(operators := Operators())
        counts.append(operators.counted)

    def end(event: Any) -> None:
        mode.close()
        during.append(reads.copy())

    trainer.bus.subscribe(begin, "before_train_epoch", priority="LOWEST")
    trainer.bus.subscribe(end, "after_train_epoch", priority=0)

    trainer.train()

    main = threading.main_thread().name
    assert [[name for thread, name in counted if thread == main] for counted in during] == [[], [], []]
    assert [operators[SCALAR] for operators in counts] == [0, 0, 0]
    assert all(operators["aten::_foreach_lerp_"] for operators in counts)  # the average
    assert all(operators["aten::_to_copy"] for operators in counts)  # autocast
    assert len(trainer.metrics.history("twice")) == 60
    assert trainer.metrics.history("memory/resident").values()


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        float,
        int,
        bool,
        lambda t: [0, 1][t],
        lambda t: 1 in t,
        lambda t: torch.cuda.synchronize(),
        lambda t: torch.is_nonzero(t),
    ],
)
def test_every_way_of_reading_is_seen(reads: Reads, read: Any) -> None:
    """The tests above would notice: each way to wait for a tensor is counted, in Python or in PyTorch."""
    with Operators() as operators:
        read(torch.ones(1, dtype=torch.int64)[0] * 1)

    assert reads or operators.counted[SCALAR]
