"""A trainer that another engine's loop drives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Bus
from eventloop.bridges import DrivenTrainer
from eventloop.bridges.optimizer_steps import announced_steps
from eventloop.costs.records import read_costs
from eventloop.costs.waits import waiting
from eventloop.hooks import CheckpointHook, EMAHook, Hook, OptimizerHook, ParamSchedulerHook, PreemptionHook
from eventloop.writers import JSONLWriter
from tests.support.trainers import batches, record, tiny_model

MakeDriven = Callable[..., DrivenTrainer]


@pytest.fixture
def make_driven(tmp_path: Path) -> Iterator[MakeDriven]:
    """Build driven trainers of the tiny model, and close them afterwards."""
    made: list[DrivenTrainer] = []

    def make(**changes: Any) -> DrivenTrainer:
        made.append(
            DrivenTrainer(changes.pop("model", None) or tiny_model(), **{"work_dir": tmp_path, **changes})
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def train(model: torch.nn.Module, driven: DrivenTrainer | None, epochs: int = 2) -> list[float]:
    """Train as a loop by hand does, with or without a driven trainer, and return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    if driven is not None:
        driven.begin_run()
    torch.manual_seed(3)
    for _ in range(epochs):
        if driven is not None:
            driven.begin_epoch(3)
        for batch in batches(3):
            if driven is not None:
                driven.begin_iter(batch)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if driven is not None:
                driven.end_iter({"loss": loss})
        if driven is not None:
            driven.end_epoch()
    if driven is not None:
        driven.end_run()
    return losses


def test_the_host_trains_as_without_it(make_driven: MakeDriven) -> None:
    """The weights and losses of a driven training are bitwise those of the host alone."""
    alone, model = tiny_model(), tiny_model()

    expected = train(alone, None)
    losses = train(model, make_driven(model=model, hooks=[EMAHook()]))

    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def test_what_is_logged_and_measured(make_driven: MakeDriven, tmp_path: Path) -> None:
    """Writers get the host's losses with their steps, and the costs have its iterations."""
    model = tiny_model()
    driven = make_driven(model=model, writers=[JSONLWriter()], default_hooks={"logger": {"interval": 1}})

    losses = train(model, driven)
    driven.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses)
    assert read_costs(tmp_path).phases.iterations == 6


def test_modes_are_the_hosts(make_driven: MakeDriven) -> None:
    """A model in eval mode stays in it: a host may train it that way."""
    model = tiny_model().eval()

    train(model, make_driven(model=model))

    assert not model.training


def test_limits_are_those_that_the_host_knows(make_driven: MakeDriven) -> None:
    """Events carry the limits that were given, and None for the others."""
    model = tiny_model()
    driven = make_driven(model=model, max_iters=9)
    rows = record(driven, "after_train_iter")
    seen: list[Any] = []
    driven.bus.subscribe(lambda event: seen.append((event.max_iters, event.max_epochs)), "after_train_iter")

    train(model, driven, epochs=1)

    assert rows
    assert set(seen) == {(9, None)}


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (
            OptimizerHook(),
            "OptimizerHook does backward and the optimizer's step itself, which toyloop does here",
        ),
        (ParamSchedulerHook(), "ParamSchedulerHook does the steps of the schedulers itself, which toyloop"),
        ({"type": "PreemptionHook"}, "PreemptionHook does the handlers of signals itself, which toyloop"),
        ({"type": "Fp16OptimizerHook"}, "Fp16OptimizerHook does backward"),
        ({"type": "StepLrUpdaterHook", "step": 2}, "StepLrUpdaterHook does the learning rate"),
        ({"type": "DistSamplerSeedHook"}, "DistSamplerSeedHook does the seeds of the samplers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hooks_that_own_a_part_of_the_loop(make_driven: MakeDriven, hook: Any, words: str) -> None:
    """A hook that does what the host does is refused by name when the trainer is built."""
    with pytest.raises(ValueError, match=words):
        make_driven(hooks=[hook], host="toyloop")


def test_a_checkpoint_hook_rides_along(make_driven: MakeDriven, tmp_path: Path) -> None:
    """A checkpoint hook that is given saves the host's model."""
    model = tiny_model()

    train(model, make_driven(model=model, hooks=[CheckpointHook(interval=1)]))

    assert (tmp_path / "epoch_2").is_dir()


class Backwards(Hook):
    """A hook for one event."""

    def after_backward(self, trainer: Any, event: Any) -> None: ...


class Epochs(Hook):
    """A hook for the epochs of all modes."""

    def after_epoch(self, trainer: Any, event: Any) -> None: ...


def test_an_event_that_the_host_never_has() -> None:
    """A subscription to an excluded event is refused at its line, with the reason; one made before, at `exclude`."""
    bus = Bus()
    bus.exclude(["after_backward", "after_test_epoch"], "toyloop has no such moment")

    with pytest.raises(
        ValueError, match="after_backward, which this bus never has: toyloop has no such moment"
    ):
        bus.on("after_train_iter", "after_backward")(print)
    with pytest.raises(ValueError, match=r"Backwards.after_backward subscribes to after_backward"):
        Backwards().attach(bus)
    Epochs().attach(bus)
    assert [row.name for row in bus.plan("after_val_epoch")] == ["Epochs.after_epoch"]
    bus.subscribe(lambda event: None, "*")
    with pytest.raises(
        ValueError, match="subscribes to after_val_epoch, which this bus never has: no validation"
    ):
        bus.exclude(["after_val_epoch"], "no validation")


@pytest.mark.parametrize("limit", [{"max_epochs": 0}, {"max_iters": -1}], ids=str)
def test_bad_limits(make_driven: MakeDriven, limit: dict[str, int]) -> None:
    """A limit below 1 is refused by its name."""
    ((name, value),) = limit.items()

    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        make_driven(**limit)


def test_numbers_and_tensors_of_the_host_are_logged(make_driven: MakeDriven, tmp_path: Path) -> None:
    """Numbers and tensors that the host logs reach the writers with their mode and step."""
    driven = make_driven(writers=[JSONLWriter()])
    driven.begin_run()

    driven.log({"acc": 0.5, "norm": torch.tensor(2.0)}, mode="val", step=7)
    driven.end_run()
    driven.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {
        name: (line["mode"], line["step"], line[name])
        for line in lines
        for name in ("acc", "norm")
        if name in line
    }
    assert found == {"acc": ("val", 7, 0.5), "norm": ("val", 7, 2.0)}


def test_numbers_under_names_of_the_engine(make_driven: MakeDriven, tmp_path: Path) -> None:
    """A training's number or tensor under a name of the engine is logged as host/NAME; other modes keep theirs."""
    driven = make_driven(writers=[JSONLWriter()])
    driven.begin_run()

    driven.log({"time": 0.5, "lr/a": torch.tensor(2.0), "lr_scale": 3.0}, step=7)
    driven.log({"time": 4.0}, mode="val", step=7)
    driven.end_run()
    driven.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {
        (line["mode"], name): value
        for line in lines
        for name, value in line.items()
        if isinstance(value, float)
    }
    assert found == {
        ("train", "host/time"): 0.5,
        ("train", "host/lr/a"): 2.0,
        ("train", "lr_scale"): 3.0,
        ("val", "time"): 4.0,
    }


def test_preemption_is_the_hosts(make_driven: MakeDriven) -> None:
    """No default hook of a driven trainer owns a part of the loop."""
    hooks = make_driven().hooks

    assert not [hook for hook in hooks if hook.owns]
    assert not any(isinstance(hook, PreemptionHook) for hook in hooks)


def test_a_step_of_the_host_has_its_time_without_its_waits(make_driven: MakeDriven) -> None:
    """A hook of the optimizer waits within the step: the wait has its own phase, and no other one has it."""
    model, waited = tiny_model(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driven = make_driven(model=model, optimizer=optimizer)

    def wait(*_: Any) -> None:
        nonlocal waited
        began = perf_counter()
        with waiting("background", "upload"):
            time.sleep(0.05)
        waited += perf_counter() - began

    optimizer.register_step_post_hook(wait)
    began = perf_counter()
    with announced_steps(driven):
        train_with(optimizer, driven)
    seconds = perf_counter() - began

    phases = driven.clock.phases
    assert 0.15 <= phases.background <= waited
    assert phases.wall < seconds
    for name in ("forward", "optimizer", "hooks", "unaccounted"):
        assert 0.0 <= getattr(phases, name) < seconds - phases.background


def train_with(optimizer: torch.optim.Optimizer, driven: DrivenTrainer) -> None:
    """Train an epoch of three batches as a host does."""
    driven.begin_run()
    driven.begin_epoch(3)
    for batch in batches(3):
        driven.begin_iter(batch)
        optimizer.step()
        driven.end_iter(None)
    driven.end_epoch()
    driven.end_run()
