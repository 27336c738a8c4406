"""Test that a run which has gone back is, to the bit, a new process that has resumed from that checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests import forked
from tests.support.interrupted import Case, assert_same, seed
from tests.support.rolled_back import build, final, go_back, once, skip_by_hand, weights
from tests.support.trainers import MakeTrainer, batches, collect, record

pytestmark = pytest.mark.filterwarnings("ignore:cumulative_iters")

CASES = [
    (Case("global"), 3, True),
    (Case("global", 2, cumulative_iters=4), 2, True),
    (Case("generator", cumulative_iters=4), 0, False),
    (Case("global", 2, persistent=True), 0, True),
    (Case("set_epoch", 2, persistent=True, by_epoch=False), 16, True),
    (Case("sampler", 2, cumulative_iters=4), 14, False),
    (Case("generator"), 12, True),
]


def compare(case: Case, directory: Path, skip: int, *, amp: bool = True, after: int = 23) -> None:
    """Compare a run that goes back to iteration 15 with a new process that resumes from there."""
    seed()
    trainer, losses = build(case, directory / "a", amp=amp)
    go_back(trainer, after, "iter_15", skip)
    trainer.train()
    state = final(trainer)
    seed(99)
    fresh, expected = build(case, directory / "b", amp=amp)
    fresh.resume(directory / "a" / "iter_15")
    skip_by_hand(fresh, skip)
    fresh.train()

    assert expected == {number: loss for number, loss in losses.items() if number in expected}
    assert len(expected) > 5
    assert_same(final(fresh), state)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("case", "skip", "amp"), CASES, ids=[f"{c.order}-{c.workers}-{s}" for c, s, _ in CASES]
)
def test_run_that_went_back_equals_a_new_process(tmp_path: Path, case: Case, skip: int, amp: bool) -> None:
    """Losses, weights, averages, schedules, gradients of a window, random states and the position are those of a
    process that resumes from the checkpoint and skips the batches by hand."""
    compare(case, tmp_path, skip, amp=amp)


def test_rollback_at_the_last_iteration_of_an_epoch(tmp_path: Path) -> None:
    """The epoch that ends with the rollback does not count."""
    compare(Case("global"), tmp_path, 0, after=32)


def test_skip_goes_on_over_whole_passes(make_trainer: MakeTrainer) -> None:
    """A skip of more than a pass leaves out the epochs in it, and the batch behind it is trained on next."""
    seen: list[tuple[int, int]] = []

    def step(trainer: Trainer, batch: Any) -> Any:
        seen.append((trainer.epoch, int(batch[0].item())))
        return trainer.model(batch).sum()

    model = nn.Linear(1, 1)
    loader = [torch.full((1, 1), float(number)) for number in range(3)]
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        train_loader=loader,
        max_epochs=5,
        hooks=[CheckpointHook(1, by_epoch=False)],
    )
    epochs = record(trainer, "before_train_epoch", "after_train_epoch")
    go_back(trainer, 3, "iter_2", skip=8)
    trainer.train()

    assert seen == [(0, 0), (0, 1), (0, 2), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2)]
    assert [epoch for name, _, epoch in epochs if name == "after_train_epoch"] == [0, 0, 1, 2, 3, 4]
    assert trainer.epoch == 5


def test_skip_of_whole_passes_in_a_run_of_iterations(make_trainer: MakeTrainer) -> None:
    """A skip in a run of iterations goes through the loader again and again."""
    seen: list[int] = []

    def step(trainer: Trainer, batch: Any) -> Any:
        seen.append(int(batch[0].item()))
        return trainer.model(batch).sum()

    model = nn.Linear(1, 1)
    loader = [torch.full((1, 1), float(number)) for number in range(3)]
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        train_loader=loader,
        max_iters=5,
        hooks=[CheckpointHook(1)],
    )
    go_back(trainer, 3, "iter_2", skip=8)
    trainer.train()

    assert seen == [0, 1, 2, 1, 2, 0]


def test_seen_batches_are_those_since_the_checkpoint(tmp_path: Path) -> None:
    """A skip of "seen" ends with the batch of the iteration that went back, also behind batches skipped before."""
    seed()
    trainer, losses = build(Case("set_epoch"), tmp_path / "a")
    rolled = collect(trainer, "rolled_back")
    go_back(trainer, 12, "iter_5", "seen")
    once(trainer, "after_train_iter", 8, lambda: go_back(trainer, 18, "iter_5", "seen"))
    trainer.train()
    state = final(trainer)
    seed(99)
    fresh, expected = build(Case("set_epoch"), tmp_path / "b")
    fresh.resume(tmp_path / "a" / "iter_5")
    skip_by_hand(fresh, 7 + 13)
    fresh.train()

    assert [event.skipped for event in rolled] == [7, 20]
    assert expected == {number: loss for number, loss in losses.items() if number in expected}
    assert_same(final(fresh), state)


def test_modes_that_a_handler_sets_within_an_epoch_end_with_it(make_trainer: MakeTrainer) -> None:
    """After a rollback modules have the modes of a new process, whatever handlers set in the abandoned epoch."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=batches(4),
        max_iters=8,
        hooks=[CheckpointHook(2)],
    )
    once(trainer, "after_train_iter", 3, lambda: model[1].eval())
    go_back(trainer, 5, "iter_2")
    modes: list[bool] = []
    trainer.bus.subscribe(lambda event: modes.append(model[1].training), "before_train_iter")
    trainer.train()

    assert modes == [True] * 4 + [False] + [True] * 6


def test_checkpoint_of_this_iteration(make_trainer: MakeTrainer) -> None:
    """A rollback to the checkpoint of the present iteration loads it, and skips from here."""
    trainer = make_trainer(train_loader=batches(6), max_epochs=1, hooks=[CheckpointHook(2, by_epoch=False)])
    go_back(trainer, 4, "iter_4", 1)
    trainer.train()
    plain = make_trainer(
        train_loader=batches(6),
        max_epochs=1,
        hooks=[CheckpointHook(2, by_epoch=False)],
        work_dir=trainer.work_dir / "b",
    )
    once(plain, "before_train_iter", 4, lambda: None)
    plain.resume(trainer.work_dir / "iter_4")
    skip_by_hand(plain, 1)
    plain.train()

    assert (trainer.iter, weights(trainer)) == (5, weights(plain))


KILLED = """
import os, signal, sys
import signal
from pathlib import Path
from tests.support.interrupted import Case, seed
from tests.support.rolled_back import build, go_back, once

seed()
trainer, _ = build(Case("global"), Path(sys.argv[1]))
go_back(trainer, 12, "iter_5", 4)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

once(trainer, "rolled_back", 5, lambda: once(trainer, sys.argv[2], int(sys.argv[3]), kill))
trainer.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "iteration", "name"),
    [("before_train_iter", 5, "iter_5_rollback"), ("after_train_iter", 13, "iter_10")],
)
def test_killed_run_goes_on_behind_its_rollback(
    tmp_path: Path, event: str, iteration: int, name: str
) -> None:
    """After SIGKILL a new process resumes behind the rollback, with the batches skipped, and ends as a run that was not
    killed."""
    ran = forked.run(["-c", KILLED, str(tmp_path / "killed"), event, str(iteration)], cwd=tmp_path)
    seed()
    whole, losses = build(Case("global"), tmp_path / "whole")
    go_back(whole, 12, "iter_5", 4)
    whole.train()
    state = final(whole)
    seed(99)
    resumed, of_rest = build(Case("global"), tmp_path / "killed")
    found = resumed.resume()
    resumed.train()

    assert ran.returncode == -signal.SIGKILL
    assert found.name == name
    assert of_rest == {number: loss for number, loss in losses.items() if number in of_rest}
    assert_same(final(resumed), state)
