"""The bus in a Lightning trainer: events, numbers and costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter
from tests.support.lightning import (
    Classifier,
    MakeBridge,
    costs,
    fit,
    lines,
    loader,
    make_trainer,
    rows,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_weights_are_those_without_the_bridge(
    make_bridge: MakeBridge, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A training with the bridge and hooks ends with bitwise the weights of one without."""
    alone, ridden = Classifier(), Classifier()

    fit(tmp_path, model=alone, **options)
    fit(tmp_path, make_bridge(hooks=[EMAHook()], writers=[JSONLWriter()]), model=ridden, **options)

    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), ridden.parameters(), strict=True))


def test_order_of_events(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Lightning validates before it ends the epoch; all else is as in `train()`."""
    bridge = make_bridge()
    seen = rows(
        bridge,
        "before_run",
        "before_train",
        "before_train_epoch",
        "before_train_iter",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        "after_train_iter",
        "before_val",
        "before_val_iter",
        "after_val_epoch",
        "after_val",
        "after_train_epoch",
        "after_train",
        "after_run",
    )

    fit(tmp_path, bridge, max_epochs=1, limit_train_batches=1, limit_val_batches=1)

    assert seen == [
        "BeforeRun",
        "BeforeTrain",
        "BeforeTrainEpoch",
        "BeforeTrainIter",
        "AfterBackward",
        "BeforeOptimizerStep",
        "AfterOptimizerStep",
        "AfterTrainIter",
        "BeforeVal",
        "BeforeValIter",
        "AfterValEpoch",
        "AfterVal",
        "AfterTrainEpoch",
        "AfterTrain",
        "AfterRun",
    ]


def test_handlers_are_given_the_documented_attributes(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Handlers find the model, the optimizer, counters, batch, outputs, and Lightning's own trainer."""
    bridge, model = make_bridge(), Classifier()
    seen: list[tuple[Any, ...]] = []

    @bridge.bus.on("after_train_iter")
    def inspect(trainer: Any, event: Any) -> None:
        seen.append((trainer.iter, trainer.epoch, trainer.batch[0].shape, sorted(trainer.outputs)))
        assert trainer.model is model
        assert trainer.native.lightning_module is model
        assert trainer.optimizer is trainer.native.optimizers[0]
        assert trainer.work_dir == tmp_path / "attachment"

    fit(tmp_path, bridge, model=model)

    assert seen[0] == (0, 0, (4, 2), ["loss"])
    assert [row[:2] for row in seen] == [(i, i // 4) for i in range(8)]


def test_an_iteration_is_a_batch_when_gradients_accumulate(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """With accumulation each batch is an iteration, and optimizer steps are fewer."""
    bridge = make_bridge()
    iterations, steps = rows(bridge, "after_train_iter"), []
    bridge.bus.subscribe(lambda event: steps.append(event.iter), "after_optimizer_step")

    fit(tmp_path, bridge, accumulate_grad_batches=2)

    assert len(iterations) == 8
    assert steps == [1, 3, 5, 7]


def test_a_batch_of_none_is_an_iteration(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Lightning makes no step with it and goes on; the bridge counts it, as Lightning does."""
    bridge = make_bridge()
    seen: list[tuple[int, bool]] = []

    @bridge.bus.on("after_train_iter")
    def inspect(trainer: Any, event: Any) -> None:
        seen.append((event.iter, trainer.batch is None))

    (batch,) = loader(1)
    batches: DataLoader[int] = DataLoader(range(4), collate_fn=lambda rows: None if rows == [2] else batch)  # type: ignore[arg-type]
    make_trainer(tmp_path, bridge, max_epochs=1).fit(Classifier(), batches)

    assert seen == [(0, False), (1, False), (2, True), (3, False)]


def test_a_handler_stops_the_host(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`trainer.stop` sets Lightning's `should_stop`, and its reason is that of the closing events."""
    bridge, reasons = make_bridge(), []
    bridge.bus.subscribe(lambda t, e: t.stop("enough") if e.iter == 1 else None, "after_train_iter", name="s")
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_train_epoch", "after_train")

    trainer = fit(tmp_path, bridge)

    assert trainer.global_step == 2
    assert reasons == ["enough", "enough"]


def test_a_stop_of_the_host_is_the_reason(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A run that a callback of Lightning stops says so in its closing events."""
    bridge, reasons = make_bridge(), []
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_run")

    fit(tmp_path, bridge, EarlyStopping("val_loss", patience=0, min_delta=9.0), max_epochs=9)

    assert reasons == ["trainer.should_stop of Lightning"]


def test_an_event_that_lightning_never_has_is_refused(make_bridge: MakeBridge) -> None:
    """A subscription to such an event is an error where it is made."""
    with pytest.raises(ValueError, match=r"optimizer_step_skipped, which this bus never has: Lightning does"):
        make_bridge().bus.subscribe(print, "optimizer_step_skipped")


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logs", [False, True])
def test_what_the_host_logs(make_bridge: MakeBridge, tmp_path: Path, logs: bool) -> None:
    """`self.log` becomes `scalars_logged` at Lightning's interval, with and without a logger of Lightning."""
    logger = CSVLogger(tmp_path) if logs else False

    fit(tmp_path, make_bridge(writers=[JSONLWriter()]), logger=logger, log_every_n_steps=2)

    logged = lines(tmp_path / "attachment")
    assert [line["step"] for line in logged if "train_loss_step" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in logged if "train_loss_epoch" in line] == [4, 8]
    assert [(line["step"], line["mode"]) for line in logged if "val_acc" in line] == [(4, "val"), (8, "val")]


@pytest.mark.parametrize("logs", [False, True])
def test_a_number_of_each_batch_of_a_validation(make_bridge: MakeBridge, tmp_path: Path, logs: bool) -> None:
    """A number that `validation_step` logs by `on_step` has one value at a step, that of the whole validation."""

    class EachBatch(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("number", float(batch_idx), on_step=True)

    logger = CSVLogger(tmp_path) if logs else False
    fit(tmp_path, make_bridge(writers=[JSONLWriter()]), model=EachBatch(), logger=logger, log_every_n_steps=1)

    logged = [line for line in lines(tmp_path / "attachment") if line.get("mode") == "val"]
    assert [(line["step"], line["number"], line["number_epoch"]) for line in logged] == [
        (4, 0.5, 0.5),
        (8, 0.5, 0.5),
    ]
    assert not any("number_step" in line for line in logged)


def test_training_metrics_are_not_read_on_the_training_thread(
    make_bridge: MakeBridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a logger Lightning reads no logged tensor, and neither does the bridge on that thread."""
    reads = {"without": 0, "with": 0}
    read = torch.Tensor.item

    def counted(tensor: torch.Tensor) -> Any:
        reads[which] += threading.current_thread() is threading.main_thread()
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    which = "without"
    fit(tmp_path, validates=False, log_every_n_steps=1)
    which = "with"
    fit(tmp_path, make_bridge(writers=[JSONLWriter()]), validates=False, log_every_n_steps=1)

    assert reads["with"] == reads["without"]
    assert sum("train_loss_step" in line for line in lines(tmp_path / "attachment")) == 8


def test_validation_metrics_are_those_of_the_validation(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`after_val` has the numbers of its own validation, as floats, and none of the training."""
    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(lambda event: seen.append(event.metrics), "after_val")

    trainer = fit(tmp_path, bridge)

    assert [sorted(metrics) for metrics in seen] == [["val_acc", "val_loss"]] * 2
    assert seen[-1]["val_loss"] == trainer.callback_metrics["val_loss"].item()


# --- costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaders", "names"),
    [
        (lambda: loader(1), [""]),
        (lambda: [loader(1), loader(1)], ["dataloader_idx_0", "dataloader_idx_1"]),
        (lambda: {"clean": loader(1), "noisy": loader(2)}, ["clean", "noisy", "noisy"]),
        (lambda: CombinedLoader({"clean": loader(1), "noisy": loader(1)}, "min_size"), [""]),
    ],
    ids=["one", "a list", "a dict", "side by side"],
)
def test_events_name_the_loader(
    make_bridge: MakeBridge, tmp_path: Path, loaders: Callable[[], Any], names: list[str]
) -> None:
    """The events of an evaluation with several loaders have the loader's name, as `val_loader=dict(...)` here."""
    bridge = make_bridge()
    seen: list[str] = []
    bridge.bus.subscribe(
        lambda event: seen.append(event.loader), "before_val_iter", "after_val_iter", name="seen"
    )

    make_trainer(tmp_path, bridge).validate(AnyBatch(), loaders(), verbose=False)

    assert seen == [name for name in names for _ in range(2)]


class AnyBatch(Classifier):
    """A module whose validation takes batches of any form, and of any loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


class Busy(Callback):  # type: ignore[misc]
    """A callback that takes time, with a clock of its own."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing."""


def test_each_callback_hook_and_logger_has_a_row(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Callbacks, hooks of the module and loggers have rows by class and hook; hooks nobody defines have none."""

    class Hooked(Classifier):
        def on_train_batch_start(self, *_: Any) -> None:
            """Nothing."""

    callbacks = [Timer(), make_bridge(), Busy(), Busy(), LambdaCallback(on_train_epoch_end=lambda *_: None)]

    fit(tmp_path, *callbacks, model=Hooked(), logger=CSVLogger(tmp_path), log_every_n_steps=1)

    record, calls = costs(tmp_path / "attachment")
    assert record.complete
    assert {
        name: calls.get(name)
        for name in (
            "Timer.on_train_batch_end",
            "Busy.on_train_batch_end",
            "Busy #2.on_train_batch_end",
            "LambdaCallback.on_train_epoch_end",
            "Hooked.on_train_batch_start",
            "CSVLogger.log_metrics",
            "Busy.on_train_start",
            "EventLoopCallback.on_train_batch_end",
        )
    } == {
        "Timer.on_train_batch_end": 8,
        "Busy.on_train_batch_end": 8,
        "Busy #2.on_train_batch_end": 8,
        "LambdaCallback.on_train_epoch_end": 2,
        "Hooked.on_train_batch_start": 8,
        "CSVLogger.log_metrics": 12,
        "Busy.on_train_start": None,
        "EventLoopCallback.on_train_batch_end": None,
    }
    assert record.phases.iterations == 8
    assert min(record.phases.forward, record.phases.backward, record.phases.optimizer) > 0


def named_timer() -> Callback:
    """A callback whose class has the name of one of Lightning's."""

    class Timer(Busy):
        """A class of the program."""

    Timer.__qualname__ = "Timer"
    return Timer()


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        (
            lambda: [LambdaCallback(on_train_batch_end=nothing), LambdaCallback(on_train_epoch_end=nothing)],
            {"LambdaCallback.on_train_batch_end": 8, "LambdaCallback #2.on_train_epoch_end": 2},
        ),
        (
            lambda: [EarlyStopping("val_loss", patience=9), EarlyStopping("val_acc", patience=9)],
            {"EarlyStopping.on_validation_end": 3, "EarlyStopping #2.on_validation_end": 3},
        ),
        (
            lambda: [Timer(), named_timer()],
            {"Timer.on_train_batch_end": 8, "Timer.on_train_start": 1, "Timer #2.on_train_batch_end": 8},
        ),
        (lambda: [Busy()] * 2, {"Busy.on_train_batch_end": 16}),
    ],
    ids=["one state key", "two state keys", "two classes of one name", "the same object"],
)
def test_callbacks_of_one_class_have_rows_of_their_own(
    make_bridge: MakeBridge, tmp_path: Path, callbacks: Callable[[], list[Callback]], expected: dict[str, int]
) -> None:
    """The second callback of a class has rows with its number, and each has only its own methods and calls."""
    given = callbacks()
    before = [overridden(each) for each in given]

    fit(tmp_path, make_bridge(), *given)

    calls = costs(tmp_path / "attachment")[1]
    methods = tuple(name.rpartition(".")[2] for name in expected)
    classes = tuple(type(each).__name__ for each in given)
    assert {
        name: count for name, count in calls.items() if name.startswith(classes) and name.endswith(methods)
    } == expected
    assert [overridden(each) for each in given] == before


def overridden(callback: Callback) -> dict[str, Any]:
    """The methods that the object has, apart from its class."""
    return {name: value for name, value in vars(callback).items() if name.startswith("on_")}


def nothing(*_: Any) -> None:
    """Do nothing."""


def test_measuring_leaves_the_hosts_objects_as_they_were(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The user's profiler measures what it did, and stays as it was, and so do the loggers."""
    profiler, logger = SimpleProfiler(), CSVLogger(tmp_path)

    trainer = fit(tmp_path, make_bridge(), Timer(), profiler=profiler, logger=logger)

    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["[Callback]Timer.on_train_batch_end"]) == 8
    assert not {"start", "stop", "profile"} & set(vars(profiler))
    assert "log_metrics" not in vars(logger)
    assert costs(tmp_path / "attachment")[1]["Timer.on_train_batch_end"] == 8


def test_without_measure_there_are_no_rows_of_the_host(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`measure=False` leaves Lightning's callbacks alone."""
    fit(tmp_path, make_bridge(measure=False), Timer())

    assert not [name for name in costs(tmp_path / "attachment")[1] if name.startswith("Timer.")]
