"""The bus in a Transformers trainer whose user steers it: flags, other runs within a run, errors, saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from transformers import TrainerCallback

from eventloop.bridges.transformers import EventLoopCallback
from tests.support.steered import callback_at, outcome
from tests.support.transformers_host import host, rows

pytestmark = [pytest.mark.usefixtures("no_thread_left"), pytest.mark.filterwarnings("ignore")]

PARTS = ("Run", "Train", "TrainEpoch", "Val", "ValEpoch", "Test")


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


STEERS = {
    each.__name__: each
    for each in (stop, stop_epoch, fail, evaluate, predict, save, other_rate, without_bridge)
}
MOMENTS = {
    "on_train_begin": 1,
    "on_epoch_begin": 2,
    "on_step_begin": 3,
    "on_pre_optimizer_step": 3,
    "on_optimizer_step": 3,
    "on_step_end": 3,
    "on_epoch_end": 1,
    "on_log": 2,
    "on_evaluate": 1,
    "on_prediction_step": 1,
    "on_save": 1,
    "on_train_end": 1,
}


def steer_it(
    do: Callable[[Any, Any], object], steered: list[Any], args: Any, state: Any, control: Any
) -> None:
    """Call a function with the trainer, which a callback is not given, and the control."""
    do(steered[0], control)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steer", STEERS)
@pytest.mark.parametrize("first", [True, False], ids=["bridge first", "bridge last"])
def test_a_steered_trainer_trains_as_without_the_bridge(
    tmp_path: Path, moment: str, steer: str, first: bool
) -> None:
    """A trainer that its user steers ends with the weights, counters and errors that it has without the bridge."""
    found = []
    bridge = EventLoopCallback(work_dir=tmp_path / "attachment")
    seen: list[str] = []
    bridge.bus.on("*")(lambda event: seen.append(type(event).__name__))
    for number, bridges in enumerate(([], [bridge])):
        steered: list[Any] = []
        do = partial(steer_it, STEERS[steer], steered)
        at = callback_at(TrainerCallback, moment, MOMENTS[moment], do)
        callbacks = [*bridges, at] if first else [at, *bridges]
        ours = host(
            tmp_path / str(number),
            *callbacks,
            eval_dataset=rows(4),
            eval_strategy="epoch",
            save_strategy="epoch",
        )
        steered.append(ours)
        ends: list[Any] = []
        for _ in range(2):
            ends += [outcome(ours.train), ours.state.global_step, ours.state.epoch]
        found.append((ends, [each.detach().clone() for each in ours.model.parameters()]))

    (alone, weights), (ours_ends, own) = found
    assert ours_ends == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))
    for part in PARTS:
        assert seen.count(f"Before{part}") == seen.count(f"After{part}"), part
