"""Hooks that attachment along in Transformers, its checkpoints, and bad input of the bridge."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from transformers import TrainerCallback
from transformers import trainer as transformers_trainer

from eventloop import SkipIteration
from eventloop.bridges.transformers import EventLoopCallback
from eventloop.checkpoint import CheckpointError
from eventloop.costs.records import read_costs
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook
from tests.support.internals import substitute
from tests.support.transformers_host import host, record, rows, same

pytestmark = pytest.mark.usefixtures("no_thread_left")


# --- hooks and checkpoints ------------------------------------------------------------------------------------


def test_the_average_is_evaluated(tmp_path: Path) -> None:
    """The host's validation runs with the average of EMAHook, and its training goes on with the model's own weights."""
    ema, seen = EMAHook(momentum=0.5), []

    class Look(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            seen.append(copy.deepcopy(native.model))

    native = host(
        tmp_path,
        EventLoopCallback(hooks=[ema]),
        Look(),
        num_train_epochs=1,
        eval_strategy="epoch",
        eval_dataset=rows(4),
    )
    native.train()

    assert same(seen[0], ema.ema_model.module)
    assert not same(seen[0], native.model)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """A resumed host has its counters in the events, and the hooks' states: the averages are bitwise the same."""
    whole, rest = EMAHook(momentum=0.5), EMAHook(momentum=0.5)
    first = host(tmp_path, EventLoopCallback(hooks=[whole]), save_strategy="steps", save_steps=3)
    first.train()
    resumed = EventLoopCallback(hooks=[rest], work_dir=tmp_path / "resumed")
    seen = record(resumed)
    second = host(tmp_path, resumed)

    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert seen[0] == ("AfterLoadCheckpoint", 3, 0)
    assert seen[1] == ("BeforeRun", 3, 0)
    iterations = [(index, epoch) for name, index, epoch in seen if name == "AfterTrainIter"]
    assert iterations == [(3, 0), (4, 1), (5, 1), (6, 1), (7, 1)]
    assert same(first.model, second.model)
    assert same(whole.ema_model.module, rest.ema_model.module)
    assert rest.state_dict() == {"steps": 8}


def test_the_newest_checkpoint_of_the_host(tmp_path: Path) -> None:
    """`resume_from_checkpoint=True` restores the hooks too."""
    stopping = EarlyStoppingHook("eval_loss", rule="greater", patience=9)
    options: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": rows(4), "save_strategy": "epoch"}
    host(tmp_path, EventLoopCallback(hooks=[stopping]), num_train_epochs=1, **options).train()
    again = EarlyStoppingHook("eval_loss", rule="greater", patience=9)

    host(tmp_path, EventLoopCallback(hooks=[again]), **options).train(resume_from_checkpoint=True)

    assert again.state_dict() != stopping.state_dict()  # of the second epoch
    loaded = torch.load(tmp_path / "checkpoint-4" / "eventloop.pt", weights_only=True)
    assert loaded["hooks"]["EarlyStoppingHook"] == stopping.state_dict()
    assert "state_dict" not in loaded  # the host's checkpoint has the weights


def test_a_checkpoint_without_the_bridge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run without the bridge is resumed with it: a warning names the hooks without a state."""
    host(tmp_path, num_train_epochs=1, save_strategy="epoch").train()
    bridge = EventLoopCallback(hooks=[EMAHook()])

    host(tmp_path, bridge).train(resume_from_checkpoint=True)

    assert "has no state of the hook EMAHook, which starts afresh" in caplog.text
    assert bridge.trainer.iter == 8


@pytest.mark.parametrize("content", [b"no checkpoint", None])
def test_a_damaged_file_of_the_hooks(tmp_path: Path, content: bytes | None) -> None:
    """A file that cannot be read, or has no states of hooks, is refused by its path when the training begins."""
    host(tmp_path, EventLoopCallback(), num_train_epochs=1, save_strategy="epoch").train()
    path = tmp_path / "checkpoint-4" / "eventloop.pt"
    if content is None:
        torch.save({"weights": 1}, path)
    else:
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"eventloop.pt (cannot be read|has no states of hooks)"):
        host(tmp_path, EventLoopCallback()).train(resume_from_checkpoint=True)


def test_our_checkpoints_ride_along(tmp_path: Path) -> None:
    """A CheckpointHook saves the best checkpoint by a metric of the host's validation."""
    hook = CheckpointHook(interval=1, save_best="eval_loss")

    host(tmp_path, EventLoopCallback(hooks=[hook]), eval_strategy="epoch", eval_dataset=rows(8)).train()

    assert (tmp_path / "epoch_2").is_dir()
    assert [path.name for path in tmp_path.glob("best_eval_loss_epoch_*")]


def test_our_early_stopping_rides_along(tmp_path: Path) -> None:
    """An EarlyStoppingHook on a metric of the host ends its training."""
    hook = EarlyStoppingHook("eval_runtime", rule="less", patience=1, min_delta=100.0)

    native = host(
        tmp_path,
        EventLoopCallback(hooks=[hook]),
        num_train_epochs=5,
        eval_strategy="epoch",
        eval_dataset=rows(8),
    )
    native.train()

    assert native.state.global_step == 8


# --- several trainers, and bad input --------------------------------------------------------------------------


def test_every_trainer_of_a_program_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `DEFAULT_CALLBACKS` the class gives each Trainer a bridge of its own."""
    defaults = [*transformers_trainer.DEFAULT_CALLBACKS, EventLoopCallback]
    monkeypatch.setattr(transformers_trainer, "DEFAULT_CALLBACKS", defaults)

    hosts = [host(tmp_path / name) for name in ("a", "b")]
    for each in hosts:
        each.train()

    bridges = [
        cb for each in hosts for cb in each.callback_handler.callbacks if isinstance(cb, EventLoopCallback)
    ]
    assert len({id(each.bus) for each in bridges}) == 2
    assert [read_costs(tmp_path / name).phases.iterations for name in ("a", "b")] == [8, 8]


def test_two_bridges_on_one_trainer(tmp_path: Path) -> None:
    """A second bridge is refused by the line that builds the trainer, adds it, or trains if both were added."""
    two = "expected one EventLoopCallback in a Trainer, got two"
    with pytest.raises(ValueError, match=two):
        host(tmp_path, EventLoopCallback(), EventLoopCallback())
    native = host(tmp_path, EventLoopCallback())
    for second in (EventLoopCallback(), EventLoopCallback):
        with pytest.raises(ValueError, match=two):
            native.add_callback(second)
    native = host(tmp_path)
    native.add_callback(EventLoopCallback())
    native.add_callback(EventLoopCallback())
    with pytest.raises(ValueError, match=two):
        native.train()


def test_a_bridge_in_place_of_another(tmp_path: Path) -> None:
    """A bridge that was removed makes room for another, and other callbacks are added as ever."""
    native = host(tmp_path, EventLoopCallback())
    first = native.pop_callback(EventLoopCallback)
    second = EventLoopCallback()
    native.add_callback(second)
    native.add_callback(TrainerCallback)

    native.train()

    assert second.trainer.iter == 8
    assert not first.bus.closed


def test_one_bridge_on_two_models(tmp_path: Path) -> None:
    """A bridge whose hooks hold the state of one model is refused for another."""
    bridge = EventLoopCallback(hooks=[EMAHook()])
    host(tmp_path, bridge).train()

    with pytest.raises(ValueError, match="this bridge to Transformers serves the model of its first run"):
        host(tmp_path, bridge).train()


def test_no_trainer_before_the_first_run() -> None:
    """The attribute `trainer` says that the host has not begun a run."""
    with pytest.raises(RuntimeError, match=r"no trainer before the first run of Transformers"):
        _ = EventLoopCallback().trainer


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            "before_val_iter",
            "before_val_iter, which this bus never has: Transformers has no callback before a",
        ),
        (
            "before_test_iter",
            "before_test_iter, which this bus never has: Transformers has no callback before",
        ),
    ],
)
def test_an_event_that_the_host_never_has(event: str, words: str) -> None:
    """A subscription to an event without a moment in the host is refused at its line."""
    with pytest.raises(ValueError, match=words):
        EventLoopCallback().bus.on(event)(print)


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        (
            "find_spec",
            None,
            r"needs transformers>=5.0, which is not installed: pip install 'torch-eventloop\[tr",
        ),
        (
            "version",
            "4.57.1",
            r"needs transformers>=5.0, got 4.57.1: pip install 'torch-eventloop\[transform",
        ),
    ],
    ids=["missing", "old"],
)
def test_transformers_is_missing_or_old(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str | None, words: str
) -> None:
    """The import of the bridge names the version that it needs, and the extra."""
    substitute(monkeypatch, f"host.{name}", lambda package: found)
    for module in ("eventloop.bridges.transformers.callback", "eventloop.bridges.transformers"):
        monkeypatch.delitem(sys.modules, module)

    with pytest.raises(ImportError, match=words):
        importlib.import_module("eventloop.bridges.transformers")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bus": 3}, TypeError, "bus must be a Bus"),
        ({"hooks": EMAHook()}, TypeError, "hooks must be a list"),
        (
            {"hooks": [OptimizerHook()]},
            ValueError,
            "OptimizerHook does backward and the optimizer's step itself, which Transformers",
        ),
        ({"measure": 1}, TypeError, "measure must be True or False, got 1"),
        ({"work_dir": 3}, TypeError, "work_dir must be a path"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """A bad argument is refused by the line that makes the bridge."""
    with pytest.raises(error, match=words):
        EventLoopCallback(**arguments)


def test_a_batch_cannot_be_skipped(tmp_path: Path) -> None:
    """A handler that raises SkipIteration is an error: the host has no way to skip a batch."""
    bridge = EventLoopCallback()

    @bridge.bus.on("before_train_iter")
    def skip(event: Any) -> None:
        raise SkipIteration

    with pytest.raises(RuntimeError, match="raised SkipIteration, and Transformers cannot skip a batch"):
        host(tmp_path, bridge).train()


def test_another_loop_that_calls_callbacks(tmp_path: Path) -> None:
    """A loop that is no Transformers trainer is told to drive a DrivenTrainer."""
    native = host(tmp_path)

    with pytest.raises(
        RuntimeError, match=r"serves the loop of a transformers.Trainer, got a call from another"
    ):
        EventLoopCallback().on_train_begin(native.args, native.state, native.control)
