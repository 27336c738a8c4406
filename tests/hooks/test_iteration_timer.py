"""IterationTimer: the warm-up is left out, and the summary says where the time went."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.events import TextLogged
from eventloop.hooks import CallbackHook, IterationTimer, IterTimerHook
from tests.hooks.conftest import Clock, Make, SlowLoader
from tests.support.internals import substitute

DATA, FORWARD, HOOK, VAL = 0.5, 0.25, 2.0, 64.0
PARTS = ("time", "data_time", "step_time", "hook_time")


Run = Callable[..., tuple[Trainer, list[str]]]


@pytest.fixture
def run(
    clock: Clock,
    make_trainer: Make,
    make_batches: Callable[[int], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Train on the clock with the timer; return the trainer and the texts it said."""
    substitute(monkeypatch, "iteration_timer.perf_counter", clock)

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        clock.advance(FORWARD)
        return F.mse_loss(trainer.model(batch[0]), batch[1])

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        clock.advance(VAL)
        return {"acc": 0.5}

    def train(timer: IterTimerHook, batches: int = 50, **options: Any) -> tuple[Trainer, list[str]]:
        slow = CallbackHook(
            after_train_iter=lambda event: clock.advance(HOOK),
            after_train=lambda event: clock.advance(HOOK),
            priority="VERY_LOW",
        )
        hooks = [timer, slow, *options.pop("hooks", [])]
        loader = SlowLoader(clock, DATA, make_batches(batches))
        trainer = make_trainer(
            train_loader=loader, train_step=step, val_step=val_step, hooks=hooks, **options
        )
        with trainer.bus.capture(TextLogged) as seen:
            trainer.train()
        return trainer, [f"{e.name}: {e.text}" for e in seen if isinstance(e, TextLogged)]

    return train


def put(trainer: Trainer, name: str) -> list[tuple[float, int]]:
    """The values of a metric and their iterations."""
    return trainer.metrics.history(name).values()


def test_warm_up_is_left_out(run: Run) -> None:
    """Nothing is put for the first iterations; every later one has its times."""
    trainer, _ = run(IterationTimer(warmup_iter=3))

    assert [iteration for _, iteration in put(trainer, "time")] == [*range(3, 50)]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "run_options", "timed", "expected"),
    [
        # 47 x 0.75 s, and 47 x 2 s of the hook (the third iteration's too, not the last's) and 2 + 2 s of the end
        (
            {"warmup_iter": 3},
            {},
            47,
            ["47 iterations in 0:00:35 (0.750000 s / it)", "0:02:13 (0:01:38 on hooks)"],
        ),
        (
            {"warmup_iter": 3, "ignore_warmup_time": False},
            {"batches": 4},
            4,
            ["4 iterations in 0:00:03 (0.750000 s / it)", "0:00:13 (0:00:10 on hooks)"],
        ),
        ({"warmup_iter": 3}, {"batches": 2}, 0, ["0:00:04 (0:00:04 on hooks)"]),
        (
            {"warmup_iter": 0},
            {"batches": 2, "max_epochs": 2, "val_loader": [torch.zeros(1)]},
            4,
            [
                "4 iterations in 0:00:03 (0.750000 s / it)",
                "0:02:21 (0:00:10 on hooks, 0:02:08 on evaluations)",
            ],
        ),
    ],
    ids=["warm-up", "warm-up counted", "shorter than the warm-up", "evaluations"],
)
def test_summary_counts_what_was_timed(
    run: Run, options: dict[str, Any], run_options: dict[str, Any], timed: int, expected: list[str]
) -> None:
    """The speed is that of loading and stepping; hooks before and after the timer, and the end's, are hooks; evaluations
    are neither. A run shorter than the warm-up has no speed."""
    trainer, said = run(IterationTimer(**options), **run_options)

    heads = ["timing: Overall training speed", "timing: Total training time"][-len(expected) :]
    assert said == [f"{head}: {text}" for head, text in zip(heads, expected, strict=True)]
    assert len(put(trainer, "time") if timed else []) == timed


def test_times_are_those_of_the_timer_it_replaces(run: Run) -> None:
    """Iteration by iteration; no time of a later hook is booked as data time."""
    plain, _ = run(IterTimerHook(), batches=6)
    warm, _ = run(IterationTimer(warmup_iter=2), batches=6)

    assert {name: put(warm, name) for name in PARTS} == {name: put(plain, name)[2:] for name in PARTS}
    assert {value for value, _ in put(warm, "data_time")} == {DATA}


def test_warm_up_of_a_resumed_run_counts_from_its_start(run: Run) -> None:
    """It is relative, because the new process is cold too."""

    def go_on(trainer: Trainer) -> None:
        trainer.iter = trainer.metrics.iter = 10

    resumed = CallbackHook(before_train=go_on, priority="HIGHEST")
    trainer, said = run(IterationTimer(warmup_iter=2), batches=5, hooks=[resumed])

    assert [iteration for _, iteration in put(trainer, "time")] == [12, 13, 14]
    assert "3 iterations" in said[0]


def test_failed_run_is_summed_up_too(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """In the log where no writer takes texts: scripts that look for the line find it there."""
    caplog.set_level(logging.INFO, "eventloop")

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if trainer.iter == 4:
            raise ZeroDivisionError("on purpose")
        return F.mse_loss(trainer.model(batch[0]), batch[1])

    trainer = make_trainer(batches=9, train_step=step, hooks=[IterationTimer(warmup_iter=1)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert "Overall training speed: 3 iterations in 0:00:00 (0.0" in caplog.text
    assert "Total training time: 0:00:00 (0:00:00 on hooks)" in caplog.text


def test_other_ranks_say_nothing(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """One line a run is enough."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer(hooks=[IterationTimer(warmup_iter=0)])
    trainer.rank = 1

    trainer.train()

    assert "training" not in caplog.text


def test_it_takes_the_place_of_the_default_timer(make_trainer: Make) -> None:
    """There is one timer, so that no time is put twice."""
    trainer = make_trainer(hooks=[IterationTimer()])

    assert [type(hook) for hook in trainer.hooks if isinstance(hook, IterTimerHook)] == [IterationTimer]
