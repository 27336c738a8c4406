"""CostsHook(log_seconds=...): shares of the iterations as scalars, which every writer plots."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.writers import JSONLWriter, read_jsonl
from tests.hooks.conftest import Clock, Make, Record, SlowLoader
from tests.support.internals import substitute

STEP_SECONDS = 10.0


@pytest.fixture
def timed(make_trainer: Make, clock: Clock, make_batches: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Build trainers of 8 iterations of 10 s each on the clock, half of it waiting for data."""
    substitute(monkeypatch, "costs.monotonic", clock)

    def make(**options: Any) -> Trainer:
        trainer = make_trainer(train_loader=SlowLoader(clock, STEP_SECONDS / 2, make_batches(8)), **options)
        trainer.bus.subscribe(lambda event: clock.advance(STEP_SECONDS / 2), "after_train_iter", name="mine")
        return trainer

    return make


def shares(events: list[ScalarsLogged]) -> dict[int, dict[str, float]]:
    """The shares that were logged, by step."""
    logged = {
        event.step: {name: value for name, value in event.scalars.items() if name.startswith("cost/")}
        for event in events
    }
    return {step: scalars for step, scalars in logged.items() if scalars}


def test_shares_are_logged_every_so_many_seconds(timed: Make, record_scalars: Record) -> None:
    """Each over the iterations since the last time; the first log is after that many seconds."""
    trainer = timed(default_hooks={"costs": {"log_seconds": 3 * STEP_SECONDS}})
    seen = record_scalars(trainer)

    trainer.train()

    logged = shares(seen)
    assert [*logged] == [3, 6]
    assert all(each["cost/data_share"] == 0.5 for each in logged.values())
    assert all(each["cost/hooks_share"] == 0.5 for each in logged.values())
    assert {"cost/mine", "cost/OptimizerHook.after_train_iter"} <= {*logged[3]}
    assert {event.mode for event in seen} == {"train"}


def test_a_writer_has_them_as_other_scalars(timed: Make) -> None:
    """In `metrics.jsonl`, with the step of the last completed iteration."""
    trainer = timed(default_hooks={"costs": {"log_seconds": 3 * STEP_SECONDS}}, writers=[JSONLWriter()])

    trainer.train()

    rows = [row for row in read_jsonl(trainer.work_dir / "metrics.jsonl") if "cost/data_share" in row]
    assert [(row["step"], row["cost/data_share"]) for row in rows] == [(3, 0.5), (6, 0.5)]


def test_shares_are_off_by_default(timed: Make, record_scalars: Record) -> None:
    """Nothing is logged, and no handler of `before_train_iter` is subscribed for it."""
    trainer = timed()
    seen = record_scalars(trainer)
    plan = str(trainer.bus)

    trainer.train()

    assert shares(seen) == {}
    assert "log_shares" not in plan
