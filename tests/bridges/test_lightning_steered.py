"""The bus in a Lightning trainer whose user steers it: other runs within a run, other optimizers, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from eventloop.writers import JSONLWriter
from tests.support.lightning import Classifier, MakeBridge, costs, fit, lines, loader, make_trainer, rows
from tests.support.steered import callback_at, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more

PARTS = ("Run", "Train", "TrainEpoch", "TrainIter", "Val", "ValEpoch")


def at(method: str, number: int, do: Callable[[Trainer], object]) -> Any:
    """Return a callback that calls a function with the trainer at one call of one method."""
    return callback_at(Callback, method, number, lambda trainer, *args: do(trainer))


def stop(trainer: Trainer) -> None:
    trainer.should_stop = True


def fail(trainer: Trainer) -> None:
    raise OSError("broken")


def stop_iteration(trainer: Trainer) -> None:
    raise StopIteration


def evaluate_itself(trainer: Trainer) -> None:
    trainer.validate(trainer.lightning_module, loader(1), verbose=False)


def save(trainer: Trainer) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir, "mid.ckpt"))


def longer(trainer: Trainer) -> None:
    trainer.fit_loop.max_epochs = 3


STEERS = {each.__name__: each for each in (stop, fail, stop_iteration, evaluate_itself, save, longer)}
MOMENTS = {
    "on_train_start": 1,
    "on_train_epoch_start": 2,
    "on_train_batch_start": 3,
    "on_before_zero_grad": 3,
    "on_after_backward": 3,
    "on_before_optimizer_step": 3,
    "on_train_batch_end": 3,
    "on_train_epoch_end": 1,
    "on_validation_start": 2,
    "on_validation_batch_start": 3,
    "on_validation_end": 2,
    "on_train_end": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steer", STEERS)
@pytest.mark.parametrize("first", [True, False], ids=["bridge first", "bridge last"])
def test_a_steered_trainer_trains_as_without_the_bridge(
    make_bridge: MakeBridge, tmp_path: Path, moment: str, steer: str, first: bool
) -> None:
    """A trainer that its user steers ends with the weights, counters and errors that it has without the bridge."""
    bridge = make_bridge(work_dir=tmp_path / "attachment")
    seen = rows(bridge, "*")
    found = []
    for bridges in ([], [bridge]):
        steers = at(moment, MOMENTS[moment], STEERS[steer])
        callbacks = [*bridges, steers] if first else [steers, *bridges]
        model, trainer = Classifier(), make_trainer(tmp_path, *callbacks)
        again: list[Any] = []
        for _ in range(2):
            error = outcome(lambda: trainer.fit(model, loader(), loader(2)))  # noqa: B023
            again += [error, trainer.global_step, trainer.current_epoch]
            trainer.fit_loop.max_epochs = 4
        found.append((again, [each.clone() for each in model.parameters()]))

    (alone, weights), (ours, own) = found
    assert ours == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))
    for part in PARTS:
        assert seen.count(f"Before{part}") >= seen.count(f"After{part}"), part
        if part != "TrainIter" and part != "ValIter":
            assert seen.count(f"Before{part}") == seen.count(f"After{part}"), part


def test_optimizers_that_a_program_changes(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The logged rate, and the events of a step, are those of the optimizer that makes the step."""
    bridge = make_bridge(writers=[JSONLWriter()])
    stepped = rows(bridge, "after_optimizer_step")

    class Changing(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.025)]

    fit(tmp_path, bridge, model=Changing())

    assert [line["lr"] for line in lines(tmp_path / "attachment") if "lr" in line] == [0.1, 0.025]
    assert len(stepped) == 8


@pytest.mark.parametrize("method", ["on_exception", "teardown"])
def test_another_callback_fails_at_the_end(make_bridge: MakeBridge, tmp_path: Path, method: str) -> None:
    """A callback that fails at the end of a run hides neither its error nor the next training."""
    bridge = make_bridge(writers=[JSONLWriter()])
    seen = rows(bridge, "before_run", "after_run")
    ends = [at("on_train_batch_end", 3, fail)] if method == "on_exception" else []
    trainer = make_trainer(tmp_path, at(method, 1, fail), *ends, bridge)
    model = Classifier()

    with pytest.raises(OSError, match="broken"):
        trainer.fit(model, loader())

    assert costs(tmp_path / "attachment")[0].complete or method == "teardown"
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader())
    assert seen == ["BeforeRun", "AfterRun"] * 2
    assert trainer.current_epoch == 4


def test_a_trainer_within_the_training_shares_the_bridge(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A second trainer that validates within the training, with the same callbacks, leaves the run as it is."""
    bridge = make_bridge()
    seen = rows(bridge, "before_run", "after_train_iter", "after_val", "after_run")

    def validate(trainer: Trainer) -> None:
        make_trainer(tmp_path, bridge).validate(Classifier(), loader(1), verbose=False)

    fit(tmp_path, at("on_train_epoch_end", 1, validate), bridge, validates=False)

    assert seen == ["BeforeRun", *["AfterTrainIter"] * 4, "AfterVal", *["AfterTrainIter"] * 4, "AfterRun"]


def test_a_bridge_that_joins_late(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A bridge that a program adds within a training does nothing until the next one."""
    bridge = make_bridge()
    seen = rows(bridge, "after_train_iter")
    trainer = make_trainer(
        tmp_path, at("on_train_batch_end", 3, lambda trainer: trainer.callbacks.append(bridge))
    )
    model = Classifier()

    trainer.fit(model, loader(), loader(2))
    assert seen == []

    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader(), loader(2))
    assert len(seen) == 4
