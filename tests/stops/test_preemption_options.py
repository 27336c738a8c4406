"""The options of PreemptionHook for a job scheduler: what is refused, and what the log says of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from eventloop.events import CheckpointSaved
from eventloop.hooks import CheckpointHook, PreemptionHook
from tests.support.signals import Heard, send_in
from tests.support.trainers import MakeTrainer


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"requeue": "no"}, TypeError, "requeue must be True or False, got 'no'"),
        ({"requeue": 1}, TypeError, "requeue must be True or False, got 1"),
        (
            {"checkpoint_signals": "SIGUSR1"},
            TypeError,
            "checkpoint_signals must be a sequence of names .*got 'SIGUSR1'",
        ),
        (
            {"checkpoint_signals": [10]},
            TypeError,
            "checkpoint_signals must be names such as 'SIGTERM', got 10",
        ),
        (
            {"checkpoint_signals": ["SIGUSER1"]},
            ValueError,
            "checkpoint_signals must be signals .*got 'SIGUSER1'",
        ),
        (
            {"signals": ["SIGUSR1"], "checkpoint_signals": ["SIGUSR1"]},
            ValueError,
            r"signals must name at least one signal that saves no checkpoint, got \('SIGUSR1',\)",
        ),
        ({"grace": "30"}, TypeError, "grace must be a number, got '30'"),
        ({"grace": True}, TypeError, "grace must be a number, got True"),
        ({"grace": 0}, ValueError, "grace must be above 0, got 0"),
        ({"grace": -1.5}, ValueError, "grace must be above 0, got -1.5"),
        ({"grace": float("nan")}, ValueError, "grace must be a finite number, got nan"),
    ],
)
def test_bad_options(options: Any, error: type[Exception], message: str) -> None:
    """Refused where they are written."""
    with pytest.raises(error, match=message):
        PreemptionHook(**options)


def test_outside_slurm(
    make_trainer: MakeTrainer,
    received: Heard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that no Slurm job contains says once, at its start, that it cannot be queued again, and ends as ever."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    trainer = make_trainer(default_hooks={"preemption": {"requeue": True}})
    before: list[str] = []
    trainer.bus.subscribe(lambda event: before.extend(caplog.messages), "before_train", name="look")
    send_in(trainer, "after_train_iter", 2)

    trainer.train()

    assert (trainer.iter, trainer.stop_reason) == (2, "preempted by SIGTERM")
    text = [line for line in caplog.messages if "requeue" in line or "queued" in line]
    assert [line.split(",")[0] for line in text] == ["requeue=True has no effect: SLURM_JOB_ID is not set"]
    assert text[0] in before


@pytest.mark.parametrize(("grace", "warned"), [(1e-9, True), (3600, False), (None, False)])
def test_a_save_that_outlasts_the_grace(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, grace: float | None, warned: bool
) -> None:
    """The first save of a run that takes longer than the grace is a warning with both numbers; later ones are not."""
    trainer = make_trainer(
        hooks=[CheckpointHook(interval=1, by_epoch=False)], default_hooks={"preemption": {"grace": grace}}
    )
    saved: list[CheckpointSaved] = []
    trainer.bus.subscribe(saved.append, "checkpoint_saved", name="collect")
    trainer.train()

    slow = [record for record in caplog.records if "grace" in record.getMessage()]
    assert len(saved) > 1
    assert len(slow) == warned
    for record in slow:
        assert record.levelno == logging.WARNING
        text = record.getMessage()
        assert text.startswith(f"saving {saved[0].path} took {saved[0].seconds:.3g} s")
        assert f"{grace:g} s of grace" in text
        assert "--signal=TERM@120" in text
