"""What `print(trainer)` shows."""

from __future__ import annotations

from torch import nn

from eventloop import Trainer
from eventloop.hooks import EMAHook
from tests.support.trainers import MakeTrainer


def test_a_trainer_says_what_it_trains_and_how_far_it_is(make_trainer: MakeTrainer) -> None:
    """The text has the model, its size, the optimizer, the progress, the hooks and the directory."""
    trainer = make_trainer(hooks=[EMAHook()], max_epochs=2)
    before = repr(trainer)
    trainer.train()

    assert before.splitlines()[:5] == [
        "Trainer",
        "  model: Sequential",
        "  parameters: 51",  # 2 * 8 + 8 + 8 * 3 + 3
        "  optimizer: SGD",
        "  done: 0 of 2 epochs, 0 of 6 iterations",
    ]
    assert str(trainer).splitlines()[4] == "  done: 2 of 2 epochs, 6 of 6 iterations"
    hooks, directory = before.splitlines()[5:]
    assert "OptimizerHook, " in hooks
    assert hooks.endswith(", EMAHook")
    assert directory == f"  work_dir: {trainer.work_dir}"


def test_a_trainer_of_any_state_has_a_text(make_trainer: MakeTrainer) -> None:
    """An optimizer by name, a lazy model, an unknown length, and a trainer that was never built raise nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    trainer = make_trainer(model=model, optimizer=None, train_step=lambda trainer, batch: None, max_iters=7)

    text = repr(trainer)

    assert (
        "parameters: 9 and 2 of unknown size\n  optimizer: none\n  done: 0 epochs, 0 of 7 iterations" in text
    )
    assert "Trainer object at" in repr(object.__new__(Trainer))
