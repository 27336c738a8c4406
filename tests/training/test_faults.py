"""Writers that fail while a model is trained: the weights are those of a training without them, the counts exact."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
import torch

from eventloop import Bus
from eventloop.bus.subscription import DrainReport, SubscriptionStats
from eventloop.writers import Writer
from tests.support.fault_writers import NeverReturns, RaisesAtThird
from tests.support.trainers import DEADLINE, MakeTrainer, batches

pytestmark = pytest.mark.slow

ITERATIONS = 30
in_both_places = pytest.mark.parametrize("place", ["thread", "process"])


def train_with(
    make_trainer: MakeTrainer, tmp_path: Path, writer: Writer, place: str, drain_timeout: float = DEADLINE
) -> tuple[DrainReport, SubscriptionStats, str]:
    """Train in time, to the weights of a training without `writer`; return the report, its account and the summary."""
    writer.offload = place
    loader = batches(ITERATIONS // 2)
    without = make_trainer(work_dir=tmp_path / "without", train_loader=loader)
    without.train()
    trainer = make_trainer(train_loader=loader, writers=[writer], bus=Bus(drain_timeout=drain_timeout))
    began = monotonic()
    trainer.train()
    report = trainer.bus.close()

    assert monotonic() - began < DEADLINE / 2
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])
    stats = next(stats for stats in report.stats if stats.name == writer.name)
    assert stats.delivered + stats.failed + stats.dropped + stats.queued == ITERATIONS
    return report, stats, trainer.summary().partition("not everything was delivered:")[2]


@in_both_places
def test_a_writer_that_raises(make_trainer: MakeTrainer, tmp_path: Path, place: str) -> None:
    """Two events are delivered, one fails, and the others are dropped."""
    report, stats, missing = train_with(make_trainer, tmp_path, RaisesAtThird(), place)

    assert (stats.delivered, stats.failed, stats.queued, report.complete) == (2, 1, 0, True)
    assert "faulty: 27 dropped, 1 failed, 0 left - [error] ValueError: no luck" in missing


@in_both_places
def test_a_writer_that_never_returns(make_trainer: MakeTrainer, tmp_path: Path, place: str) -> None:
    """The training waits for `drain_timeout`, once at its end and once at the close."""
    report, stats, missing = train_with(make_trainer, tmp_path, writer := NeverReturns(), place, 0.5)
    writer.gate.set()

    assert (stats.delivered, stats.queued, report.complete) == (0, ITERATIONS, False)
    assert "faulty: 0 dropped, 0 failed, 30 left" in missing
