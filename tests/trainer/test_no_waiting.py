"""The training thread asks no tensor for its value."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eventloop.device import HostCopy
from eventloop.hooks import AmpOptimizerHook, CheckInvalidLossHook, EarlyStoppingHook, LoggerHook, MemoryHook
from eventloop.hooks.ema import EMAHook
from eventloop.hooks.garbage_collection import GarbageCollectionHook
from eventloop.writers import JSONLWriter
from tests.trainer.conftest import MakeTrainer, batches

READS = (
    "item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__", "__array__", "is_nonzero",
    "__contains__",
)  # fmt: skip
SCALAR = "aten::_local_scalar_dense"
"""What PyTorch itself, too, reads a number of a tensor with: `.item()`, `if tensor`, a comparison in an optimizer."""

arrived = threading.local()
"""Whether this thread reads a copy that has arrived in the host's memory, which is no waiting."""


def on_the_host() -> bool:
    """What is read now has arrived."""
    return bool(getattr(arrived, "reading", False))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often which thread asked a tensor for its value."""
    counted: Counter[tuple[str, str]] = Counter()
    take_values = HostCopy.values

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if not on_the_host():
                counted[threading.current_thread().name, name] += 1
            return original(self, *arguments, **options)

        return call

    def values(copy: HostCopy) -> list[float]:
        if not copy.ready():
            counted[threading.current_thread().name, "HostCopy.values"] += 1
            return take_values(copy)
        arrived.reading = True
        try:
            return take_values(copy)
        finally:
            arrived.reading = False

    def waiting(*arguments: Any, **options: Any) -> None:
        counted[threading.current_thread().name, "synchronize"] += 1

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    monkeypatch.setattr(HostCopy, "values", values)
    for module in (torch.cuda, torch.cpu, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", waiting)
    return counted


class Operators(TorchDispatchMode):
    """Counts the operators that this thread runs, those inside PyTorch's own functions and backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not on_the_host():
            self.counted[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_default_stack_reads_no_tensor_while_training(
    make_trainer: MakeTrainer, reads: Counter[tuple[str, str]]
) -> None:
    """With the default hooks, a log of every iteration and a writer, the training thread reads not one tensor; the
    values arrive all the same."""

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.model(batch[0]).square().mean()
        return {"loss": loss, "twice": loss.detach() * 2, "rate": 0.5}

    trainer = make_trainer(
        train_step=step, train_loader=batches(20), hooks=[LoggerHook(interval=1)], writers=[JSONLWriter()]
    )
    during: list[Counter[tuple[str, str]]] = []
    trainer.bus.subscribe(lambda event: reads.clear(), "before_train_epoch", once=True, priority="LOWEST")
    trainer.bus.subscribe(lambda event: during.append(reads.copy()), "after_train_epoch", start=1, priority=0)

    trainer.train()

    main = threading.main_thread().name
    assert [name for thread, name in during[0] if thread == main] == []
    assert any(name in ("item", "tolist") for _, name in reads)
    assert len(trainer.metrics.history("twice")) == 40


def test_a_full_stack_reads_no_tensor_while_training(
    make_trainer: MakeTrainer, reads: Counter[tuple[str, str]]
) -> None:
    """Nor with an average of the weights, bfloat16, accumulated and clipped gradients, invalid losses looked for,
    memory measured, early stopping, validations in between, and a log of every iteration. Reads of
    evaluations, and of copies that have arrived on the host, are not counted."""

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.model(batch[0]).float().square().mean()
        return {"loss": loss, "twice": loss.detach() * 2}

    trainer = make_trainer(
        train_step=step, train_loader=batches(20), val_loader=batches(2), max_epochs=3,
        val_step=lambda trainer, batch: {"loss": trainer.model(batch[0]).float().square().mean()},
        hooks=[
            AmpOptimizerHook(dtype="bfloat16", cumulative_iters=2, grad_clip={"max_norm": 1.0}),
            EMAHook(), CheckInvalidLossHook(interval=5), MemoryHook(interval=1),
            EarlyStoppingHook(monitor="loss", patience=100), GarbageCollectionHook(interval=2),
            LoggerHook(interval=1),
        ],
        writers=[JSONLWriter()],
    )  # fmt: skip
    during: list[Counter[tuple[str, str]]] = []
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
        lambda t: t.item(), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: t.numpy(), float, int, bool,
        lambda t: [0, 1][t], lambda t: 1 in t, lambda t: torch.cuda.synchronize(), lambda t: torch.is_nonzero(t),
    ],
)  # fmt: skip
def test_every_way_of_reading_is_seen(reads: Counter[tuple[str, str]], read: Any) -> None:
    """The tests above would notice: each way to wait for a tensor is counted, in Python or in PyTorch."""
    with Operators() as operators:
        read(torch.ones(1, dtype=torch.int64)[0] * 1)

    assert reads or operators.counted[SCALAR]
