"""A run that is made longer: its schedules go on as if they had been built for that length, or it is said that they do not."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import stopped
from tests.support.trainers import MakeTrainer, batches, collect, tiny_model

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

PER_EPOCH, SHORT, LONG = 3, 2, 4

Build = Callable[..., Trainer]
Values = list[tuple[float, float]]


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Build:
    """Build a trainer whose schedules are made for its length."""

    def make(schedulers: Any, epochs: int, name: str = "run", lr: Any = 0.1, **options: Any) -> Trainer:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        return make_trainer(
            model=model, optimizer=optimizer, schedulers=schedulers(optimizer, epochs * PER_EPOCH), max_epochs=epochs,
            train_loader=batches(PER_EPOCH), work_dir=tmp_path / name, **options,
        )  # fmt: skip

    return make


def window(kind: str, **arguments: Any) -> dict[str, Any]:
    """One of MMEngine's, by iteration."""
    return {"type": kind, "by_epoch": False, **arguments}


class OwnDecay(torch_lr.LRScheduler):
    """A scheduler of the user's, recursive as PyTorch's are."""

    def __init__(self, optimizer: Any, steps: int) -> None:
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        left, former = max(0, self.steps - self.last_epoch), self.steps - self.last_epoch + 1
        first = self.last_epoch == 0
        return [
            group["lr"] if first else group["lr"] * left / max(1, former)
            for group in self.optimizer.param_groups
        ]


KINDS: dict[str, Any] = {
    "windows": lambda o, n: [
        window("LinearLR", start_factor=0.1, end=n // 3), window("CosineAnnealingLR", begin=n // 3, end=n, eta_min=0.01)
    ],
    "momentum": lambda o, n: [window("PolyLR", end=n), window("LinearMomentum", start_factor=0.5, end=n)],
    "cosine": lambda o, n: [torch_lr.CosineAnnealingLR(o, n)],
    "linear": lambda o, n: [torch_lr.LinearLR(o, 1.0, 0.0, n)],
    "poly": lambda o, n: [torch_lr.PolynomialLR(o, n)],
    "one cycle": lambda o, n: [torch_lr.OneCycleLR(o, 0.5, n)],
    "cyclic": lambda o, n: [torch_lr.CyclicLR(o, 0.01, 0.1, step_size_up=n // 3)],
    "lambda": lambda o, n: [torch_lr.LambdaLR(o, lambda step: 0.9**step), torch_lr.StepLR(o, n // 3)],
    "sequence": lambda o, n: [
        torch_lr.SequentialLR(o, [torch_lr.LinearLR(o, 0.1, 1, n // 4), torch_lr.CosineAnnealingLR(o, n - n // 4)], [n // 4])
    ],
    "chain": lambda o, n: [
        torch_lr.ChainedScheduler([torch_lr.LinearLR(o, 0.1, 1, 2), torch_lr.PolynomialLR(o, n)])
    ],
    "epochs and iterations": lambda o, n: [
        {"type": "PolyLR", "end": n // PER_EPOCH, "eta_min": 0.02}, window("CosineAnnealingLR", end=n, eta_min=0.01)
    ],
    "another unit": lambda o, n: [
        {"type": "PolyLR", "end": SHORT} if n == SHORT * PER_EPOCH else window("PolyLR", end=n)
    ],
    "own": lambda o, n: [OwnDecay(o, n)],
}  # fmt: skip
"""Schedulers by the number of iterations."""


def values(build: Build, kind: Any, epochs: int, **resume: Any) -> tuple[Trainer, Values]:
    """Train a run, or the rest of one; return the trainer, and the rate and the momentum of each iteration."""
    trainer = build(KINDS[kind], epochs, "run" if resume else "whole")
    found: Values = []

    def note(trainer: Trainer, event: Any) -> None:
        group = trainer.optimizer.param_groups[0]
        found.append((float(group["lr"]), group["momentum"]))

    trainer.bus.subscribe(note, "before_train_iter")
    if resume:
        trainer.resume(**resume)
    trainer.train()
    return trainer, found


@pytest.mark.representative(2)
@pytest.mark.parametrize("after", [SHORT * PER_EPOCH, SHORT * PER_EPOCH - 2], ids=["end", "mid-epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_apply_goes_on_where_the_longer_run_is(build: Build, kind: str, after: int) -> None:
    """To the bit the values are those of a run that had the new arguments from its first iteration on: also of a rate that
    had come to 0, and of a window that counts in another unit now."""
    stopped(build(KINDS[kind], SHORT), after)
    whole, expected = values(build, kind, LONG)

    longer, found = values(build, kind, LONG, path="auto", changed="apply")

    assert found == expected[after:]
    assert [s.state_dict() for s in longer.schedulers] == [s.state_dict() for s in whole.schedulers]


def test_what_cannot_be_reckoned_goes_on_from_there(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """A function of somebody's own may do anything: where it fails the rate is scaled, and the reason told."""
    gone = threading.Event()

    def half(step: int) -> float:
        if gone.is_set():
            raise RuntimeError("it is gone")
        return 0.5

    kind = lambda o, n: [torch_lr.MultiplicativeLR(o, half), torch_lr.StepLR(o, n)]
    short = build(kind, SHORT)
    short.train()
    longer = build(kind, LONG, lr=0.4)
    gone.set()

    longer.resume(changed="apply")

    rate = short.optimizer.param_groups[0]["lr"]
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(4 * rate)
    assert (
        "cannot be computed; the schedules continue from the current rate: RuntimeError('it is gone')"
        in caplog.text
    )


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_apply_tells_where_the_rate_goes_on(build: Build, caplog: pytest.LogCaptureFixture, lr: Any) -> None:
    """With both values; a rate in a tensor, which a captured step holds, stays one."""
    build(KINDS["poly"], SHORT, lr=copy.deepcopy(lr)).train()
    longer = build(KINDS["poly"], LONG, lr=copy.deepcopy(lr))

    longer.resume(changed="apply")

    assert float(longer.optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    assert type(longer.optimizer.param_groups[0]["lr"]) is type(lr)
    assert re.search(
        r"lr: 0\.0 by the checkpoint's schedules, 0\.0(5|49999)\d* by this trainer's",
        caplog.text,
    )
    assert "the learning rate is 0" not in caplog.text


@pytest.mark.parametrize("kind", ["cosine", "windows", "momentum"])
def test_a_resume_without_changes_touches_no_rate(build: Build, kind: str) -> None:
    """With whatever answer, to the bit: nothing is computed again."""
    stopped(build(KINDS[kind], SHORT), 4)

    expected, found = (
        values(build, kind, SHORT)[1],
        values(build, kind, SHORT, path="auto", changed="apply")[1],
    )

    assert found == expected[4:]


def test_a_rate_that_a_handler_moved_is_left_to_it(build: Build) -> None:
    """Another weight decay is no reason to compute the rate again."""

    def halve(trainer: Trainer, event: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    short = build(KINDS["cosine"], SHORT)
    short.bus.subscribe(halve, "before_train_iter", once=True)
    rate = stopped(short, 2).optimizer.param_groups[0]["lr"]
    second = build(KINDS["cosine"], SHORT)
    second.optimizer.param_groups[0]["weight_decay"] = 0.01

    second.resume(changed="apply")

    assert second.optimizer.param_groups[0]["lr"] == rate


def test_one_that_follows_a_metric_is_scaled(build: Build) -> None:
    """What it has done depends on scores that are no more: it goes on in proportion."""
    plateau = lambda o, n: [torch_lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9)]
    build(plateau, SHORT, val_loader=batches(1)).train()
    second = build(plateau, LONG, lr=0.4, val_loader=batches(1))

    second.resume(changed="apply")

    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.4 / 2)


@pytest.mark.parametrize(
    ("kind", "epochs", "changed", "said"),
    [("linear", LONG, "keep", 1), ("as long", LONG, "refuse", 1), ("cosine", SHORT, "refuse", 0)],
)
def test_a_rate_of_0_is_logged(
    build: Build, caplog: pytest.LogCaptureFixture, kind: str, epochs: int, changed: Any, said: int
) -> None:
    """Where the schedules of the checkpoint have ended, or this trainer's were not made longer with the run; not where
    nothing is left to train."""
    kinds = {**KINDS, "as long": lambda o, n: [torch_lr.PolynomialLR(o, SHORT * PER_EPOCH)]}
    build(kinds[kind], SHORT).train()
    caplog.clear()

    build(kinds[kind], epochs).resume(changed=changed)

    told = [line for line in caplog.messages if "the learning rate is 0" in line]
    assert len(told) == said
    assert all(
        "unless its schedules raise it again, the rest of the run trains nothing" in line for line in told
    )


@pytest.mark.parametrize("changed", ["keep", "apply", "refuse"])
def test_a_cycle_that_is_too_short_is_refused(build: Build, changed: Any) -> None:
    """PyTorch's OneCycleLR would raise in the middle of the longer run; nothing is loaded. A run that was always longer
    than its cycle goes on."""
    build(KINDS["one cycle"], SHORT).train()
    own = KINDS["one cycle"] if changed == "keep" else lambda o, n: KINDS["one cycle"](o, SHORT * PER_EPOCH)
    longer = build(own, LONG)

    with pytest.raises(
        CheckpointError, match=r"nothing was loaded: a OneCycleLR of total_steps=6 .* this run has 12"
    ):
        longer.resume(changed=changed)

    assert longer.iter == 0
    short: Any = lambda o, n: [torch_lr.OneCycleLR(o, 0.5, 5)]
    stopped(build(short, SHORT, "other"), 3)
    second = build(short, SHORT, "other")
    second.resume()
    assert second.iter == 3


@pytest.mark.parametrize(
    ("unit", "said"), [("epochs", "max_epochs=2, and 2 are done"), ("iters", "max_iters=4, and 4 are done")]
)
def test_a_run_that_is_done(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, unit: str, said: str
) -> None:
    """Is gone on with by a warning, once: it ends as one that has trained does."""
    options: dict[str, Any] = {
        f"max_{unit}": 2 if unit == "epochs" else 4,
        "hooks": [CheckpointHook(interval=1)],
    }
    first = make_trainer(**options)
    with caplog.at_level(logging.WARNING, "eventloop"):
        first.train()
    assert "nothing is left" not in caplog.text
    second = make_trainer(**options)
    second.resume()
    trained = collect(second, "before_train_iter")

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert trained == []
    (told,) = [line for line in caplog.messages if "nothing is left" in line]
    assert told == f"nothing is left to train: {said}; build the Trainer with more to go on"


def test_a_run_whose_validation_is_left_is_not_done(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of an epoch's end is saved before its validation, which a resumed run makes."""
    make_trainer(
        max_epochs=1, val_loader=batches(1), hooks=[CheckpointHook(interval=1, save_last=False)]
    ).train()
    second = make_trainer(max_epochs=1, val_loader=batches(1))
    second.resume()
    validated = collect(second, "after_val")

    second.train()

    assert len(validated) == 1
    assert "nothing is left" not in caplog.text
