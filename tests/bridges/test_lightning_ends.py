"""Ends of a Lightning training: its limits, errors and signals."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from eventloop.writers import JSONLWriter
from tests.support.lightning import Classifier, MakeBridge, costs, fit, lines, loader, make_trainer, rows

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_the_host(make_bridge: MakeBridge, tmp_path: Path, error: BaseException) -> None:
    """The host's error stays what it is; closing events, costs and writers are complete; no thread is left."""
    bridge, reasons = make_bridge(writers=[JSONLWriter()]), []
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_train_epoch", "after_run")

    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 2:
                raise error
            return super().training_step(batch, batch_idx)

    threads = set(threading.enumerate())
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError) as caught:
        fit(tmp_path, bridge, model=Failing(), log_every_n_steps=1)

    assert caught.value is error or caught.value.__context__ is error
    assert reasons == ["error", "error"]
    assert costs(tmp_path / "attachment")[0].complete
    assert sum("train_loss_step" in line for line in lines(tmp_path / "attachment")) == 2
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 0},
        {"fast_dev_run": True},
        {"limit_train_batches": 0},
        {"max_epochs": -1, "max_steps": 3},
        {"overfit_batches": 1},
        {"num_sanity_val_steps": 0},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 4, "max_steps": 1, "max_epochs": -1},
    ],
    ids=str,
)
def test_each_way_to_train(make_bridge: MakeBridge, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each limit of Lightning ends as without the bridge, with all events closed and no thread left."""
    bridge, threads = make_bridge(writers=[JSONLWriter()]), set(threading.enumerate())
    seen = rows(
        bridge,
        "before_run",
        "before_train_epoch",
        "before_val",
        "after_run",
        "after_train_epoch",
        "after_val",
    )

    alone, ridden = fit(tmp_path, **options), fit(tmp_path, bridge, **options)

    assert (ridden.global_step, ridden.current_epoch) == (alone.global_step, alone.current_epoch)
    assert all(
        seen.count(f"Before{part}") == seen.count(f"After{part}") for part in ("Run", "TrainEpoch", "Val")
    )
    assert set(threading.enumerate()) == threads


def test_a_module_cuts_an_epoch_short(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """An iteration that Lightning begins and drops, by -1 of a module's hook, is not counted."""

    class Short(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(lambda event: seen.append(event.iter), "after_train_iter", "after_train_epoch")

    fit(tmp_path, bridge, model=Short())

    assert seen == [0, 1, 2, 2, 3, 4]


def test_several_fits_and_evaluations(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Each `fit`, `validate` and `test` of a trainer is a run, and a later fit goes on with the counters."""
    bridge, model = make_bridge(), Classifier()
    seen = rows(bridge, "before_train", "before_val", "before_test", "after_run")
    trainer = make_trainer(tmp_path, bridge, max_epochs=1)

    trainer.fit(model, loader())
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    iterations: list[int] = []
    bridge.bus.subscribe(lambda event: iterations.append(event.iter), "before_train_iter")
    trainer.fit(model, loader())

    assert seen == [
        "BeforeTrain",
        "AfterRun",
        "BeforeVal",
        "AfterRun",
        "BeforeTest",
        "AfterRun",
        "BeforeTrain",
        "AfterRun",
    ]
    assert iterations == [4, 5, 6, 7]


def test_sigterm(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Lightning ends the program at a SIGTERM; the bridge's events, writers and costs are complete by then."""
    bridge, reasons = make_bridge(writers=[JSONLWriter()]), []
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_run")

    class Killed(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, bridge, model=Killed(), log_every_n_steps=1)

    assert reasons == ["error"]
    assert costs(tmp_path / "attachment")[0].complete
    assert sum("train_loss_step" in line for line in lines(tmp_path / "attachment")) == 1
