"""What the tests of the bridge to Transformers share: a tiny model, its data, and Transformers' own trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from eventloop.bridges.transformers import EventLoopCallback


class TinyModel(nn.Module):
    """Four inputs, three classes, and a dropout whose mask depends on the random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits, as a model of Transformers does."""
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count: int) -> list[dict[str, Any]]:
    """A data set of points and the classes they belong to."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"inputs": each, "labels": int(each[0] > 0) + int(each[1] > 0)} for each in inputs]


def host(work_dir: Path, *callbacks: Any, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """Transformers' trainer of the tiny model for two epochs of four updates, with one argument or another changed."""
    parts = {name: arguments.pop(name) for name in ("train_dataset", "eval_dataset") if name in arguments}
    options = TrainingArguments(
        str(work_dir),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=3,
        **{
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.1,
            "logging_steps": 2,
            "save_strategy": "no",
            **arguments,
        },
    )
    return Trainer(
        model or TinyModel(), options, callbacks=list(callbacks), **{"train_dataset": rows(16), **parts}
    )


def record(bridge: EventLoopCallback) -> list[tuple[str, int, int]]:
    """Return a list that gets the name, the iteration and the epoch of each event of the loop."""
    found: list[tuple[str, int, int]] = []

    def record(event: Any) -> None:
        if hasattr(event, "epoch"):
            found.append((type(event).__name__, event.iter, event.epoch))

    bridge.bus.subscribe(record, "*")
    return found


def lines(work_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have bitwise the same weights."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
