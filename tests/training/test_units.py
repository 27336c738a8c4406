"""An iteration that is one optimizer step over several batches: `Trainer(unit="update")`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from eventloop import SkipIteration, Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.events import ScalarsLogged
from eventloop.hooks import (
    CheckpointHook,
    EMAHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
    ThroughputHook,
)
from eventloop.hooks.throughput import WARM_UP
from eventloop.writers import Writer
from tests.support.interrupted import assert_same, seed, state_of
from tests.support.rolled_back import go_back, skip_by_hand
from tests.support.trainers import MakeTrainer, batches, collect, record, shuffled, tiny_model


class Unsized:
    """A loader that does not say how many batches it has."""

    def __init__(self, count: int) -> None:
        self.batches = batches(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Notes(Writer):
    """Keep the scalars of the training by their step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def write(self, event: Any) -> None:
        if isinstance(event, ScalarsLogged) and event.mode == "train":
            self.rows[event.step] = dict(event.scalars)


def options(count: int = 3, **changes: Any) -> dict[str, Any]:
    """Options of a trainer whose steps are over three batches, or so many, and that saves nothing."""
    hook = {"cumulative_iters": count, **changes.pop("hook", {})}
    return {"writers": [], "default_hooks": {"optimizer": hook, "checkpoint": None}, **changes}


def trained(trainer: Trainer) -> Trainer:
    """Train from the same random state, and return the trainer."""
    seed(3)
    trainer.train()
    return trainer


def by_index(trainer: Trainer, batch: Any) -> torch.Tensor:
    """Return a loss that depends on the index of the batch in its pass."""
    return F.cross_entropy(trainer.model(batch[0]), batch[1]) * (1 + trainer.batch_idx)


def by_hand(count: int, epochs: int, length: int, clip: float | None = None) -> torch.nn.Module:
    """Train as timm and Transformers do: each epoch ends with a step, of the batches that are left."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.5, epochs * -(-length // count))
    seed(3)
    for _ in range(epochs):
        loader = batches(length)
        for window in [loader[first : first + count] for first in range(0, length, count)]:
            optimizer.zero_grad()
            for inputs, target in window:
                (F.cross_entropy(model(inputs), target) / len(window)).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
    return model


@pytest.mark.parametrize(
    ("count", "length", "epochs", "hook"),
    [
        (3, 6, 2, {}),
        (3, 8, 1, {"grad_clip": {"max_norm": 0.1}}),
        (4, 3, 1, {}),
        (1, 3, 2, {}),
        (3, 8, 1, {"dtype": "bfloat16"}),
        (2, 5, 1, {"dtype": "float16", "loss_scale": {"init_scale": 2.0**40, "growth_interval": 1}}),
    ],
    ids=[
        "even",
        "clipped tail",
        "longer than the run",
        "one batch",
        "bfloat16",
        "float16 with skipped steps",
    ],
)
@pytest.mark.parametrize(
    "kind", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW], ids=["sgd", "adamw"]
)
def test_weights_are_those_of_the_other_unit_bitwise(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    count: int,
    length: int,
    epochs: int,
    hook: dict[str, Any],
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """The same batches train to the same weights and optimizer states, whatever an iteration is."""
    states: list[Any] = []
    for unit in ("batch", "update"):
        model = tiny_model()
        trainer = make_trainer(
            model=model,
            optimizer=kind(model.parameters(), lr=0.1),
            train_loader=batches(length),
            max_epochs=epochs,
            unit=unit,
            work_dir=tmp_path / unit,
            **options(count, hook=hook),
        )
        trained(trainer)
        states.append((model.state_dict(), trainer.optimizer.state_dict()["state"]))

    assert_same(states[0], states[1])


def test_run_measured_in_iterations_is_that_of_the_other_unit(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """`max_iters` counts updates, over several passes."""
    weights: list[Any] = []
    for unit, iters in (("batch", 9), ("update", 3)):
        changes = options(max_iters=iters, unit=unit, work_dir=tmp_path / unit)
        trainer = trained(make_trainer(train_loader=batches(6), **changes))
        assert trainer.iter == iters
        weights.append(trainer.model.state_dict())

    assert_same(weights[0], weights[1])


@pytest.mark.parametrize("loop", ["train", "hand-written"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_is_that_of_a_plain_loop_bitwise(
    make_trainer: MakeTrainer, loop: str, clip: float | None
) -> None:
    """Each epoch ends with an update of the batches that are left, and schedulers are stepped once an update."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hook: dict[str, Any] = {} if clip is None else {"grad_clip": {"max_norm": clip}}
    changes = options(unit="update", model=model, optimizer=optimizer, train_loader=batches(8), hook=hook)
    trainer = make_trainer(schedulers=[OneCycleLR(optimizer, 0.5, 6)], **changes)
    if loop == "train":
        trained(trainer)
    else:
        seed(3)
        for _ in trainer.epochs():
            for inputs, target in trainer.batches(batches(8)):
                trainer.outputs = {"loss": F.cross_entropy(model(inputs), target)}

    assert_same(model.state_dict(), by_hand(3, 2, 8, clip).state_dict())
    assert trainer.iter == 6


def test_loader_of_unknown_length(make_trainer: MakeTrainer) -> None:
    """The gradients of an update that the end of the loader has cut short are weighted by its batches."""
    trainer = trained(make_trainer(train_loader=Unsized(5), max_epochs=1, unit="update", **options()))
    known = trained(make_trainer(train_loader=batches(5), max_epochs=1, unit="update", **options()))

    assert trainer.iter == known.iter == 2
    for ours, theirs in zip(trainer.model.parameters(), known.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_events_are_those_of_an_update(make_trainer: MakeTrainer) -> None:
    """Iterations begin and end once an update, with counters of updates; only backward is once a batch."""
    trainer = make_trainer(train_loader=batches(5), unit="update", **options())
    names = ["before_train_iter", "after_backward", "after_optimizer_step", "after_train_iter"]
    seen = record(trainer, *names)
    places = collect(trainer, "after_train_iter")

    trained(trainer)

    begin, backward, step, end = names
    epoch = [begin, *[backward] * 3, step, end, begin, *[backward] * 2, step, end]
    assert [name for name, *_ in seen] == epoch * 2
    assert [(event.iter, event.batch_idx, event.max_iters) for event in places] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert trainer.facts.run.iters_per_epoch == 2


@pytest.mark.parametrize("loop", ["train", "hand-written"])
def test_batch_idx_is_that_of_the_batch(make_trainer: MakeTrainer, loop: str) -> None:
    """Within an update `trainer.batch_idx` counts on, so it is the place of `trainer.batch` in its pass."""
    loader = batches(5)
    seen: list[tuple[str, int, float]] = []

    def note(trainer: Trainer, name: str) -> None:
        seen.append((name, trainer.batch_idx, trainer.batch[0][0, 0].item()))

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        note(trainer, "step")
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    trainer = make_trainer(train_loader=loader, train_step=step, unit="update", **options())
    trainer.bus.subscribe(lambda trainer, event: note(trainer, "backward"), "after_backward")
    trainer.bus.subscribe(lambda trainer, event: note(trainer, "end"), "after_train_iter")
    if loop == "train":
        trainer.train()
    else:
        for _ in trainer.epochs():
            for batch in trainer.batches(loader):
                trainer.outputs = {"loss": step(trainer, batch)}

    expected: list[tuple[str, int, float]] = []
    for index, (inputs, _) in enumerate(loader):
        place = index, inputs[0, 0].item()
        expected += [("step", *place), ("backward", *place)]
        expected += [("end", *place)] if index in (2, 4) else []
    assert seen == expected * 2


def test_logged_numbers_are_means_over_the_batches(make_trainer: MakeTrainer) -> None:
    """The loss and other numbers that the step returns are averaged, over the batches that return them."""
    notes = Notes()

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        number = float(batch[1][0])
        weight = next(trainer.model.parameters())
        some = {"first": number} if number in (1, 4) else {}
        return {
            "loss": weight.sum() * 0 + number,
            "number": number,
            "count": torch.tensor(int(number)),
            **some,
        }

    loader = [(torch.ones(1, 2), torch.tensor([float(n)])) for n in (1, 2, 6, 4, 5)]
    changes = options(train_loader=loader, max_epochs=1, train_step=step, unit="update")
    changes["default_hooks"]["logger"] = {"interval": 1}
    trainer = make_trainer(**{**changes, "writers": [notes]})
    trainer.train()
    trainer.bus.flush()

    means = [[row[name] for name in ("loss", "number", "count")] for row in notes.rows.values()]
    assert means == [[3.0] * 3, [4.5] * 3]
    assert [row["first"] for row in notes.rows.values()] == [1.0, 4.0]


def test_memory_is_that_of_one_batch(make_trainer: MakeTrainer) -> None:
    """No graph or output of an earlier batch lives when the next one is run, and each batch is fetched after it."""
    alive: list[int] = []
    order: list[str] = []

    class Output(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            order.append("backward")
            return gradients[0]

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches(3):
                order.append("batch")
                yield batch

        def __len__(self) -> int:
            return 3

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        alive.append(0 if trainer.outputs is None else 1)
        loss: torch.Tensor = Output.apply(F.cross_entropy(trainer.model(batch[0]), batch[1]))  # type: ignore[no-untyped-call]
        return loss

    trained(make_trainer(train_loader=Loader(), train_step=step, max_epochs=1, unit="update", **options()))

    assert alive == [0, 0, 0]
    assert order == ["batch", "backward"] * 3


@pytest.mark.parametrize("stop", [1, 2, 4], ids=["within an epoch", "behind a tail", "within the next epoch"])
@pytest.mark.parametrize("by_epoch", [True, False], ids=["epochs", "iterations"])
def test_resume_continues_bitwise(
    make_trainer: MakeTrainer, tmp_path: Path, stop: int, by_epoch: bool
) -> None:
    """A run that was stopped after an update reads on at the right batch of a shuffled loader."""

    def build(name: str) -> Trainer:
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        changes = options(unit="update", model=model, optimizer=optimizer, train_loader=shuffled(5))
        changes["train_step"] = by_index
        changes["default_hooks"]["checkpoint"] = {"interval": 1, "by_epoch": False}
        length = {"max_epochs": 4} if by_epoch else {"max_iters": 8}
        changes |= {**length, "hooks": [EMAHook()], "work_dir": tmp_path / name}
        return make_trainer(schedulers=[LambdaLR(optimizer, lambda step: 0.9**step)], **changes)

    whole = build("whole")
    trained(whole)
    seed(11)
    resumed = build("resumed")
    resumed.resume(tmp_path / "whole" / f"iter_{stop}")
    resumed.train()

    assert (resumed.iter, whole.iter) == (8, 8)
    assert_same(state_of(resumed), state_of(whole))


def test_failed_update_is_done_again(make_trainer: MakeTrainer) -> None:
    """After an error in one of its batches, another `train` repeats the whole update, from its first batch."""
    fails = [False] * 7 + [True] + [False] * 20

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if fails.pop(0):
            raise OSError("out of order")
        return F.mse_loss(trainer.model(batch[0])[:, 0], batch[1].float())

    def build() -> Trainer:
        # without the dropout, whose random state an error does not restore
        parts = [part for part in tiny_model().children() if not isinstance(part, torch.nn.Dropout)]
        model = torch.nn.Sequential(*parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        changes = {"model": model, "optimizer": optimizer, "train_loader": batches(9), "train_step": step}
        return make_trainer(unit="update", max_epochs=1, **changes, **options())

    failing = build()
    with pytest.raises(OSError, match="out of order"):
        failing.train()
    assert (failing.iter, failing.batch_idx) == (2, 6)
    failing.train()
    whole = build()
    whole.train()

    assert failing.iter == 3
    assert_same(failing.model.state_dict(), whole.model.state_dict())


def test_rollback_skips_batches(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Going back within the run is what a new process does that resumes and skips so many batches by hand."""

    def build(name: str) -> Trainer:
        changes = options(unit="update", train_loader=batches(8), max_epochs=2, work_dir=tmp_path / name)
        changes["default_hooks"]["checkpoint"] = {"interval": 1, "by_epoch": False}
        return make_trainer(**changes)

    trainer = build("run")
    go_back(
        trainer, 5, "iter_1", "seen"
    )  # eight batches were left since: five of the epoch, and six of the next
    rolled = collect(trainer, "rolled_back")
    trained(trainer)
    seed(11)
    resumed = build("resumed")
    resumed.resume(tmp_path / "run" / "iter_1")
    skip_by_hand(resumed, 11)
    resumed.train()

    assert [event.skipped for event in rolled] == [11]
    assert_same(state_of(resumed), state_of(trainer))


@pytest.mark.parametrize("by_epoch", [True, False])
def test_batches_of_the_last_iterations(make_trainer: MakeTrainer, by_epoch: bool) -> None:
    """Their number is known at each boundary, with the shorter iterations at the ends of passes."""
    length = {"max_epochs": 3} if by_epoch else {"max_iters": 9}
    trainer = make_trainer(unit="update", train_loader=batches(7), **length, **options())
    passed: list[int] = [0]
    wrong: list[tuple[int, int]] = []

    def check(trainer: Trainer, event: Any) -> None:
        now = trainer.position.passed
        each = [trainer.position.batches_of(back) for back in range(trainer.iter + 1)]
        wrong.extend(
            pair
            for pair in zip(each, [now - before for before in passed[::-1]], strict=True)
            if len({*pair}) > 1
        )
        passed.append(now + trainer.counting.batches)

    trainer.bus.subscribe(check, "before_train_iter")
    trained(trainer)

    assert wrong == []
    assert passed == [0, 3, 6, 7, 10, 13, 14, 17, 20, 21]


def test_skipped_batch_is_left_out_of_the_update(make_trainer: MakeTrainer) -> None:
    """A handler of `before_train_iter` skips the first batch; the update begins with the next one."""
    seen: list[float] = []

    def skip(trainer: Trainer, event: Any) -> None:
        if torch.equal(trainer.batch[0], batches(5)[0][0]):
            raise SkipIteration

    trainer = make_trainer(train_loader=batches(5), max_epochs=1, unit="update", **options())
    trainer.bus.subscribe(skip, "before_train_iter")
    trainer.bus.subscribe(lambda trainer, event: seen.append(trainer.batch[0][0, 0].item()), "after_backward")
    trained(trainer)

    assert seen == [inputs[0, 0].item() for inputs, _ in batches(5)[1:]]
    assert (trainer.iter, trainer.counting.batches) == (2, 1)


def test_hooks_count_updates(make_trainer: MakeTrainer) -> None:
    """The logger's and the checkpoint's intervals, `every=`, and a stop are in updates; throughput is of all batches."""
    changes = options(unit="update", train_loader=batches(40), max_epochs=1)
    changes["default_hooks"] |= {"logger": {"interval": 4}, "checkpoint": {"interval": 5, "by_epoch": False}}
    samples: list[Any] = []
    notes = Notes()
    changes["writers"] = [notes]

    def count(batch: Any) -> int:
        samples.append(batch)
        return len(batch)

    trainer = make_trainer(hooks=[ThroughputHook(1, count={"pairs": count})], **changes)
    fired: list[int] = []
    trainer.bus.subscribe(lambda trainer, event: fired.append(event.iter), "after_train_iter", every=6)
    trained(trainer)
    trainer.bus.flush()

    assert trainer.iter == trainer.max_iters == 14
    assert fired == [5, 11]
    assert [step for step, row in notes.rows.items() if "loss" in row] == [4, 8, 12, 14]
    assert {path.name for path in trainer.work_dir.glob("iter_*")} >= {"iter_5", "iter_10"}
    assert len(samples) == 40 - 3 * WARM_UP


def test_learning_rate_range_test_counts_updates(make_trainer: MakeTrainer) -> None:
    """Each rate of `find_lr` is tested with an update, and nothing of it stays."""
    steps: list[int] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        steps.append(1)
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    trainer = make_trainer(train_loader=batches(8), train_step=step, unit="update", **options())
    before = copy.deepcopy(trainer.model.state_dict())
    curve = trainer.find_lr(iterations=5, divergence=1e9)

    assert (len(curve.lrs), len(steps)) == (5, 15)
    assert_same(trainer.model.state_dict(), before)


def test_fast_dev_run_trains_so_many_batches(make_trainer: MakeTrainer) -> None:
    """Its number is one of batches, in either unit."""
    trainer = make_trainer(train_loader=batches(9), fast_dev_run=4, unit="update", **options(2, writers=None))
    trained(trainer)

    assert (trainer.iter, trainer.max_iters) == (2, 2)


# --- refused -----------------------------------------------------------------------------------------------


def test_resume_in_the_other_unit_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The counters of the checkpoint would be read in another unit."""
    changes = options(train_loader=batches(6), hooks=[CheckpointHook(1)])
    del changes["default_hooks"]["checkpoint"]
    trained(make_trainer(unit="update", **changes))

    with pytest.raises(
        CheckpointError, match=r"in the unit 'update', this trainer in 'batch', .*unit='update'"
    ):
        make_trainer(**{**changes, "hooks": [CheckpointHook(1)]}).resume(tmp_path / "run" / "epoch_1")


def test_unknown_unit_is_refused(make_trainer: MakeTrainer) -> None:
    """The message lists the units."""
    with pytest.raises(ValueError, match=r"unit must be 'batch' or 'update', got 'updates'.*'update'"):
        make_trainer(unit="updates")


def test_update_without_a_hook_that_steps_is_refused(make_trainer: MakeTrainer) -> None:
    """Nothing says then how many batches an update has."""
    with pytest.raises(
        ValueError, match=r'unit="update" makes an iteration one step .* OptimizerHook\(cumul'
    ):
        make_trainer(unit="update", default_hooks={"optimizer": None})


def test_loop_of_the_program_in_steps_is_refused(make_trainer: MakeTrainer) -> None:
    """`begin_iter` and `end_iter` are around one batch."""
    trainer = make_trainer(unit="update", hooks=[GradientCumulativeOptimizerHook(4)])

    with pytest.raises(
        ValueError, match=r'begin_run\(\) .* unit="update" makes one of 4 batches: call train'
    ):
        trainer.begin_run()


def test_step_of_one_batch_is_an_update(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """With the plain optimizer hook both units are the same, and nothing is logged about them."""
    with caplog.at_level(logging.WARNING):
        trainer = trained(make_trainer(unit="update", hooks=[OptimizerHook()], writers=[]))

    assert (trainer.iter, trainer.max_iters) == (6, 6)
    assert caplog.messages == []
