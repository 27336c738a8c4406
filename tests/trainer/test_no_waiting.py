"""The training thread asks no tensor for its value."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from eventloop.hooks import LoggerHook
from eventloop.writers import JSONLWriter
from tests.trainer.conftest import MakeTrainer, batches

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often which thread asked a tensor for its value."""
    counted: Counter[tuple[str, str]] = Counter()

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            counted[threading.current_thread().name, name] += 1
            return original(self, *arguments, **options)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return counted


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
