"""Nothing keeps a trainer alive that nobody holds."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter
from tests.support.process_support import until
from tests.support.trainers import batches, tiny_model


def build(directory: Path, *writers: Any) -> Trainer:
    """A trainer that no fixture holds."""
    model = tiny_model()
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(3),
        val_loader=batches(1),
        max_epochs=1,
        writers=writers,
        work_dir=directory,
        hooks=[CheckpointHook(interval=1, save_best="loss")],
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_trainer_is_collected(tmp_path: Path, fails: bool) -> None:
    """A trainer that was closed and dropped goes, and with it its model and its bus; also one whose run failed, once its
    error is forgotten."""
    trainer = build(tmp_path, JSONLWriter())
    if fails:
        trainer.bus.subscribe(lambda trainer, event: 1 / 0, "after_train_iter")
    with suppress(ZeroDivisionError):
        trainer.train()
    trainer.val()
    trainer.close()
    gone: list[Any] = [weakref.ref(trainer), weakref.ref(trainer.model), weakref.ref(trainer.bus)]

    del trainer
    gc.collect()

    assert [ref() for ref in gone] == [None] * 3


def test_a_trainer_that_was_never_closed_is_collected(tmp_path: Path) -> None:
    """A trainer dropped without `close` goes too, and its subscribers are closed for it.

    The bus may outlive its trainer until the costs of the last delivery are recorded.
    """
    closed = threading.Event()
    trainer = build(tmp_path)
    trainer.bus.subscribe(lambda event: None, "after_run", offload="thread", on_close=closed.set)
    trainer.train()
    gone = weakref.ref(trainer)

    def bus_is_collected() -> bool:
        gc.collect()
        return closed.is_set()

    del trainer
    gc.collect()

    assert gone() is None
    until(bus_is_collected)


def test_threads_end_with_the_trainer(tmp_path: Path) -> None:
    """A closed trainer leaves no thread behind."""
    before = set(threading.enumerate())
    trainer = build(tmp_path, JSONLWriter())
    trainer.train()
    trainer.close()

    until(lambda: set(threading.enumerate()) <= before)
