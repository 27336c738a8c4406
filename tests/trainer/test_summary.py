"""The closing summary, as a person reads it."""

from __future__ import annotations

from eventloop.trainer import Trainer
from tests.trainer.conftest import MakeTrainer


def test_a_long_error_does_not_widen_the_table(make_trainer: MakeTrainer) -> None:
    """It has its whole length once, in the line of its subscriber."""
    error = "the disk says no, " * 30 + "again"
    trainer: Trainer = make_trainer()

    @trainer.bus.on("after_train_iter", offload="thread", name="broken")
    def broken(event: object) -> None:
        raise OSError(error)

    trainer.train()
    trainer.close()

    long = [line for line in trainer.summary().splitlines() if len(line) > 180]
    assert [line.strip().split(":")[0] for line in long] == ["broken"]
    assert error in long[0]
