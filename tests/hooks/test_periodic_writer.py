"""PeriodicWriter: writers that are fed at a period, in the last iteration, and at the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.events import Event, ScalarsLogged
from eventloop.hooks import LoggerHook, PeriodicWriter
from eventloop.writers import JSONLWriter, Writer
from tests.hooks.conftest import Make
from tests.support.internals import substitute


class Collect(Writer):
    """Keeps the training scalars it is given."""

    def __init__(self) -> None:
        self.seen: list[ScalarsLogged] = []
        self.closed = False

    def write(self, event: Event) -> None:
        """Keep one."""
        if isinstance(event, ScalarsLogged) and event.mode == "train":
            self.seen.append(event)

    def close(self) -> None:
        """Say that it was closed."""
        self.closed = True


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("batches", "epochs", "period", "by_epoch", "expected"),
    [
        (5, 3, 4, False, [4, 8, 12, 15]),  # detectron2: the period counts the iterations of the run
        (5, 3, 4, True, [4, 5, 9, 10, 14, 15]),  # Pet: that of each epoch, and its last iteration
        (5, 3, 5, False, [5, 10, 15]),
        (2, 2, 20, False, [4]),
        (2, 2, 20, True, [2, 4]),
        (45, 1, None, False, [20, 40, 45]),  # detectron2's default
    ],
)
def test_period_and_last_iteration(
    make_trainer: Make, batches: int, epochs: int, period: int | None, by_epoch: bool, expected: list[int]
) -> None:
    """These are the steps the writer is given."""
    writer = Collect()
    options: dict[str, Any] = {} if period is None else {"period": period}
    hook = PeriodicWriter([writer], **options, by_epoch=by_epoch)

    make_trainer(batches=batches, max_epochs=epochs, hooks=[hook]).train()

    assert [event.step for event in writer.seen] == expected


def test_nothing_between_two_writes_is_lost(make_trainer: Make) -> None:
    """What is put every 8 iterations is written 5 times, with a period of 20 too, at its own steps."""
    writer = Collect()
    trainer = make_trainer(max_iters=40, hooks=[PeriodicWriter(writer, 20)])
    trainer.bus.subscribe(
        lambda trainer, event: trainer.metrics.put_scalar("score", 1.0, smoothing_hint=False),
        "after_train_iter",
        every=8,
    )

    trainer.train()

    assert [e.step for e in writer.seen if "score" in e.scalars] == [8, 16, 24, 32, 40]


def test_everything_is_written_when_train_returns(make_trainer: Make) -> None:
    """The file is complete then, with what was put after the last write; closing the trainer closes the writer."""

    collect = Collect()
    writers = [{"type": "JSONLWriter", "filename": "log.jsonl"}, collect]
    trainer = make_trainer(batches=3, hooks=[PeriodicWriter(writers, 2)])
    trainer.bus.subscribe(lambda trainer, e: trainer.metrics.put_scalar("late", 1.0), "after_train")

    trainer.train()

    lines = [json.loads(line) for line in (trainer.work_dir / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [2, 3]
    assert any("late" in line for line in lines)
    trainer.close()
    assert collect.closed


def test_failed_run_is_written_too(make_trainer: Make) -> None:
    """What was put before the error reaches the writers, and they are closed."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if trainer.iter == 3:
            raise ZeroDivisionError("on purpose")
        return F.mse_loss(trainer.model(batch[0]), batch[1])

    writer = Collect()
    trainer = make_trainer(train_step=step, hooks=[PeriodicWriter(writer, 2)])

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [event.step for event in writer.seen] == [2, 3]
    assert writer.closed


def test_it_takes_the_place_of_the_default_logger(make_trainer: Make) -> None:
    """There is one, so that nothing is logged twice."""
    trainer = make_trainer(hooks=[PeriodicWriter()])

    assert [type(hook) for hook in trainer.hooks if isinstance(hook, LoggerHook)] == [PeriodicWriter]


def test_trainers_own_writers_are_fed_too(make_trainer: Make) -> None:
    """`writers=[...]` stays the place for those that want every event."""
    own, periodic = Collect(), Collect()
    own.name = "own"

    make_trainer(hooks=[PeriodicWriter(periodic, 2)], writers=[own]).train()

    assert own.seen == periodic.seen


def test_other_ranks_write_nothing(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks would write to one file."""
    substitute(monkeypatch, "data_ranks.rank_and_world_size", lambda: (1, 2))
    trainer = make_trainer(hooks=[PeriodicWriter(JSONLWriter())])

    assert not [row for row in trainer.bus.plan("scalars_logged") if "JSONL" in row.name]
