"""The end of a Lightning training, which follows `on_train_end` of all callbacks and of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.support.lightning import Classifier, MakeBridge, costs, fit

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


class Ends(Callback):  # type: ignore[misc]
    """A callback with methods around a training."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do nothing."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Do nothing."""

    on_fit_end = on_train_end
    teardown = setup


class Earlier(Ends):
    """A callback before the bridge."""


class Saves(ModelCheckpoint):  # type: ignore[misc]
    """A checkpoint at the end of the training. Lightning puts it behind the bridge."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(Path(self.dirpath, "end.ckpt"))


class Module(Classifier):
    """A module with a hook at the end of the training."""

    def on_train_end(self) -> None:
        """Do nothing."""


def test_which_methods_around_a_training_have_rows(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`on_train_end` has a row wherever its callback stands; `on_fit_end`, `teardown` and an early `setup` have none."""
    bridge = make_bridge()

    fit(tmp_path, Saves(tmp_path), Earlier(), bridge, Ends(), model=Module(), enable_checkpointing=True)

    calls = costs(tmp_path / "attachment")[1]
    around = ("setup", "on_train_end", "on_fit_end", "teardown")
    names = ("Earlier", "Ends", "Saves", "Module")
    assert {f"{name}.{method}" for name in names for method in around} & calls.keys() == {
        "Earlier.on_train_end",
        "Ends.on_train_end",
        "Saves.on_train_end",
        "Module.on_train_end",
        "Ends.setup",
        "Saves.setup",
    }
    assert calls["Saves.on_train_end"] == 1


def test_a_checkpoint_of_the_end_is_within_the_run(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A checkpoint saved in `on_train_end` emits its event before `after_run`, and `fit` returns after that."""
    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(
        lambda event: seen.append(type(event).__name__), "before_save_checkpoint", "after_train", "after_run"
    )

    trainer = fit(tmp_path, bridge, Saves(tmp_path), enable_checkpointing=True, max_epochs=1)

    assert seen[-2:] == ["AfterTrain", "AfterRun"]
    assert seen.count("BeforeSaveCheckpoint") == 2  # that of the epoch, and that of the end
    assert bridge.bus.closed
    assert "on_train_end" not in vars(trainer.strategy)


def test_an_error_in_on_train_end(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """An error of a later callback's `on_train_end` is the reason of the run's end, and stays what it is."""
    bridge, reasons, error = make_bridge(), [], RuntimeError("the disk is full")
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_run")

    class Fails(Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            raise error

    with pytest.raises(RuntimeError) as caught:
        fit(tmp_path, bridge, Fails())

    assert caught.value is error
    assert reasons == ["error"]
    assert costs(tmp_path / "attachment")[0].complete
