"""Trainings that SIGTERM ends in a batch of PreciseBN, beside one that nothing disturbs: any batch of any of its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.stops.test_preemption import precise_trainer
from tests.support.trainers import build_trainer

BATCHES = 9
"""In three passes."""


def trials(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is tried, and what tries it, which raises AssertionError."""
    expected = _trained(directory / "whole")
    for interval in (1, -1):
        for at in range(1, BATCHES + 1):
            place = directory / f"{interval} {at}"
            yield f"signal in batch {at} of PreciseBN", partial(_try, expected, place, at, interval)


def _trained(folder: Path, resume: bool = False) -> dict[str, Any]:
    trainer, _ = precise_trainer(build_trainer, folder, save_last=False)
    if resume:
        trainer.resume("auto")
    trainer.train()
    trainer.close()
    return trainer.model.state_dict()


def _try(expected: dict[str, Any], folder: Path, at: int, interval: int) -> None:
    trainer, ran = precise_trainer(build_trainer, folder, at, interval=interval)
    trainer.train()
    trainer.close()
    assert len(ran) == at, f"it went on to batch {len(ran)}"
    resumed = _trained(folder, resume=True)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
