"""Test that settings of a resumed run are compared with the checkpoint's, and that `changed` decides between
them."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import AmpOptimizerHook, EMAHook
from eventloop.optim.optimizer_states import optimizer_state
from tests.support.interrupted import assert_same, stop_after
from tests.support.trainers import MakeTrainer, batches, samples, tiny_model

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

Build = Callable[..., Trainer]


class Halves(BatchSampler):
    """A user's batch sampler."""


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Build:
    """Return a function that builds a trainer with some settings changed."""

    def make(
        lr: float = 0.1, scheduler: Any = None, optimizer: Any = None, size: int = 4, **changes: Any
    ) -> Trainer:
        model = tiny_model()
        kind = optimizer or (lambda groups: torch.optim.SGD(groups, lr=lr, momentum=0.9))
        made = kind(model.parameters())
        given = {
            "train_loader": DataLoader(samples(20), size),
            "max_epochs": 4,
            "work_dir": tmp_path,
            **changes,
        }
        return make_trainer(
            model=model, optimizer=made, schedulers=[scheduler(made)] if scheduler else [], **given
        )

    return make


def stopped(trainer: Trainer, after: int = 7) -> dict[str, Any]:
    """Train for a while, and return the first param group."""
    stop_after(trainer, after)
    trainer.train()
    group = trainer.optimizer.param_groups[0]
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def refused(trainer: Trainer) -> list[str]:
    """Return the lines of the refusal, and assert that nothing changed."""

    def live() -> Any:
        return trainer.model.state_dict(), optimizer_state(trainer.optimizer), trainer.iter

    before = copy.deepcopy(live())
    with pytest.raises(CheckpointError) as error:
        trainer.resume()
    assert_same(live(), before)
    return str(error.value).splitlines()


def test_every_change_is_listed_with_both_values(build: Build) -> None:
    """The refusal lists each change in a line with both values, and then the remedies."""
    stopped(build(scheduler=lambda o: torch_lr.MultiStepLR(o, [5, 9])))
    other = build(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.4, momentum=0.5, weight_decay=0.01),
        size=5,
        scheduler=lambda o: torch_lr.MultiStepLR(o, [6, 9], gamma=0.5),
        max_epochs=6,
        hooks=[EMAHook()],
    )

    lines = refused(other)

    assert lines[0].endswith(" is of a run with other settings; nothing was loaded:")
    where = "in the checkpoint, {!r} in this trainer"
    assert lines[1:-1] == [
        f"  {name}: {saved!r} {where.format(own)}"
        for name, saved, own in [
            ("lr", 0.1, 0.4),
            ("momentum", 0.9, 0.5),
            ("weight_decay", 0, 0.01),
            ("MultiStepLR.milestones", [5, 9], [6, 9]),
            ("MultiStepLR.gamma", 0.1, 0.5),
            ("batch_size", 4, 5),
            ("loader_length", 5, 4),
            ("max_epochs", 4, 6),
            ("hooks", [], ["EMAHook"]),
        ]
    ]
    assert lines[-1] == (
        'resume(path, changed="keep") continues with the checkpoint\'s values, changed="apply" with this trainer\'s; '
        "with either batch_size, loader_length are this trainer's"
    )


SCHEDULERS = {
    "cosine": lambda o: torch_lr.CosineAnnealingLR(o, 50),
    "one cycle": lambda o: torch_lr.OneCycleLR(o, 0.5, total_steps=40),
    "plateau": lambda o: torch_lr.ReduceLROnPlateau(o, patience=0),
    "restarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: torch_lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequence": lambda o: torch_lr.SequentialLR(
        o, [torch_lr.LinearLR(o, 0.1, total_iters=3), torch_lr.StepLR(o, 2)], [3]
    ),
    "chain": lambda o: torch_lr.ChainedScheduler([torch_lr.LinearLR(o), torch_lr.ExponentialLR(o, 0.9)]),
    "lambda": lambda o: torch_lr.LambdaLR(o, lambda step: 0.9**step),
    "window": lambda o: {"type": "StepLR", "step_size": 2, "gamma": 0.5, "begin": 1, "by_epoch": False},
    "momentum": lambda o: {"type": "LinearMomentum", "start_factor": 0.5, "end": 9, "by_epoch": False},
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_a_schedule_moved_is_no_change(
    build: Build, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The same trainer resumes without a message at any point of its schedule."""
    val = {"val_loader": DataLoader(samples(4), 4)}
    stopped(build(scheduler=SCHEDULERS[name], **val), 7)
    second = build(scheduler=SCHEDULERS[name], **val)
    second.resume()
    stopped(second, 13)
    third = build(scheduler=SCHEDULERS[name], **val)

    third.resume()

    assert third.iter == 13
    assert caplog.text == ""


OTHERS: list[tuple[str, Any, list[str]]] = [
    ("cosine", lambda o: torch_lr.CosineAnnealingLR(o, 60), ["CosineAnnealingLR.T_max: 50"]),
    ("one cycle", lambda o: torch_lr.OneCycleLR(o, 0.5, total_steps=60), ["OneCycleLR.total_steps: 40"]),
    ("plateau", lambda o: torch_lr.ReduceLROnPlateau(o, patience=3), ["ReduceLROnPlateau.patience: 0"]),
    (
        "sequence",
        lambda o: torch_lr.SequentialLR(
            o, [torch_lr.LinearLR(o, 0.1, total_iters=4), torch_lr.StepLR(o, 2)], [4]
        ),
        ["SequentialLR.milestones: [3]", "SequentialLR.schedulers[0].total_iters: 3"],
    ),
    (
        "window",
        lambda o: {"type": "StepLR", "step_size": 3, "gamma": 0.5, "begin": 1, "by_epoch": False},
        ["StepLR.step_size: 2"],
    ),
]


@pytest.mark.representative(2)
@pytest.mark.parametrize(("name", "other", "lines"), OTHERS, ids=[case[0] for case in OTHERS])
def test_arguments_of_schedulers_are_compared(build: Build, name: str, other: Any, lines: list[str]) -> None:
    """Arguments of schedulers are listed by name, also of inner ones; derived values are not listed."""
    val = {"val_loader": DataLoader(samples(4), 4)}
    stopped(build(scheduler=SCHEDULERS[name], **val))

    found = [line.strip() for line in refused(build(scheduler=other, **val))[1:-1]]

    assert [line.partition(" in the checkpoint")[0] for line in found] == lines


def test_keep_goes_on_with_the_checkpoints(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """ "keep" continues with the checkpoint's settings, logs those not used, and saves the kept ones."""
    schedulers = SCHEDULERS["cosine"], lambda o: torch_lr.CosineAnnealingLR(o, 60)
    group = stopped(build(scheduler=schedulers[0]))
    other = build(lr=0.4, scheduler=schedulers[1])

    other.resume(changed="keep")

    now = other.optimizer.param_groups[0]
    assert (now["lr"], now["initial_lr"], other.schedulers[0].T_max) == (group["lr"], 0.1, 50)
    assert "lr: 0.1 in the checkpoint, 0.4 in this trainer; the run continues with 0.1" in caplog.text
    assert "T_max: 50 in the checkpoint, 60 in this trainer; the run continues with 50" in caplog.text
    stopped(other, 12)
    build(lr=0.1, scheduler=schedulers[0]).resume()
    assert "  lr: 0.1 in the checkpoint, 0.4 in this trainer" in refused(
        build(lr=0.4, scheduler=schedulers[0])
    )


def test_apply_goes_on_with_the_new_ones(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """ "apply" continues with this trainer's settings at the checkpoint's step."""
    group = stopped(build(scheduler=lambda o: torch_lr.MultiStepLR(o, [5, 9])))
    new: dict[str, Any] = {"lr": 0.4, "momentum": 0.9, "weight_decay": 0.01}
    other = build(
        optimizer=lambda p: torch.optim.SGD(p, **new), scheduler=lambda o: torch_lr.MultiStepLR(o, [5, 8])
    )

    other.resume(changed="apply")

    now, scheduler = other.optimizer.param_groups[0], other.schedulers[0]
    assert group["lr"] == pytest.approx(0.01)
    assert now["lr"] == pytest.approx(0.04)
    assert (now["initial_lr"], now["weight_decay"]) == (0.4, 0.01)
    assert (scheduler.last_epoch, scheduler.base_lrs, sorted(scheduler.milestones)) == (7, [0.4], [5, 8])
    assert other.optimizer.state_dict()["state"]  # the momentum was loaded
    assert (
        "weight_decay: 0 in the checkpoint, 0.01 in this trainer; the run continues with 0.01" in caplog.text
    )


@pytest.mark.parametrize("named", [{"eta_min": 0.02}, {"eta_min_ratio": 0.2}], ids=["minimum", "ratio"])
def test_the_minimum_of_a_schedule(build: Build, named: dict[str, float]) -> None:
    """The minimum of a window, which PyTorch's scheduler does not know, is compared, kept and applied."""
    cosine = {"type": "CosineAnnealingLR", "T_max": 50, "by_epoch": False}
    rate = stopped(build(scheduler=lambda o: {**cosine, **named}))["lr"]
    lines = refused(build(scheduler=lambda o: cosine))
    kept, applied = build(scheduler=lambda o: cosine), build(scheduler=lambda o: cosine)

    kept.resume(changed="keep")
    applied.resume(changed="apply")

    assert any("CosineAnnealingLR.floor" in line for line in lines), lines
    assert kept.schedulers[0].state_dict()["floor"] == pytest.approx([0.02])
    assert kept.optimizer.param_groups[0]["lr"] == rate
    assert applied.schedulers[0].state_dict()["floor"] == [0.0]
    assert applied.optimizer.param_groups[0]["lr"] < rate


def test_several_groups_and_optimizers_are_named(make_trainer: MakeTrainer) -> None:
    """Changes name the optimizer and the number of the param group."""

    def trainer(lr: float = 0.1, decay: float = 0.1) -> Trainer:
        model: Any = tiny_model()
        weight, bias = model[0].parameters()
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "weight_decay": decay}]
        body = torch.optim.SGD(groups, lr=0.1)
        optimizer = {"head": torch.optim.SGD(model[3].parameters(), lr=lr), "body": body}
        return make_trainer(model=model, optimizer=optimizer)

    trainer().train()
    other = trainer(lr=0.2, decay=0.3)

    assert refused(other)[1:3] == [
        "  head lr: 0.1 in the checkpoint, 0.2 in this trainer",
        "  body weight_decay of param group 1: 0.1 in the checkpoint, 0.3 in this trainer",
    ]
    other.resume(changed="apply")
    assert other.optimizer["head"].param_groups[0]["lr"] == 0.2
    assert [group["weight_decay"] for group in other.optimizer["body"].param_groups] == [0, 0.3]


def test_rate_in_a_tensor(build: Build) -> None:
    """A rate in a tensor is compared by its value, and stays in a tensor."""
    stopped(build(optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1))))
    other = build(optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.25)))

    other.resume(changed="apply")

    assert torch.equal(other.optimizer.param_groups[0]["lr"], torch.tensor(0.25))


def of_eight_ranks(build: Build) -> Trainer:
    """Return a trainer that counts as one of eight ranks."""
    trainer = build()
    trainer.world_size = 8
    return trainer


def of_doubles(build: Build) -> Trainer:
    """Return a trainer whose model has float64 weights."""
    trainer = build()
    trainer.model.double()
    return trainer


def halves() -> DataLoader[Any]:
    """Return a loader with a user's batch sampler."""
    return DataLoader(samples(20), batch_sampler=Halves(SequentialSampler(range(20)), 4, False))


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        (
            lambda build: build(hooks=[AmpOptimizerHook(dtype="bfloat16")]),
            lambda build: build(),
            "autocast_dtype: 'bfloat16' in the checkpoint, 'none' in this trainer",
        ),
        (lambda build: build(), of_eight_ranks, "world_size: 1 in the checkpoint, 8 in this trainer"),
        (
            lambda build: build(),
            of_doubles,
            "model_dtypes: 'float32' in the checkpoint, 'float64' in this trainer",
        ),
        (
            lambda build: build(),
            lambda build: build(train_loader=DataLoader(samples(20), 4, shuffle=True)),
            "sampler: 'SequentialSampler' in the checkpoint, 'RandomSampler' in this trainer",
        ),
        (
            lambda build: build(),
            lambda build: build(train_loader=halves()),
            "sampler: 'SequentialSampler' in the checkpoint, 'SequentialSampler, Halves' in this trainer",
        ),
    ],
    ids=["autocast", "ranks", "type", "order", "own batches"],
)
def test_what_only_the_trainer_decides(build: Build, was: Any, now: Any, line: str) -> None:
    """Changed precision, number of ranks and order of samples are refused, with how to accept them."""
    stopped(was(build))

    lines = refused(now(build))

    assert f"  {line}" in lines
    assert re.search(r'changed="apply".* this trainer\'s', lines[-1])


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        (
            lambda: DataLoader(samples(20), 4, shuffle=True),
            lambda: Endless(),
            [
                "batch_size: 4 in the checkpoint, None",
                "sampler: 'RandomSampler' in the checkpoint, None",
                "loader_length: 5 in the checkpoint, None",
            ],
        ),
        (
            lambda: batches(5),
            lambda: DataLoader(samples(20), 4),
            ["dataset_length: None in the checkpoint, 20"],
        ),
    ],
    ids=["less", "more"],
)
def test_a_loader_that_says_less_or_more_of_itself(
    build: Build, caplog: pytest.LogCaptureFixture, was: Any, now: Any, lines: list[str]
) -> None:
    """Settings that only one of the two loaders exposes are logged, and the position stays."""
    stopped(build(train_loader=was()))
    other = build(train_loader=now())

    other.resume()

    assert (other.epoch, other.batch_idx) == (1, 2)
    for line in lines:
        assert f"{line} in this trainer; the run continues with {line.rpartition(' ')[2]}" in caplog.text


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(5))


def test_when_to_validate_needs_no_leave(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Changed intervals of validations are logged, and this trainer's are used."""
    stopped(build(val_loader=batches(1)))
    other = build(val_loader=batches(1), val_interval=3, val_begin=2, dynamic_intervals=[(4, 1)])

    other.resume()

    assert "val_interval: 1 in the checkpoint, 3 in this trainer; the run continues with 3" in caplog.text
    assert "val_begin: 1 in the checkpoint, 2 in this trainer; the run continues with 2" in caplog.text
    assert "dynamic_intervals: [] in the checkpoint, [[4, 1]] in this trainer" in caplog.text


@pytest.mark.parametrize("changed", ["keep", "apply"])
def test_another_batch_size_goes_on_at_the_same_part_of_the_epoch(
    build: Build, caplog: pytest.LogCaptureFixture, changed: Any
) -> None:
    """With another batch size the run continues at the same fraction of the epoch."""
    stopped(build())
    other = build(size=2)

    other.resume(changed=changed)

    assert (other.epoch, other.batch_idx) == (1, 4)
    assert "batch_size: 4 in the checkpoint, 2 in this trainer; the run continues with 2" in caplog.text
    other.train()
    assert other.iter == 7 + 6 + 2 * 10


@pytest.mark.parametrize("epochs", [2, 9])
def test_another_length_of_the_run_needs_no_leave(
    build: Build, caplog: pytest.LogCaptureFixture, epochs: int
) -> None:
    """A run may be made longer or shorter, which is logged."""
    stopped(build())
    other = build(max_epochs=epochs)

    with caplog.at_level(logging.WARNING, "eventloop"):
        other.resume()
        other.train()

    assert (
        f"max_epochs: 4 in the checkpoint, {epochs} in this trainer; the run continues with {epochs}"
        in caplog.text
    )
    assert other.epoch == epochs


def test_unknown_answer(build: Build) -> None:
    """An unknown value of `changed` is refused with a suggestion before anything is read."""
    with pytest.raises(ValueError, match='"refuse", "keep" or "apply", got \'aply\': did you mean \'apply\''):
        build().resume(changed="aply")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'^changed must be "refuse", "keep" or "apply", got 3$'):
        build().resume(changed=3)  # type: ignore[arg-type]
