"""A job that is queued again begins while its predecessor still ends: it waits, and trains no iteration twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from eventloop import Trainer, read_events
from eventloop.checkpoint.directory import scan
from eventloop.hooks import CheckpointHook
from eventloop.ownership import WorkDirInUseError, read_owner
from tests.ownership.trainings import KILL, Training, steps, training
from tests.support.process_support import until
from tests.support.trainers import build_trainer

SLOW = 2.0
"""Seconds that a delayed sync takes."""


def state_of(run: Path) -> str | None:
    owner = read_owner(run)
    return None if owner is None else owner.state


def ends_after_signal(training: Training, run: Path) -> bool:
    """Send SIGTERM, and return whether the run is ending: a signal just before a read waits until it returns."""
    training.send(signal.SIGTERM)
    return state_of(run) == "ending"


def check_nothing_is_twice(run: Path) -> None:
    """Each iteration has one line, and each event one sequence number."""
    lines = [step for mode, step in steps(run) if mode == "train"]
    assert sorted(lines) == sorted(set(lines))
    numbers = [record.sequence for record in read_events(run)]
    assert numbers == sorted(set(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
def test_the_successor_waits_for_the_final_checkpoint(tmp_path: Path, resume: bool) -> None:
    """The predecessor got SIGTERM and saves slowly: `resume` waits, and so does `train` in a run that begins anew."""
    run = tmp_path / "run"
    with (
        training(run, iters=30, holds=[7], interval=100, thread=True, slow_sync=SLOW) as first,
        training(run, iters=30, interval=100, resume=resume) as second,
    ):
        first.reach("holding")
        assert second.next_line() == "ready"
        until(lambda: ends_after_signal(first, run))
        assert not (run / "iter_7").exists()
        second.go()
        first.go()
        said = second.run()
        first.end()
        assert first.process.wait() == 128 + signal.SIGTERM
    assert said == ({"resumed": "iter_7", "trained": 30} if resume else {"trained": 30})
    if resume:
        check_nothing_is_twice(run)
        found = scan(run)
        assert found.abandoned == frozenset()
        assert found.paths[-1].name == "iter_30"
    assert state_of(run) is None


@pytest.mark.slow
def test_the_successor_waits_for_a_saver_that_outlived_its_run(tmp_path: Path) -> None:
    """The training was killed while its saver's process writes: that save is finished, and then resumed."""
    run = tmp_path / "run"
    with (
        training(run, iters=30, holds=[8], interval=7) as first,
        training(run, iters=30, interval=7, resume=True) as second,
    ):
        first.reach("holding")
        first.send(KILL)
        first.process.wait()
        assert second.run() == {"resumed": "iter_7", "trained": 30}


@pytest.mark.slow
def test_another_run_between_resume_and_train(tmp_path: Path) -> None:
    """A trainer that resumed would train the iterations again that another run has trained since: it is refused."""
    run = tmp_path / "run"
    with training(run, iters=10) as before:
        assert before.run() == {"trained": 10}
    with (
        training(run, iters=20, resume=True, between=True) as second,
        training(run, iters=15, resume=True) as first,
    ):
        second.reach("resumed")
        assert first.run() == {"resumed": "iter_10", "trained": 15}
        second.go()
        refused = second.run()["refused"]
    assert f"another run has saved in {run} since this one resumed" in refused
    assert "call trainer.resume() again" in refused
    check_nothing_is_twice(run)
    with training(run, iters=20, resume=True) as third:
        assert third.run() == {"resumed": "iter_15", "trained": 20}
    check_nothing_is_twice(run)


def test_a_trainer_resumes_again_after_a_refusal(tmp_path: Path) -> None:
    """What it owned before the refusal is free again, and its own turns are no other run's."""
    run = tmp_path / "run"

    def make(epochs: int) -> Trainer:
        return build_trainer(run, max_epochs=epochs, hooks=[CheckpointHook(1)])

    make(1).train()
    late, early = make(3), make(2)
    late.resume()
    early.resume()
    early.train()
    with pytest.raises(
        WorkDirInUseError, match=r"since this one resumed \(sequence number 2, at the resume 1\)"
    ):
        late.train()
    assert state_of(run) is None

    assert late.resume().name == "epoch_2"
    late.train()
    late.max_epochs = 4
    late.train()
    assert late.epoch == 4


def test_the_wait_ends_with_the_predecessor(tmp_path: Path) -> None:
    """One that is killed while it ends is followed at once."""
    run = tmp_path / "run"
    with (
        training(run, iters=30, holds=[7], interval=100, thread=True, slow_sync=100.0) as first,
        training(run, iters=30, interval=100) as second,
    ):
        first.reach("holding")
        assert second.next_line() == "ready"
        first.send(signal.SIGTERM)
        first.go()
        until(lambda: state_of(run) == "ending")
        second.go()
        first.send(KILL)
        first.process.wait()
        assert second.run() == {"trained": 30}
