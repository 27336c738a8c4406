"""The bus in a Transformers trainer whose user steers it: flags, other runs within a run, errors, saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from transformers import TrainerCallback

from eventloop.bridges.transformers import EventLoopCallback
from tests.support.transformers_host import host, rows

pytestmark = [pytest.mark.usefixtures("no_thread_left"), pytest.mark.filterwarnings("ignore")]

PARTS = ("Run", "Train", "TrainEpoch", "Val", "ValEpoch", "Test")


class At(TrainerCallback):
    """Call a function with the trainer and the control at one call of one method."""

    def __init__(self, method: str, number: int, do: Callable[[Any, Any], object]) -> None:
        self.number, self.do = number, do
        self.trainer: Any = None
        setattr(self, method, self._at)

    def _at(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.number -= 1
        if self.number == 0:
            self.do(self.trainer, control)


def stop(trainer: Any, control: Any) -> None:
    control.should_training_stop = True


def stop_epoch(trainer: Any, control: Any) -> None:
    control.should_epoch_stop = True


def fail(trainer: Any, control: Any) -> None:
    raise OSError("broken")


def evaluate(trainer: Any, control: Any) -> None:
    trainer.evaluate(rows(4))
    trainer.model.train()


def predict(trainer: Any, control: Any) -> None:
    trainer.predict(rows(4))
    trainer.model.train()


def save(trainer: Any, control: Any) -> None:
    control.should_save = control.should_log = control.should_evaluate = True


def other_rate(trainer: Any, control: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5


def without_bridge(trainer: Any, control: Any) -> None:
    """Remove the bridge in the middle of the training."""
    trainer.remove_callback(EventLoopCallback)


STEERS = {each.__name__: each for each in
          (stop, stop_epoch, fail, evaluate, predict, save, other_rate, without_bridge)}  # fmt: skip
MOMENTS = {
    "on_train_begin": 1, "on_epoch_begin": 2, "on_step_begin": 3, "on_pre_optimizer_step": 3,
    "on_optimizer_step": 3, "on_step_end": 3, "on_epoch_end": 1, "on_log": 2, "on_evaluate": 1,
    "on_prediction_step": 1, "on_save": 1, "on_train_end": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steer", STEERS)
@pytest.mark.parametrize("first", [True, False], ids=["bridge first", "bridge last"])
def test_a_steered_trainer_trains_as_without_the_bridge(
    tmp_path: Path, moment: str, steer: str, first: bool
) -> None:
    """A trainer that its user steers ends with the weights, counters and errors that it has without the bridge."""
    found = []
    bridge = EventLoopCallback(work_dir=tmp_path / "ride")
    seen: list[str] = []
    bridge.bus.on("*")(lambda event: seen.append(type(event).__name__))
    for number, bridges in enumerate(([], [bridge])):
        at = At(moment, MOMENTS[moment], STEERS[steer])
        callbacks = [*bridges, at] if first else [at, *bridges]
        ours = host(tmp_path / str(number), *callbacks, eval_dataset=rows(4), eval_strategy="epoch",
                    save_strategy="epoch")  # fmt: skip
        at.trainer = ours
        ends: list[Any] = []
        for _ in range(2):
            try:
                ours.train()
            except Exception as error:
                ends.append(f"{type(error).__name__}: {error}")
            ends += [ours.state.global_step, ours.state.epoch]
        found.append((ends, [each.detach().clone() for each in ours.model.parameters()]))

    (alone, weights), (ours_ends, own) = found
    assert ours_ends == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))
    for part in PARTS:
        assert seen.count(f"Before{part}") == seen.count(f"After{part}"), part
