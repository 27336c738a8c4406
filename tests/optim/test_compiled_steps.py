"""Optimizer steps and train steps that `torch.compile` made: nothing of ours breaks their graphs, and all is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EMAHook
from tests.support.inside_torch import compile_anew, compiler_counts
from tests.support.saving import Latest
from tests.support.trainers import MakeTrainer, batches, tiny_model

pytestmark = [
    pytest.mark.slow,
    # Dynamo's
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]
WAYS = ["the optimizer hook", "by hand", "whole step"]


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Each test compiles anew."""
    compile_anew()
    yield
    compile_anew()


def make(make_trainer: MakeTrainer, way: str, **options: Any) -> Trainer:
    """A training of six iterations whose optimizer's step is compiled."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options |= {"model": model, "optimizer": optimizer, "train_loader": batches(6), "max_iters": 6}
    if way == "the optimizer hook":
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        return make_trainer(**options)
    compiled = torch.compile(optimizer.step, backend="eager") if way == "by hand" else optimizer.step

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        compiled()
        return loss.detach()

    options["train_step"] = torch.compile(step, backend="eager") if way == "whole step" else step
    return make_trainer(default_hooks={"optimizer": None}, **options)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_optimizer_break_no_graph(make_trainer: MakeTrainer, way: str) -> None:
    """With checkpoints within the run and an average, Dynamo counts what it counts without: and each step is averaged."""
    make(make_trainer, way).train()
    bare = compiler_counts()
    compile_anew()
    average = EMAHook(momentum=0.5)
    trainer = make(make_trainer, way, hooks=[CheckpointHook(2, by_epoch=False), average])

    trainer.train()

    assert compiler_counts() == bare
    assert bare[1] == 0
    assert average.ema_model.steps == 6


@pytest.mark.parametrize(("way", "late"), [*zip(WAYS, [True, False, False], strict=True)])
def test_no_copy_is_left_to_a_compiled_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, way: str, late: bool
) -> None:
    """Weights that a compiled step changes without waiting are copied at once; the optimizer hook waits before its step.
    No save fails."""
    latest = Latest(monkeypatch)
    trainer = make(make_trainer, way, hooks=[CheckpointHook(1, by_epoch=False)])
    try:
        with trainer.bus.capture("checkpoint_failed") as failed:
            trainer.train()
    finally:
        latest.let_go()

    assert (latest.copies > 0) == late
    assert failed == []


def test_metrics_in_a_compiled_step(make_trainer: MakeTrainer) -> None:
    """A put within it breaks the graph, and has each value; also after Dynamo has given up to compile it."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.metrics.put_scalar("own", loss.detach() * 2)
        return loss * 1.0

    trainer = make_trainer(
        train_step=torch.compile(step, backend="eager"),
        train_loader=batches(10),
        max_iters=10,
        default_hooks={"checkpoint": None},
    )

    trainer.train()

    losses = [value * 2 for value, _ in trainer.metrics.history("loss").values()]
    assert len(losses) == 10
    assert [value for value, _ in trainer.metrics.history("own").values()] == losses
