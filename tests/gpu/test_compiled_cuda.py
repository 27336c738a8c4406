"""Compiled steps in CUDA graphs: skipped where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckInvalidLossHook, CheckpointHook, EMAHook, LoggerHook, OptimizerHook

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.mark.parametrize("way", ["model", "step"])
@pytest.mark.parametrize(("window", "unit"), [(1, "batch"), (3, "batch"), (3, "update")])
def test_replays_overwrite_nothing_that_is_kept(
    tmp_path: Path, way: str, window: int, unit: Literal["batch", "update"]
) -> None:
    """Logged losses are those that were read at once, with accumulated gradients too, and checkpoints succeed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
    x = torch.randn(24, 32, 16)
    loader = [(each, (each.sum(1) > 0).long()) for each in x]
    trainer = Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn=F.cross_entropy,
        train_loader=loader,
        val_loader=loader[:2],
        max_epochs=2,
        unit=unit,
        device="cuda",
        work_dir=tmp_path,
        compile={way: {"mode": "reduce-overhead"}},
        hooks=[
            OptimizerHook(cumulative_iters=window),
            EMAHook(),
            CheckInvalidLossHook(interval=10),
            LoggerHook(interval=10),
            CheckpointHook(interval=5, by_epoch=False),
        ],
    )
    read: list[float] = []

    @trainer.bus.on("after_train_iter", priority=35)
    def read_at_once(trainer: Trainer, event: AfterTrainIter) -> None:
        read.append(trainer.outputs["loss"].item())

    with trainer.bus.capture("checkpoint_failed") as failed:
        trainer.train()

    assert [value for value, _ in trainer.metrics.history("loss").values()] == read
    assert failed == []
    assert read[-1] < read[0]
