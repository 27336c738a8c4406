"""Hooks that attachment along in a Lightning training, and Lightning's checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from eventloop import Bus
from eventloop.bridges.lightning import EventLoopCallback
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook, PreciseBN
from tests.support.lightning import Classifier, MakeBridge, fit, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


def test_validations_run_with_the_average(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """EMAHook's average is in the model during Lightning's validation, and not after it."""
    ema, seen = EMAHook(momentum=0.5), {}
    bridge = make_bridge(hooks=[ema])

    class Looking(Callback):  # type: ignore[misc]
        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                seen["val"] = copy.deepcopy(pl_module.state_dict())

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen["train"] = copy.deepcopy(pl_module.state_dict())

    fit(tmp_path, bridge, Looking(), max_epochs=1)

    average = ema.ema_model.module.state_dict()
    assert all(torch.equal(value, average[name]) for name, value in seen["val"].items())
    assert not all(torch.equal(value, average[name]) for name, value in seen["train"].items())


def test_states_are_in_the_hosts_checkpoint(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A training that goes on from Lightning's checkpoint has the average of the uninterrupted one."""

    def plain() -> Classifier:  # Lightning's checkpoints have no random state, so a dropout would differ
        model = Classifier()
        model.model[2].p = 0.0
        return model

    whole, part, rest = (EMAHook(momentum=0.5) for _ in range(3))
    fit(tmp_path, make_bridge(hooks=[whole]), model=plain())

    trainer = fit(tmp_path, make_bridge(hooks=[part]), max_epochs=1, model=plain())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    bridge = make_bridge(hooks=[rest])
    iterations: list[int] = []
    bridge.bus.subscribe(lambda event: iterations.append(event.iter), "after_train_iter")
    fit(tmp_path, bridge, ckpt_path=tmp_path / "one.ckpt", model=plain())

    assert iterations == [4, 5, 6, 7]
    expected, got = whole.ema_model.state_dict(), rest.ema_model.state_dict()
    assert rest.ema_model.steps == whole.ema_model.steps == 8
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_a_bridge_without_states_leaves_the_checkpoint_alone(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Lightning's checkpoint has no entry of a bridge whose hooks have no state."""
    trainer = fit(tmp_path, make_bridge())
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"] == {}


def test_checkpoints_and_early_stopping_ride_along(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """CheckpointHook saves each epoch, and EarlyStoppingHook stops the host."""
    stopping = EarlyStoppingHook("val_loss", rule="less", patience=1, min_delta=9.0)

    trainer = fit(tmp_path, make_bridge(hooks=[CheckpointHook(interval=1), stopping]), max_epochs=9)

    assert trainer.current_epoch == 2
    assert stopping.wait == 1
    assert (tmp_path / "attachment" / "epoch_1").exists()


def test_precise_statistics_ride_along(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """PreciseBN makes its pass at the end of each epoch."""
    model = Classifier()
    model.model.insert(1, torch.nn.BatchNorm1d(8))
    batches = [batch for batch, _ in loader()]

    fit(
        tmp_path,
        make_bridge(hooks=[PreciseBN(1, 4, batches, forward=lambda m, batch: m(batch))]),
        model=model,
    )

    expected = model.model[0](torch.cat(batches)).mean(0)
    assert torch.allclose(model.model[1].running_mean, expected, atol=1e-5)


def test_another_model_is_refused_where_hooks_have_state(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A bridge with hooks serves one model."""
    trainer = make_trainer(tmp_path, make_bridge(hooks=[EMAHook()]), max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.fit_loop.max_epochs = 2

    with pytest.raises(ValueError, match=r"serves the model of its first run.*got another Classifier"):
        trainer.fit(Classifier(), loader())


def test_an_own_bus_and_the_hosts_checkpoints(tmp_path: Path) -> None:
    """A bus that is given is used; ModelCheckpoint works beside the bridge, whose files are in `log_dir`."""
    bus, calls = Bus(), []
    bus.subscribe(lambda event: calls.append(event.iter), "after_train_iter")

    class Counting(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"n": len(calls)}

    bridge = EventLoopCallback(bus, hooks=[Counting()])
    fit(tmp_path, bridge, ModelCheckpoint(tmp_path, "best"), enable_checkpointing=True)

    state = torch.load(tmp_path / "best.ckpt", weights_only=True)["callbacks"]["EventLoopCallback"]
    assert bridge.bus is bus
    assert state["hooks"]["Counting"] == {"n": 8}
    assert (tmp_path / "eventloop" / "costs.json").is_file()
