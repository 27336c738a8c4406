"""`trainer.find_lr()`: the learning rate range test, of which nothing stays."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from eventloop import LRCurve, Trainer
from eventloop.hooks import AmpOptimizerHook, EMAHook, GradientCumulativeOptimizerHook, OptimizerHook
from tests.support.interrupted import BATCH, Augmented, assert_same, seed, state_of
from tests.support.trainers import LOOP_EVENTS, MakeTrainer, batches, collect, samples, shuffled


def build(make_trainer: MakeTrainer, **options: Any) -> Trainer:
    """A trainer with everything that a trial training could change: dropout, batch statistics, noise from all random
    generators, a moving average, a schedule, a shuffled loader."""
    seed()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments: dict[str, Any] = {
        "hooks": [EMAHook(momentum=0.01)],
        "schedulers": [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)],
        "train_loader": DataLoader(Augmented(), BATCH, shuffle=True),
    }
    return make_trainer(model=model, optimizer=optimizer, **{**arguments, **options})


HOOKS: dict[str, Callable[[], list[Any]]] = {
    "default": lambda: [EMAHook(momentum=0.01)],
    "clipped": lambda: [OptimizerHook(grad_clip={"max_norm": 0.5})],
    "accumulated": lambda: [GradientCumulativeOptimizerHook(3)],
    "scaled": lambda: [AmpOptimizerHook(dtype="bfloat16", loss_scale="dynamic", cumulative_iters=2)],
}
STOPPED = pytest.mark.parametrize("after", [0, 7], ids=["before the run", "after a stop in an epoch"])


def stop_at(trainer: Trainer, after: int) -> None:
    """Train for some iterations."""
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.iter == after - 1 else None, "after_train_iter"
    )
    trainer.train()


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return all that a checkpoint holds, and what it does not: gradients, modes, fields and metrics."""
    optimizer: Any = trainer.optimizer
    return {
        "state": state_of(trainer),
        "gradients": [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
        "modes": [module.training for module in trainer.model.modules()],
        "attributes": [*vars(optimizer)],
        "order": [[*group] for group in optimizer.param_groups],
        "fields": {
            name: value
            for name, value in vars(trainer).items()
            if isinstance(value, int | float | str | type(None))
        },
        "metrics": dict(trainer.metrics.latest()),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state(),
    }


@pytest.mark.representative(2)
@STOPPED
@pytest.mark.filterwarnings("ignore:cumulative_iters")
@pytest.mark.parametrize("hooks", HOOKS)
def test_everything_is_restored(make_trainer: MakeTrainer, hooks: str, after: int) -> None:
    """Each value and random state is bitwise as before, with every optimizer hook, and within a run that was stopped."""
    trainer = build(make_trainer, hooks=HOOKS[hooks]())
    if after:
        stop_at(trainer, after)
    objects = {name: id(value) for name, value in vars(trainer).items()}
    tensors = [id(value) for state in trainer.optimizer.state.values() for value in state.values()]
    before = everything(trainer)

    curve = trainer.find_lr(1e-5, 1.0, 30)

    assert len(curve.losses) > 3
    assert_same(everything(trainer), before)
    assert {name: id(value) for name, value in vars(trainer).items()} == objects
    assert [id(v) for state in trainer.optimizer.state.values() for v in state.values()] == tensors


@pytest.mark.representative(1)
@STOPPED
@pytest.mark.filterwarnings("ignore:cumulative_iters")
@pytest.mark.parametrize("hooks", HOOKS)
def test_a_training_afterwards(make_trainer: MakeTrainer, tmp_path: Path, hooks: str, after: int) -> None:
    """Its losses and its final state are bitwise those of a training without the test."""
    results: list[tuple[list[float], dict[str, Any]]] = []
    for tests in (False, True):
        trainer = build(make_trainer, hooks=HOOKS[hooks](), work_dir=tmp_path / str(tests))
        losses: list[float] = []
        trainer.bus.subscribe(
            lambda trainer, event, losses=losses: losses.append(trainer.outputs["loss"].item()),
            "after_train_iter",
        )
        if after:
            stop_at(trainer, after)
        if tests:
            trainer.find_lr(iterations=20)
        trainer.train()
        results.append((losses, state_of(trainer)))

    assert results[0][0] == results[1][0]
    assert len(results[0][0]) == 32
    assert_same(results[0][1], results[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_training_with_workers_afterwards(
    make_trainer: MakeTrainer, tmp_path: Path, persistent: bool
) -> None:
    """The workers of the training draw what they draw without the test."""
    states = []
    for tests in (False, True):
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)
        trainer = build(make_trainer, train_loader=loader, work_dir=tmp_path / str(tests))
        if tests:
            trainer.find_lr(iterations=20)
        trainer.train()
        states.append(state_of(trainer))

    assert_same(states[0], states[1])


class Counted(nn.Linear):
    """A layer that counts its batches, in its extra state."""

    batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"batches": self.batches}

    def set_extra_state(self, state: Any) -> None:
        self.batches = state["batches"]


class Centered(nn.Module):
    """A loss that keeps its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(preds, target)
        self.get_buffer("mean").lerp_(loss.detach(), 0.1)
        return loss


def test_extra_states_and_the_buffers_of_the_loss(make_trainer: MakeTrainer) -> None:
    """What modules save by get_extra_state, and the buffers of a loss that is a module, are restored too."""
    model, loss = Counted(2, 3), Centered()

    make_trainer(model=model, loss_fn=loss).find_lr()

    assert model.batches == 0
    assert loss.mean == 0.0


def test_it_is_restored_after_an_error(make_trainer: MakeTrainer) -> None:
    """An error of the step leaves the trainer as it was too, and autocast is left."""
    calls: list[int] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the fifth step")
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    trainer = build(make_trainer, train_step=step, hooks=[AmpOptimizerHook(dtype="bfloat16")])
    before = everything(trainer)

    with pytest.raises(RuntimeError, match="the fifth step"):
        trainer.find_lr()

    assert_same(everything(trainer), before)
    assert not torch.is_autocast_enabled("cpu")


def test_handlers_hear_nothing(make_trainer: MakeTrainer) -> None:
    """No event reaches a subscriber, and no metric, file or checkpoint is written."""
    trainer = build(make_trainer)
    seen = collect(trainer, *LOOP_EVENTS, "after_backward", "after_optimizer_step", "before_save_checkpoint")
    files = sorted(trainer.work_dir.rglob("*"))

    trainer.find_lr(iterations=10)

    assert seen == []
    assert sorted(trainer.work_dir.rglob("*")) == files


def test_the_step_is_that_of_the_training(make_trainer: MakeTrainer) -> None:
    """A step of the user's own is called, on batches on the trainer's device, with the rates of the curve, over as many
    passes as it takes."""
    rates: list[float] = []
    seen: list[Any] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        seen.append(batch)
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    data = batches(3)
    trainer = make_trainer(train_step=step, train_loader=data, limit_batches={"train": 2})

    curve = trainer.find_lr(0.001, 0.1, 4)

    assert curve.lrs == pytest.approx([0.001 * 100 ** (k / 4) for k in (1, 2, 3, 4)])
    assert rates == [curve.lrs[0], *curve.lrs[:3]]  # as in ignite
    assert [next(i for i, b in enumerate(data) if b[0] is batch[0]) for batch in seen] == [0, 1, 0, 1]


def test_a_step_that_steps_itself(make_trainer: MakeTrainer) -> None:
    """Without an optimizer hook the step makes its own updates, and is restored."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        return loss.detach()

    trainer = build(make_trainer, train_step=step, default_hooks={"optimizer": None})
    before = everything(trainer)

    curve = trainer.find_lr(1e-4, 1.0, 30)

    assert len({*curve.losses}) == len(curve.losses)
    assert_same(everything(trainer), before)


def test_a_rate_that_is_a_tensor(make_trainer: MakeTrainer) -> None:
    """A compiled or captured step holds the tensor: it is filled, and has its value again."""
    model = nn.Linear(2, 3)
    rate = torch.tensor(0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    trainer = make_trainer(model=model, optimizer=optimizer)

    trainer.find_lr(iterations=5)

    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.01)


class Diverging(nn.Module):
    """A model whose loss is given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._losses = iter(losses)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.weight * 0 + next(self._losses)


@pytest.mark.parametrize(
    ("losses", "length", "diverged"),
    [
        ([4.0, 3.0, 2.0, 11.0, 1.0, 1.0], 4, True),
        ([4.0, 3.0, float("nan"), 1.0, 1.0, 1.0], 2, True),
        ([4.0, 3.0, 2.0, 9.0, 1.0, 1.0], 6, False),
        ([-4.0, -3.0, -2.0, -9.0, -1.0, -1.0], 6, False),
    ],
)
def test_it_ends_early(make_trainer: MakeTrainer, losses: list[float], length: int, diverged: bool) -> None:
    """At a loss of five times the lowest one, which belongs to the curve, and at one that is no number, which does not."""
    trainer = make_trainer(model=Diverging(losses), loss_fn=lambda preds, target: preds)

    curve = trainer.find_lr(iterations=6, smoothing=1.0)

    assert (curve.losses, curve.diverged) == (losses[:length], diverged)


def test_the_suggestion() -> None:
    """It is where the loss falls fastest, before its lowest point."""
    curve = LRCurve([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [9.0, 8.0, 5.0, 4.0, 8.0, 0.5][:5], True)

    assert curve.suggestion == 2.0
    with pytest.raises(
        RuntimeError,
        match="the loss must fall for at least 3 iterations, and it is lowest in iteration 2 of 3",
    ):
        _ = LRCurve([1.0, 2.0, 3.0], [3.0, 2.0, 4.0], False).suggestion


def test_the_plot(tmp_path: Path) -> None:
    """It is a page of its own, with the suggestion if there is one."""
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'torch-eventloop[report]'")

    page = LRCurve([1.0, 2.0, 3.0, 4.0], [9.0, 8.0, 5.0, 9.0], True).plot(tmp_path / "lr.html")
    LRCurve([1.0], [2.0], False).plot(tmp_path / "short.html")

    text = page.read_text()
    assert "suggestion 2.00e+00" in text
    assert "suggestion" not in (tmp_path / "short.html").read_text().rsplit("Plotly.newPlot", 1)[1]
    with pytest.raises(ValueError, match=r"path must end with \.html, .*, got 'lr\.png'"):
        LRCurve([1.0], [2.0], False).plot("lr.png")
    with pytest.raises(TypeError, match="path must be a path, a str or a Path, got 3"):
        LRCurve([1.0], [2.0], False).plot(3)  # type: ignore[arg-type]


def test_a_plot_without_plotly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)

    with pytest.raises(
        ImportError, match=r"LRCurve.plot needs plotly: pip install 'torch-eventloop\[report\]'"
    ):
        LRCurve([1.0], [2.0], False).plot(tmp_path / "lr.html")


class Stream(IterableDataset[Any]):
    """A stream with a position."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(8))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start_lr": 0.0}, ValueError, r"start_lr must be above 0, got 0\.0"),
        ({"start_lr": "small"}, TypeError, "start_lr must be a number, got 'small'"),
        ({"start_lr": 1.0, "end_lr": 0.1}, ValueError, r"end_lr must be above start_lr=1\.0, got 0\.1"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"smoothing": 2.0}, ValueError, r"smoothing must be above 0 and at most 1, got 2\.0"),
        ({"divergence": 1.0}, ValueError, r"divergence must be above 1, got 1\.0"),
    ],
)
def test_bad_arguments(
    make_trainer: MakeTrainer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Each is refused with what was expected and what came."""
    with pytest.raises(error, match=message):
        make_trainer().find_lr(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_loader": None}, ValueError, "give the Trainer a train_loader"),
        (
            {"train_loader": iter(batches(3))},
            TypeError,
            "the position of the list_iterator in the train loader",
        ),
        (
            {"train_loader": DataLoader(Stream(), 4)},
            TypeError,
            "the position of the Stream in the train loader",
        ),
        ({"loss_fn": None}, ValueError, "the trainer has no step"),
        ({"model": nn.LazyLinear(2)}, ValueError, "whose parameters have values, and 'weight' is lazy: call"),
        ({"several": True}, TypeError, "find_lr tests the learning rate of one optimizer, .* is {'a': SGD"),
    ],
    ids=["no loader", "iterator", "stream", "no step", "lazy", "optimizers"],
)
def test_a_trainer_that_cannot_be_tested(
    make_trainer: MakeTrainer, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """It is refused before anything is trained."""
    if options.pop("several", False):
        options["model"] = model = nn.Linear(2, 3)
        options["optimizer"] = {
            "a": torch.optim.SGD([model.weight], lr=0.1),
            "b": torch.optim.SGD([model.bias], lr=0.1),
        }

    with pytest.raises(error, match=message):
        make_trainer(**options).find_lr()


def test_within_a_run(make_trainer: MakeTrainer) -> None:
    """A handler cannot call it."""
    trainer = make_trainer()
    trainer.bus.subscribe(lambda trainer, event: trainer.find_lr(), "after_train_iter")

    with pytest.raises(RuntimeError, match=r"trainer\.find_lr\(\) was called in the middle of a run"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
@pytest.mark.parametrize(
    ("momentum", "end", "diverges"), [(0.0, 10.0, False), (0.9, 10.0, False), (0.0, 1e4, True)]
)
def test_the_curve_is_ignites(make_trainer: MakeTrainer, momentum: float, end: float, diverges: bool) -> None:
    """Rates, losses and the suggestion are those of ignite's `FastaiLRFinder`, on the same seed, model and data."""
    pytest.importorskip(
        "ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'"
    )
    from ignite.engine import create_supervised_trainer
    from ignite.handlers import FastaiLRFinder

    iterations, start = 60, 1e-4
    curves = []
    for ours in (True, False):
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=start, momentum=momentum)
        loader = shuffled(10, 8)
        torch.manual_seed(5)
        if ours:
            trainer = make_trainer(model=model, optimizer=optimizer, train_loader=loader)
            found = trainer.find_lr(start, end, iterations)
            assert found.diverged is diverges
            curves.append((found.lrs, found.losses, found.suggestion))
            continue
        engine, finder = create_supervised_trainer(model, optimizer, F.cross_entropy), FastaiLRFinder()
        to_save = {"model": model, "optimizer": optimizer}
        with finder.attach(engine, to_save, num_iter=iterations, end_lr=end) as engine:
            engine.run(loader, max_epochs=iterations // 10)
        results = finder.get_results()
        curves.append((results["lr"], results["loss"], finder.lr_suggestion()))

    assert curves[0] == curves[1]
    assert (len(curves[0][0]) == iterations) is not diverges
