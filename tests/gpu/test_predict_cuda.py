"""Predictions on a real CUDA device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Reused(nn.Module):
    """Write all outputs into one tensor, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(4, 1 << 16, device="cuda")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out.copy_(inputs.expand_as(self.out))


@pytest.mark.parametrize("streams", [False, True])
def test_outputs_are_copied_before_they_are_overwritten(tmp_path: Path, streams: bool) -> None:
    """Each batch has its own values on the host, though the next batch is computed while they are copied."""
    trainer = Trainer(Reused(), max_epochs=1, work_dir=tmp_path, device="cuda")
    got: list[Any] = []

    outputs = trainer.predict(
        [torch.full((4, 1), float(i)) for i in range(20)], to=got.append if streams else None
    )
    trainer.close()

    rows = torch.cat(got) if streams else outputs
    assert rows.device.type == "cpu"
    assert not rows.is_pinned()
    assert rows[:, 0].tolist() == rows[:, -1].tolist() == [float(i) for i in range(20) for _ in range(4)]
