"""Trainings of Transformers that end early: by a stop, an error or a signal."""

from __future__ import annotations

import os
import signal
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
from eventloop.costs.records import read_costs
from eventloop.writers import JSONLWriter
from tests.support.transformers_host import TinyModel, host, lines, record, rows

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.mark.parametrize("event", ["after_train_iter", "after_train_epoch", "after_val_epoch"])
def test_a_handler_stops_the_host(tmp_path: Path, event: str) -> None:
    """`trainer.stop` ends the host's training after that iteration, epoch or validation."""
    bridge = EventLoopCallback()
    bridge.bus.subscribe(lambda trainer, event: trainer.stop("enough"), event)

    native = host(tmp_path, bridge, eval_strategy="epoch", eval_dataset=rows(4))
    native.train()

    assert native.state.global_step == (1 if event == "after_train_iter" else 4)
    assert (after_run := bridge.bus.latest("after_run")) is not None
    assert after_run.reason == "enough"


def test_an_early_stop_of_the_host(tmp_path: Path) -> None:
    """The run names the stop of a callback of the host as its reason, and an epoch that it cuts short is not counted."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    bridge = EventLoopCallback()

    host(tmp_path, Stop(), bridge).train()

    after_run = bridge.bus.latest("after_run")
    assert after_run is not None
    assert (after_run.iter, after_run.epoch) == (6, 1)
    assert after_run.reason == "a callback of Transformers set control.should_training_stop"


class Fails(TrainerCallback):
    """A callback that raises an error in the third iteration."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise the error."""
        if state.global_step == 3:
            raise self.error


class FailingModel(TinyModel):
    """A model that raises an error in its third step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.steps = error, 0

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Raise the error, or return the loss."""
        self.steps += 1
        if self.steps == 3:
            raise self.error
        return super().forward(inputs, labels)


class FailingData(list[Any]):
    """A data set whose items raise an error."""

    error: BaseException

    def __getitem__(self, index: Any) -> Any:
        raise self.error


def failing_data(error: BaseException) -> FailingData:
    """A data set that raises the error."""
    data = FailingData(rows(16))
    data.error = error
    return data


PLACES: dict[str, Callable[[BaseException], dict[str, Any]]] = {
    "a callback": lambda error: {"callback": Fails(error)},
    "the model": lambda error: {"model": FailingModel(error)},
    "the data": lambda error: {"train_dataset": failing_data(error)},
}


@pytest.mark.parametrize("error", [OSError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_the_host_closes_the_run(tmp_path: Path, place: str, error: BaseException) -> None:
    """An error reaches the program untouched; events, costs and writers are complete, and no thread is left."""
    parts = PLACES[place](error)
    callbacks = [parts.pop("callback")] if "callback" in parts else []
    bridge = EventLoopCallback(writers=[JSONLWriter()])
    native = host(tmp_path, bridge, *callbacks, **parts)

    with pytest.raises(type(error)) as raised:
        native.train()

    assert raised.value is error
    assert not hasattr(error, "__notes__")
    after_run = lines(tmp_path)[-1]
    assert (after_run["event"], after_run["reason"]) == ("after_run", "error")
    assert bridge.bus.closed
    assert read_costs(tmp_path)


def test_an_error_in_an_evaluation_alone_closes_its_run(tmp_path: Path) -> None:
    """An error of `evaluate` outside of a training ends its run, and the next evaluation is a run again."""
    bridge = EventLoopCallback()
    reasons: list[str] = []
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_val", "after_run")
    native = host(tmp_path, bridge, eval_dataset=failing_data(OSError("broken")))

    with pytest.raises(OSError, match="broken"):
        native.evaluate()
    native.evaluate(rows(4))

    assert reasons == ["error", "error", "completed", "completed"]


@pytest.mark.parametrize("place", ["the model", "the data"])
def test_an_error_where_the_bridge_was_added_later(tmp_path: Path, place: str) -> None:
    """After `add_callback` errors of the model and of the data close the run as well."""
    bridge = EventLoopCallback()
    native = host(tmp_path, **PLACES[place](OSError("broken")))
    native.add_callback(bridge)

    with pytest.raises(OSError, match="broken"):
        native.train()

    assert (after_run := bridge.bus.latest("after_run")) is not None
    assert after_run.error == "OSError: broken"
    assert bridge.bus.closed


def test_a_training_where_the_bridge_was_added_later(tmp_path: Path) -> None:
    """After `add_callback` a training has all its events and ends its run, and so has the next training."""
    bridge = EventLoopCallback()
    seen = record(bridge)
    native = host(tmp_path)
    native.add_callback(bridge)

    native.train()
    native.train()

    assert [row for row in seen if row[0] in ("BeforeRun", "AfterRun")] == [
        ("BeforeRun", 0, 0),
        ("AfterRun", 8, 2),
        ("BeforeRun", 0, 0),
        ("AfterRun", 8, 2),
    ]
    assert bridge.bus.closed


def test_sigterm_ends_the_run_and_the_program(tmp_path: Path) -> None:
    """SIGTERM stops the host after the iteration; with the writers complete the program ends with its code."""

    class Terminate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    native = host(tmp_path, EventLoopCallback(writers=[JSONLWriter()]), Terminate())

    with pytest.raises(SystemExit) as ended:
        native.train()

    assert ended.value.code == 128 + signal.SIGTERM
    assert native.state.global_step == 3
    assert lines(tmp_path)[-1]["reason"] == "preempted by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_programs_own_handler_of_sigterm_stays(tmp_path: Path) -> None:
    """A handler that the program has installed is left alone."""
    found = []
    before = signal.signal(signal.SIGTERM, own := lambda signum, frame: None)
    bridge = EventLoopCallback()
    bridge.bus.subscribe(lambda event: found.append(signal.getsignal(signal.SIGTERM)), "before_train_epoch")
    try:
        host(tmp_path, bridge, num_train_epochs=1).train()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert found == [own]


def test_a_training_that_begins_again(tmp_path: Path) -> None:
    """After an out-of-memory error `auto_find_batch_size` trains again: a run of its own, and the first one is closed."""
    model = FailingModel(RuntimeError("CUDA out of memory."))
    bridge = EventLoopCallback()
    seen = record(bridge)

    host(tmp_path, bridge, model=model, num_train_epochs=1, auto_find_batch_size=True).train()

    runs = [row[0] for row in seen if row[0] in ("BeforeRun", "AfterRun")]
    assert runs == ["BeforeRun", "AfterRun"] * 2
