"""Advice on real trainings: six with something planted that costs time, and two healthy ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from eventloop import Trainer, cli
from eventloop.costs.records import read_costs
from eventloop.reporting.advice import advice
from tests.support.cuda import OnCuda
from tests.support.in_memory import directory_in_memory
from tests.support.trainers import build_trainer

pytestmark = pytest.mark.slow

ITERATIONS = 300
STEP = 8e-3
"""About the seconds of a healthy iteration."""


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take some seconds each to prepare."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 64 * ITERATIONS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return torch.full((256,), float(index % 7)), torch.tensor(index % 3)


class Perceptron(nn.Module):
    """A perceptron that waits some seconds in each call of its forward pass."""

    def __init__(self, wait: Callable[[int], float] = lambda call: 0.0) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 3)
        )
        self._wait, self._calls = wait, 0

    def forward(self, inputs: torch.Tensor) -> Any:
        """Wait, and return the outputs."""
        self._calls += 1
        time.sleep(self._wait(self._calls))
        return self._layers(inputs)


def ready_batches() -> list[list[torch.Tensor]]:
    """Batches that are in memory, so that no iteration waits for them."""
    return [[torch.randn(64, 256), torch.arange(64) % 3]] * ITERATIONS


def build(work_dir: Path, **changes: Any) -> Trainer:
    """Build a trainer of a perceptron with iterations of about 8 ms."""
    model = changes.pop("model", None) or Perceptron()
    options = {
        "train_loader": changes.pop("train_loader", None) or ready_batches(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "max_iters": ITERATIONS,
    }
    return build_trainer(work_dir, model=model, **{**options, **changes})


# --- what is planted ---------------------------------------------------------------------------------------------


def slow_loader(work_dir: Path) -> Trainer:
    """The samples of a batch take twice the time of a step to prepare, on the training thread."""
    return build(work_dir, train_loader=DataLoader(Samples(2 * STEP / 64), batch_size=64))


def heavy_handler(work_dir: Path) -> Trainer:
    """A handler takes a quarter of the time since its last call in each 50th iteration: 100 ms, or more on a busy machine."""
    trainer = build(work_dir)
    since = [time.perf_counter()]

    @trainer.bus.on("after_train_iter", every=1)
    def draw(event: Any) -> None:
        if event.iter % 50 == 49:
            time.sleep((time.perf_counter() - since[0]) / 4)
            since[0] = time.perf_counter()

    return trainer


def rare_long_iterations(work_dir: Path) -> Trainer:
    """The forward pass takes 80 ms longer in each 50th iteration, as after an allocation that fails at first."""

    return build(work_dir, model=Perceptron(lambda call: 0.08 if call % 50 == 0 else 0.0))


def slow_start(work_dir: Path) -> Trainer:
    """The first forward pass takes 2 s, as that of a compiled model does."""

    return build(work_dir, model=Perceptron(lambda call: 2.0 if call == 1 else 0.0))


def slow_writer(work_dir: Path) -> Trainer:
    """A subscriber takes 50 ms for each event, keeps at most 8 of them, and drops the others."""
    trainer = build(work_dir)

    @trainer.bus.on("after_train_iter", offload="thread", queue=8, overflow="drop_newest")
    def upload(event: Any) -> None:
        time.sleep(0.05)

    return trainer


class Computed(OnCuda):
    """A number of a fake device, which has it 10 ms later."""

    def item(self) -> float:
        time.sleep(0.01)
        return 1.0


def read_of_a_metric(work_dir: Path) -> Trainer:
    """A handler reads a metric of the fake device in each iteration, and waits 10 ms for it."""
    trainer = build(
        work_dir,
        train_step=lambda trainer, batch: {
            "loss": trainer.model(batch[0]).square().mean(),
            "score": torch.tensor(1.0).as_subclass(Computed),
        },
    )

    @trainer.bus.on("after_train_iter", priority=55)
    def show(trainer: Trainer, event: Any) -> None:
        trainer.metrics.latest()

    return trainer


PLANTED: dict[Callable[[Path], Trainer], str] = {
    slow_loader: "the loader is the bottleneck",
    heavy_handler: "draw takes",
    rare_long_iterations: "1 of 100 iterations takes",
    slow_start: "the first iteration took 2.",
    slow_writer: "upload does not keep up",
    read_of_a_metric: "show (test_advice_of_trainings.py:",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_first_line_names_what_is_planted(
    plant: Callable[[Path], Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the summary, in `eventloop report`, and in the record that both read."""
    trainer = plant(tmp_path / "run")
    trainer.train()
    trainer.close()
    summary = trainer.summary()
    assert cli.main(["report", str(tmp_path / "run")]) == 0

    lines = advice(read_costs(tmp_path / "run"))
    assert [line[: len(PLANTED[plant])] for line in lines[:1]] == [PLANTED[plant]]
    for text in (summary, capsys.readouterr().out):
        assert PLANTED[plant] in " ".join(text.split())


# --- healthy trainings -------------------------------------------------------------------------------------------


def in_memory(work_dir: Path) -> Trainer:
    """Batches in memory, the default hooks."""
    return build(work_dir)


def with_workers(work_dir: Path) -> Trainer:
    """A loader whose two worker processes keep up, a validation, a checkpoint and a light handler."""
    loader = DataLoader(Samples(), batch_size=64, num_workers=2)
    trainer = build(work_dir, train_loader=loader, val_loader=ready_batches()[:5], val_interval=100)
    trainer.bus.subscribe(lambda event: None, "after_train_iter", name="light")
    return trainer


@pytest.mark.parametrize("make", [in_memory, with_workers], ids=lambda make: make.__name__)
def test_a_healthy_training_has_no_advice(make: Callable[[Path], Trainer]) -> None:
    """Where nothing is wrong, nothing is said; a slow disk of this machine would be."""
    with directory_in_memory() as directory:
        trainer = make(directory / "run")
        trainer.train()
        trainer.close()

        assert advice(read_costs(directory / "run")) == []
