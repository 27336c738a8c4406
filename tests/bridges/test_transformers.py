"""The bus inside the loop of a Transformers trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from transformers import TrainerCallback

from eventloop.bridges.transformers import EventLoopCallback
from eventloop.costs.records import read_costs
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter
from tests.support.reading import watch_reads
from tests.support.transformers_host import TinyModel, host, lines, record, rows, same

pytestmark = pytest.mark.usefixtures("no_thread_left")


# --- events ---------------------------------------------------------------------------------------------------


def test_events_of_a_training(tmp_path: Path) -> None:
    """An update of two batches is an iteration; the host's validation follows the epoch's end."""
    bridge = EventLoopCallback()
    seen = record(bridge)

    host(
        tmp_path,
        bridge,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        eval_dataset=rows(8),
    ).train()

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


def test_events_name_the_data_set(tmp_path: Path) -> None:
    """The events of an evaluation of several data sets have the name of each, and count its batches."""
    bridge, seen = EventLoopCallback(), []
    bridge.bus.subscribe(lambda event: seen.append((event.loader, event.batch_idx)), "after_val_iter")
    native = host(tmp_path, bridge, eval_dataset={"a": rows(16), "b": rows(8)})

    native.evaluate()
    native.evaluate(rows(8))

    assert seen == [("a", 0), ("a", 1), ("b", 0), ("", 0)]


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
        "BeforeTest",
        "BeforeTestEpoch",
        "AfterTestIter",
        "AfterTestEpoch",
        "AfterTest",
    ]


def test_evaluations_outside_of_a_training_are_runs(tmp_path: Path) -> None:
    """`evaluate` and `predict` alone are runs without a training, with the counters of the training before."""
    bridge = EventLoopCallback(writers=[JSONLWriter()])
    seen = record(bridge)
    native = host(tmp_path, bridge, eval_dataset={"a": rows(8), "b": rows(4)}, num_train_epochs=1)

    native.evaluate()
    native.train()
    before, _ = len(seen), native.evaluate()
    native.predict(rows(4))

    val = ["BeforeVal", "BeforeValEpoch", "AfterValIter", "AfterValIter", "AfterValEpoch", "AfterVal"]
    test = ["BeforeTest", "BeforeTestEpoch", "AfterTestIter", "AfterTestEpoch", "AfterTest"]
    assert seen[:8] == [(name, 0, 0) for name in ("BeforeRun", *val, "AfterRun")]
    assert seen[before:] == [
        (name, 4, 1) for name in ("BeforeRun", *val, "AfterRun", "BeforeRun", *test, "AfterRun")
    ]
    logged = [
        (line["mode"], line["step"]) for line in lines(tmp_path) if {"eval_a_loss", "test_loss"} & {*line}
    ]
    assert [each for each in logged if each[0] != "train"] == [("val", 0), ("val", 4), ("test", 4)]


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


def test_the_epoch_is_written_once(tmp_path: Path) -> None:
    """A line has the epoch of its event; the one that the host adds to its logs becomes no metric."""
    native = host(
        tmp_path, EventLoopCallback(writers=[JSONLWriter()]), eval_strategy="epoch", eval_dataset=rows(8)
    )
    native.train()

    assert all("epoch" in entry for entry in native.state.log_history)
    names = [name for line in lines(tmp_path) for name in line if name.endswith("epoch")]
    assert "epoch" in names
    assert not [name for name in names if name not in ("epoch", "max_epochs")]


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


# --- the host trains as without it ----------------------------------------------------------------------------


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


# --- costs ----------------------------------------------------------------------------------------------------


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
    """Each method that a callback defines has a row, with all its calls and all the seconds of its own clock."""
    first, second = Busy(), Busy()
    native = host(tmp_path, EventLoopCallback(), first, second)

    began = perf_counter()
    native.train()
    wall = perf_counter() - began

    costs = {(row.name, row.event): row for row in read_costs(tmp_path).handlers}
    assert costs["DefaultFlowCallback.on_step_end", "on_step_end"].calls == 8
    assert costs["PrinterCallback.on_log", "on_log"].calls == 5
    assert costs["Busy.on_train_end", "on_train_end"].calls == 1
    for busy, name in ((first, "Busy.on_step_end"), (second, "Busy #2.on_step_end")):
        row = costs[name, "on_step_end"]
        assert row.calls == len(busy.seconds)
        assert sum(busy.seconds) <= row.seconds <= wall


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
    assert not {"training_step", "get_batch_samples"} & set(vars(native))
    assert set(vars(native.accelerator)) == before[2]
