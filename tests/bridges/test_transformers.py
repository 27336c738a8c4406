"""The bus inside the loop of a Transformers trainer."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

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
from eventloop.writers import JSONLWriter
from tests.support.reading import watch_reads
from tests.support.transformers_host import TinyModel, host, record, rows

pytestmark = pytest.mark.usefixtures("no_thread_left")


def lines(work_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have bitwise the same weights."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- events ------------------------------------------------------------------------------------------------


def test_events_of_a_training(tmp_path: Path) -> None:
    """An update of two batches is an iteration; the host's validation follows the epoch's end."""
    bridge = EventLoopCallback()
    seen = record(bridge)

    host(
        tmp_path, bridge, num_train_epochs=1, gradient_accumulation_steps=2, eval_strategy="epoch",
        eval_dataset=rows(8),
    ).train()  # fmt: skip

    iteration = (
        "BeforeTrainIter",
        "AfterBackward",
        "AfterBackward",
        "BeforeOptimizerStep",
        "AfterOptimizerStep",
        "AfterTrainIter",
    )
    assert seen == [
        ("BeforeRun", 0, 0),
        ("BeforeTrain", 0, 0),
        ("BeforeTrainEpoch", 0, 0),
        *[(name, index, 0) for index in range(2) for name in iteration],
        ("AfterTrainEpoch", 2, 0),
        ("BeforeVal", 2, 1),
        ("BeforeValEpoch", 2, 1),
        ("AfterValIter", 2, 1),
        ("AfterValEpoch", 2, 1),
        ("AfterVal", 2, 1),
        ("AfterTrain", 2, 1),
        ("AfterRun", 2, 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "limits"), [({"num_train_epochs": 2}, (8, 2)), ({"max_steps": 3}, (3, None))]
)
def test_handlers_get_a_trainer_with_the_host_in_it(
    tmp_path: Path, arguments: dict[str, Any], limits: tuple[int, int | None]
) -> None:
    """A handler's trainer has the host, its model, its optimizer and its limits; no batch and no outputs."""
    bridge, seen = EventLoopCallback(), []
    bridge.bus.subscribe(lambda trainer, event: seen.append((trainer, event)), "after_train_iter")

    native = host(tmp_path, bridge, **arguments)
    native.train()

    trainer, event = seen[0]
    assert trainer.native is native
    assert trainer.model is native.model
    assert trainer.optimizer is native.optimizer
    assert (trainer.batch, trainer.outputs, trainer.work_dir) == (None, None, tmp_path)
    assert (event.max_iters, event.max_epochs) == limits


def test_a_validation_within_an_epoch(tmp_path: Path) -> None:
    """A validation between two iterations has its events there, with the number of completed iterations."""
    bridge = EventLoopCallback()
    seen = record(bridge)

    host(tmp_path, bridge, eval_strategy="steps", eval_steps=3, eval_dataset=rows(8), max_steps=4).train()

    assert [row for row in seen if row[0] == "AfterValEpoch"] == [
        ("AfterValEpoch", 3, 0),
        ("AfterValEpoch", 4, 0),
    ]


def test_several_data_sets_are_one_evaluation(tmp_path: Path) -> None:
    """Data sets by name give one `after_val_epoch` with the metrics of all."""
    bridge, seen = EventLoopCallback(), []
    bridge.bus.subscribe(lambda event: seen.append(event.metrics), "after_val_epoch")

    native = host(
        tmp_path, bridge, num_train_epochs=1, eval_strategy="epoch", eval_dataset={"a": rows(8), "b": rows(4)}
    )
    native.train()

    (metrics,) = seen
    assert {"eval_a_loss", "eval_b_loss"} <= metrics.keys()


def test_a_prediction_within_the_run_is_a_test(tmp_path: Path) -> None:
    """`predict` in a callback emits the events of a test."""

    class Predict(TrainerCallback):
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            native.predict(rows(4))

    bridge = EventLoopCallback()
    seen = record(bridge)
    native = host(tmp_path, bridge, Predict(), num_train_epochs=1)

    native.train()

    assert [name for name, _, _ in seen if "Test" in name] == [
        "BeforeTest", "BeforeTestEpoch", "AfterTestIter", "AfterTestEpoch", "AfterTest",
    ]  # fmt: skip


def test_what_the_host_logs(tmp_path: Path) -> None:
    """Numbers that the host logs reach the writers once, with their step and mode."""
    native = host(
        tmp_path, EventLoopCallback(writers=[JSONLWriter()]), eval_strategy="epoch", eval_dataset=rows(8)
    )
    native.train()

    for name, mode in (("loss", "train"), ("eval_loss", "val"), ("train_loss", "train")):
        logged = [(entry["step"], entry[name]) for entry in native.state.log_history if name in entry]
        found = [(line["step"], line[name]) for line in lines(tmp_path) if name in line]
        assert logged
        assert found == logged
        assert {line["mode"] for line in lines(tmp_path) if name in line} == {mode}


def test_nothing_is_read_from_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread asks no tensor for its value that it would not ask without the bridge."""
    counted = []
    for bridges in ((), (EventLoopCallback(hooks=[EMAHook()], writers=[JSONLWriter()]),)):
        with monkeypatch.context() as patch:
            reads = watch_reads(patch)
            host(tmp_path, *bridges).train()
            counted.append({key: count for key, count in reads.items() if key[0] == "MainThread"})

    assert counted[0]
    assert counted[1] == counted[0]


# --- the host trains as without it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"bf16": True},
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": rows(8)},
    ],
    ids=["plain", "accumulation", "amp", "amp and accumulation", "validations"],
)
def test_weights_are_those_without_the_bridge(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The weights are bitwise those of the host alone, with AMP, accumulation and validations."""
    alone = host(tmp_path / "alone", **arguments)
    alone.train()
    bridge = EventLoopCallback(hooks=[EMAHook(momentum=0.5)], writers=[JSONLWriter()])
    bridge.bus.subscribe(lambda event: None, "*")
    driven = host(tmp_path / "driven", bridge, **arguments)

    driven.train()

    assert not same(alone.model, TinyModel())
    assert same(alone.model, driven.model)
    assert [each.get("loss") for each in alone.state.log_history] == [
        each.get("loss") for each in driven.state.log_history
    ]


# --- costs -------------------------------------------------------------------------------------------------


class Busy(TrainerCallback):
    """A callback that works for some time in each iteration, and measures it by a clock of its own."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Compute for 2 ms."""
        began = perf_counter()
        while perf_counter() - began < 2e-3:
            pass
        self.seconds.append(perf_counter() - began)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def test_each_callback_has_its_rows(tmp_path: Path) -> None:
    """Each method that a callback defines has a row, with all its calls, within 2 % of its own clock."""
    first, second = Busy(), Busy()
    native = host(tmp_path, EventLoopCallback(), first, second)

    native.train()

    costs = {(row.name, row.event): row for row in read_costs(tmp_path).handlers}
    assert costs["DefaultFlowCallback.on_step_end", "on_step_end"].calls == 8
    assert costs["PrinterCallback.on_log", "on_log"].calls == 5
    assert costs["Busy.on_train_end", "on_train_end"].calls == 1
    for busy, name in ((first, "Busy.on_step_end"), (second, "Busy #2.on_step_end")):
        row = costs[name, "on_step_end"]
        assert row.calls == len(busy.seconds)
        assert row.seconds == pytest.approx(sum(busy.seconds), rel=0.02)


def test_callbacks_after_the_step_are_no_wait_for_data(tmp_path: Path) -> None:
    """The hooks phase has the time of callbacks that run after the bridge, and `data` has not."""
    busy = Busy()

    host(tmp_path, EventLoopCallback(), busy).train()

    phases = read_costs(tmp_path).phases
    assert phases.iterations == 8
    assert (
        phases.hooks >= sum(busy.seconds) - busy.seconds[3] - busy.seconds[7]
    )  # after an epoch's last iteration
    assert phases.backward > 0
    assert phases.optimizer > 0


def test_no_rows_without_measuring(tmp_path: Path) -> None:
    """`measure=False` leaves the callbacks alone."""
    host(tmp_path, EventLoopCallback(measure=False), Busy()).train()

    assert not [row for row in read_costs(tmp_path).handlers if row.name.startswith(("Busy", "Default"))]


@pytest.mark.parametrize("fails", [False, True])
def test_objects_of_the_host_are_as_before(tmp_path: Path, fails: bool) -> None:
    """After a training callbacks have their own methods and can be copied; while it runs, their class is theirs."""

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            classes.append(type(busy))
            if fails:
                raise OSError("full")

    busy = Busy()
    classes: list[type[Any]] = []
    native = host(tmp_path, EventLoopCallback(), busy, Look())
    before = [set(vars(each)) for each in (busy, native, native.accelerator)]

    try:
        native.train()
    except OSError:
        assert fails

    assert set(classes) == {Busy}
    assert vars(busy).keys() == {"seconds"}
    assert vars(copy.deepcopy(busy)) == vars(busy)
    assert not {"evaluate", "predict"} & set(vars(native))
    assert set(vars(native.accelerator)) == before[2]


# --- stopping and errors -----------------------------------------------------------------------------------


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
    assert not [each for each in threading.enumerate() if each.name.startswith("eventloop ")]


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
        ("BeforeRun", 0, 0), ("AfterRun", 8, 2), ("BeforeRun", 0, 0), ("AfterRun", 8, 2),
    ]  # fmt: skip
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


# --- hooks and checkpoints ---------------------------------------------------------------------------------


def test_the_average_is_evaluated(tmp_path: Path) -> None:
    """The host's validation runs with the average of EMAHook, and its training goes on with the model's own weights."""
    ema, seen = EMAHook(momentum=0.5), []

    class Look(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            seen.append(copy.deepcopy(native.model))

    native = host(
        tmp_path, EventLoopCallback(hooks=[ema]), Look(), num_train_epochs=1, eval_strategy="epoch",
        eval_dataset=rows(4),
    )  # fmt: skip
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
    assert bridge.trainer is not None
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


# --- several trainers, and bad input -----------------------------------------------------------------------


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
    """A second bridge is refused by the line that builds the trainer, or that trains if it was added later."""
    with pytest.raises(ValueError, match="this Trainer has two EventLoopCallbacks"):
        host(tmp_path, EventLoopCallback(), EventLoopCallback())
    native = host(tmp_path, EventLoopCallback())
    native.add_callback(EventLoopCallback())
    with pytest.raises(ValueError, match="this Trainer has two EventLoopCallbacks"):
        native.train()


def test_one_bridge_on_two_models(tmp_path: Path) -> None:
    """A bridge whose hooks hold the state of one model is refused for another."""
    bridge = EventLoopCallback(hooks=[EMAHook()])
    host(tmp_path, bridge).train()

    with pytest.raises(ValueError, match="this bridge to Transformers serves the model of its first run"):
        host(tmp_path, bridge).train()


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
    monkeypatch.setattr(f"eventloop.bridges.host.{name}", lambda package: found)
    monkeypatch.delitem(sys.modules, "eventloop.bridges.transformers")

    with pytest.raises(ImportError, match=words):
        importlib.import_module("eventloop.bridges.transformers")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bus": 3}, TypeError, "bus must be a Bus"),
        ({"hooks": EMAHook()}, TypeError, "hooks must be a list"),
        ({"hooks": [OptimizerHook()]}, ValueError, "OptimizerHook does backward and the optimizer's step itself, which Transformers"),
        ({"measure": 1}, TypeError, "measure must be True or False, got 1"),
        ({"work_dir": 3}, TypeError, "work_dir must be a path"),
    ],
)  # fmt: skip
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
