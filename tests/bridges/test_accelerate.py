"""The bus in a hand-written loop with Accelerate, whose wrappers make the loop's backward and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from torch.utils.data import DataLoader

from eventloop.bridges import DrivenTrainer
from eventloop.costs.records import read_costs
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.accelerated import reset_accelerator
from tests.support.trainers import samples, tiny_model

EPOCHS, BATCHES = 2, 4
Step = Callable[[Any], torch.Tensor]
Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Any, Step]


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Give each test a state of its own."""
    reset_accelerator()
    yield
    reset_accelerator()


def prepared(scheduled: bool) -> Parts:
    """Return what `accelerator.prepare` makes, and a step of two accumulated batches, as Accelerate's documentation writes it."""
    torch.manual_seed(3)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(samples(4 * BATCHES), batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def step(batch: Any) -> torch.Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduled:
                schedule.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, loader, step


def alone(loader: Any, step: Step) -> list[float]:
    """Train without eventloop."""
    return [step(batch).item() for _ in range(EPOCHS) for batch in loader]


def by_steps(driven: DrivenTrainer, loader: Any, step: Step) -> list[float]:
    """Train with the steps of a DrivenTrainer."""
    losses = []
    driven.begin_run()
    for _ in range(EPOCHS):
        driven.begin_epoch(len(loader))
        for batch in loader:
            driven.begin_iter(batch)
            loss = step(batch)
            losses.append(loss.item())
            driven.end_iter({"loss": loss})
        driven.end_epoch()
    driven.end_run()
    return losses


def by_iterators(driven: DrivenTrainer, loader: Any, step: Step) -> list[float]:
    """Train with `epochs` and `batches`."""
    losses = []
    for _ in driven.epochs():
        for batch in driven.batches(loader):
            loss = step(batch)
            losses.append(loss.item())
            driven.outputs = {"loss": loss}
    return losses


@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a scheduler"])
@pytest.mark.parametrize("attachment", [by_steps, by_iterators])
def test_a_loop_with_accelerate(
    tmp_path: Path, attachment: Callable[[DrivenTrainer, Any, Step], list[float]], scheduled: bool
) -> None:
    """The losses and weights are bitwise those of the loop alone, and each batch of it is an iteration with its events."""
    expected, _, loader, step = prepared(scheduled)
    losses = alone(loader, step)
    reset_accelerator()
    model, optimizer, loader, step = prepared(scheduled)
    driven = DrivenTrainer(
        model,
        optimizer=optimizer,
        max_epochs=EPOCHS,
        hooks=[EMAHook()],
        writers=[JSONLWriter()],
        default_hooks={"logger": {"interval": 1}},
        work_dir=tmp_path,
    )
    seen: list[str] = []
    driven.bus.subscribe(
        lambda event: seen.append(type(event).__name__),
        *(
            f"{when}_{what}"
            for when in ("before", "after")
            for what in ("run", "train", "train_epoch", "train_iter")
        ),
    )

    found = attachment(driven, loader, step)
    driven.close()

    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))
    epoch = ["BeforeTrainEpoch", *["BeforeTrainIter", "AfterTrainIter"] * BATCHES, "AfterTrainEpoch"]
    assert seen == ["BeforeRun", "BeforeTrain", *epoch * EPOCHS, "AfterTrain", "AfterRun"]
    assert read_costs(tmp_path).phases.iterations == EPOCHS * BATCHES
    logged = [line["loss"] for line in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in line]
    assert logged == pytest.approx(losses)


def test_an_engine_of_ignite_with_accelerate(tmp_path: Path) -> None:
    """The bridge to ignite takes an optimizer that Accelerate has wrapped, and emits an event for each step."""
    pytest.importorskip("ignite", reason="ignite is not installed: pip install 'torch-eventloop[ignite]'")
    from ignite.engine import Engine

    from eventloop.bridges.ignite import attach

    model, optimizer, loader, step = prepared(scheduled=False)
    engine = Engine(lambda engine, batch: step(batch).item())
    bus = attach(engine, model=model, optimizer=optimizer, work_dir=tmp_path)
    seen: list[int] = []
    bus.on("after_optimizer_step")(lambda trainer, event: seen.append(event.iter))

    engine.run(loader, max_epochs=1)

    assert seen == [1, 3]  # two batches are accumulated
