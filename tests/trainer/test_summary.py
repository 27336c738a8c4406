"""The closing summary, as a person reads it."""

from __future__ import annotations

from eventloop.events import Event
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


def test_what_is_outside_of_the_iterations_has_no_share_of_one(make_trainer: MakeTrainer) -> None:
    """As in `trainer.costs()`; a handler of both kinds of events has a line for each."""
    trainer: Trainer = make_trainer()

    @trainer.bus.on("before_train", "after_train_iter", name="both")
    def both(event: Event) -> None:
        pass

    trainer.train()

    rows = [line.split() for line in trainer.summary().splitlines() if line.startswith("both ")]
    shares = {event: (calls, share) for _, event, calls, _, share in rows}
    (inside,) = [c.share for c in trainer.costs().handlers if (c.name, c.in_iteration) == ("both", True)]
    assert shares == {
        "before_train": ("1", "-"),
        "after_train_iter": (str(trainer.iter), f"{inside:.2%}"),
    }
    assert (
        "\nwhat is called outside of the iterations is spread over them, and has no share (-)"
        in trainer.summary()
    )
