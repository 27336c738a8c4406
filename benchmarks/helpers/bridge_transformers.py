"""Measure what the bridge to Transformers adds to a step of its host: the same training alone, and with the bridge.

    PYTHONPATH=. python -m benchmarks.helpers.bridge_transformers --width 1024 --batch 64 --steps 300 --rounds 12

Trainings take turns. What is compared is the lower quartile of a training's steps, on the clock of the training
thread's own processor time, which other programs of the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
from time import thread_time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from eventloop.bridges.transformers import EventLoopCallback


class Model(torch.nn.Module):
    """Two layers of a width that decides how long a step takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": F.cross_entropy(self.layers(inputs), labels)}


class Clock(TrainerCallback):
    """A callback that notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(thread_time())

    def step(self) -> float:
        """The lower quartile of the steps, in seconds, without the first five."""
        steps = sorted(after - before for before, after in zip(self.ends[5:], self.ends[6:], strict=False))
        return steps[len(steps) // 4]


def step_seconds(width: int, batch: int, steps: int, *, bridge: EventLoopCallback | None) -> float:
    """Train once, and return the time of a step."""
    torch.manual_seed(0)
    fixed = {"inputs": torch.randn(batch, 64), "labels": torch.zeros(batch, dtype=torch.long)}
    clock = Clock()
    with tempfile.TemporaryDirectory() as work_dir, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            work_dir, num_train_epochs=1, per_device_train_batch_size=batch, logging_steps=10 * steps,
            save_strategy="no", use_cpu=True, disable_tqdm=True, report_to=[], optim="sgd", max_grad_norm=0,
        )  # fmt: skip
        data: Any = [{}] * (batch * steps)
        callbacks: list[TrainerCallback] = [clock] if bridge is None else [clock, bridge]
        Trainer(
            Model(width), arguments, train_dataset=data, callbacks=callbacks, data_collator=lambda _: fixed
        ).train()
    return clock.step()


def compare(width: int, batch: int, steps: int, rounds: int) -> tuple[float, float]:
    """Return the time of a step of the host alone, and the median ratio to it with the bridge."""
    alone, ratios = [], []
    for index in range(rounds):
        pair = {}
        for driven in (index % 2 == 0, index % 2 == 1):
            bridge = EventLoopCallback() if driven else None
            pair[driven] = step_seconds(width, batch, steps, bridge=bridge)
        alone.append(pair[False])
        ratios.append(pair[True] / pair[False])
    return statistics.median(alone), statistics.median(ratios)


def main() -> None:
    """Measure one size, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("width", 1024), ("batch", 64), ("steps", 300), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds, ratio = compare(options.width, options.batch, options.steps, options.rounds)
    print(f"a step of Transformers alone: {seconds * 1e3:.3f} ms; with the bridge: {ratio:.4f} of it")


if __name__ == "__main__":
    main()
