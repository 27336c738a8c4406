"""The bus in a Lightning trainer."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from eventloop import Bus
from eventloop.bridges import host
from eventloop.bridges.lightning import EventLoopCallback
from eventloop.costs.records import RunCosts, read_costs
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook, PreciseBN
from eventloop.hooks.hook import Hook
from eventloop.writers import JSONLWriter
from tests import forked
from tests.support.lightning import Classifier, fit, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more

MakeBridge = Callable[..., EventLoopCallback]


@pytest.fixture
def make_bridge(tmp_path: Path) -> MakeBridge:
    """Make bridges whose files are in the test's directory."""
    return lambda **options: EventLoopCallback(**{"work_dir": tmp_path / "ride", **options})


def rows(bridge: EventLoopCallback, *events: str) -> list[str]:
    """Collect the names of events while they are emitted."""
    seen: list[str] = []
    bridge.bus.subscribe(lambda event: seen.append(type(event).__name__), *events, name="rows")
    return seen


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL writer's file."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def costs(path: Path) -> tuple[RunCosts, dict[str, int]]:
    """The cost record of a run, and the number of calls in each of its rows."""
    record = read_costs(path)
    return record, {row.name: row.calls for row in record.handlers}


# --- the training is Lightning's ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=str
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
        bridge, "before_run", "before_train", "before_train_epoch", "before_train_iter", "after_backward",
        "before_optimizer_step", "after_optimizer_step", "after_train_iter", "before_val", "before_val_iter",
        "after_val_epoch", "after_val", "after_train_epoch", "after_train", "after_run",
    )  # fmt: skip

    fit(tmp_path, bridge, max_epochs=1, limit_train_batches=1, limit_val_batches=1)

    assert seen == [
        "BeforeRun", "BeforeTrain", "BeforeTrainEpoch", "BeforeTrainIter", "AfterBackward",
        "BeforeOptimizerStep", "AfterOptimizerStep", "AfterTrainIter", "BeforeVal", "BeforeValIter",
        "AfterValEpoch", "AfterVal", "AfterTrainEpoch", "AfterTrain", "AfterRun",
    ]  # fmt: skip


def test_handlers_are_given_the_documented_attributes(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Handlers find the model, the optimizer, counters, batch, outputs, and Lightning's own trainer."""
    bridge, model = make_bridge(), Classifier()
    seen: list[tuple[Any, ...]] = []

    @bridge.bus.on("after_train_iter")
    def look(trainer: Any, event: Any) -> None:
        seen.append((trainer.iter, trainer.epoch, trainer.batch[0].shape, sorted(trainer.outputs)))
        assert trainer.model is model
        assert trainer.native.lightning_module is model
        assert trainer.optimizer is trainer.native.optimizers[0]
        assert trainer.work_dir == tmp_path / "ride"

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

    logged = lines(tmp_path / "ride")
    assert [line["step"] for line in logged if "train_loss_step" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in logged if "train_loss_epoch" in line] == [4, 8]
    assert [(line["step"], line["mode"]) for line in logged if "val_acc" in line] == [(4, "val"), (8, "val")]


def test_training_metrics_are_not_read_on_the_training_thread(
    make_bridge: MakeBridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a logger Lightning reads no logged tensor, and neither does the bridge on that thread."""
    reads = {"without": 0, "with": 0}
    read = torch.Tensor.item

    def noted(tensor: torch.Tensor) -> Any:
        reads[which] += threading.current_thread() is threading.main_thread()
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "item", noted)
    which = "without"
    fit(tmp_path, validates=False, log_every_n_steps=1)
    which = "with"
    fit(tmp_path, make_bridge(writers=[JSONLWriter()]), validates=False, log_every_n_steps=1)

    assert reads["with"] == reads["without"]
    assert sum("train_loss_step" in line for line in lines(tmp_path / "ride")) == 8


def test_validation_metrics_are_those_of_the_validation(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`after_val` has the numbers of its own validation, as floats, and none of the training."""
    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(lambda event: seen.append(event.metrics), "after_val")

    trainer = fit(tmp_path, bridge)

    assert [sorted(metrics) for metrics in seen] == [["val_acc", "val_loss"]] * 2
    assert seen[-1]["val_loss"] == trainer.callback_metrics["val_loss"].item()


# --- costs -------------------------------------------------------------------------------------------------


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

    record, calls = costs(tmp_path / "ride")
    assert record.complete
    assert {name: calls.get(name) for name in (
        "Timer.on_train_batch_end", "Busy.on_train_batch_end", "Busy #2.on_train_batch_end",
        "LambdaCallback.on_train_epoch_end", "Hooked.on_train_batch_start", "CSVLogger.log_metrics",
        "Busy.on_train_start", "EventLoopCallback.on_train_batch_end",
    )} == {
        "Timer.on_train_batch_end": 8, "Busy.on_train_batch_end": 16, "Busy #2.on_train_batch_end": None,
        "LambdaCallback.on_train_epoch_end": 2, "Hooked.on_train_batch_start": 8, "CSVLogger.log_metrics": 12,
        "Busy.on_train_start": None, "EventLoopCallback.on_train_batch_end": None,
    }  # fmt: skip
    assert record.phases.iterations == 8
    assert min(record.phases.forward, record.phases.backward, record.phases.optimizer) > 0


def test_measuring_leaves_the_hosts_objects_as_they_were(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The user's profiler measures what it did, and stays as it was, and so do the loggers."""
    profiler, logger = SimpleProfiler(), CSVLogger(tmp_path)

    trainer = fit(tmp_path, make_bridge(), Timer(), profiler=profiler, logger=logger)

    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["[Callback]Timer.on_train_batch_end"]) == 8
    assert not {"start", "stop", "profile"} & set(vars(profiler))
    assert "log_metrics" not in vars(logger)
    assert costs(tmp_path / "ride")[1]["Timer.on_train_batch_end"] == 8


def test_without_measure_there_are_no_rows_of_the_host(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`measure=False` leaves Lightning's callbacks alone."""
    fit(tmp_path, make_bridge(measure=False), Timer())

    assert not [name for name in costs(tmp_path / "ride")[1] if name.startswith("Timer.")]


# --- hooks that ride along, and the host's checkpoints -----------------------------------------------------


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
    assert (tmp_path / "ride" / "epoch_1").exists()


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


# --- ends --------------------------------------------------------------------------------------------------


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
    assert costs(tmp_path / "ride")[0].complete
    assert sum("train_loss_step" in line for line in lines(tmp_path / "ride")) == 2
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("options", [
    {"max_epochs": 0}, {"fast_dev_run": True}, {"limit_train_batches": 0}, {"max_epochs": -1, "max_steps": 3},
    {"overfit_batches": 1}, {"num_sanity_val_steps": 0}, {"val_check_interval": 2},
    {"accumulate_grad_batches": 4, "max_steps": 1, "max_epochs": -1},
], ids=str)  # fmt: skip
def test_each_way_to_train(make_bridge: MakeBridge, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each limit of Lightning ends as without the bridge, with all events closed and no thread left."""
    bridge, threads = make_bridge(writers=[JSONLWriter()]), set(threading.enumerate())
    seen = rows(bridge, "before_run", "before_train_epoch", "before_val", "after_run", "after_train_epoch",
                "after_val")  # fmt: skip

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

    assert seen == ["BeforeTrain", "AfterRun", "BeforeVal", "AfterRun", "BeforeTest", "AfterRun", "BeforeTrain",
                    "AfterRun"]  # fmt: skip
    assert iterations == [4, 5, 6, 7]


# --- copies, and bad input ---------------------------------------------------------------------------------


def test_a_bridge_is_copied_and_pickled_with_its_options(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A copy, or a pickle for another process, is a bridge with the same hooks that has not run."""
    bridge = make_bridge(hooks=[EMAHook()])
    fit(tmp_path, bridge)

    for twin in (copy.deepcopy(bridge), pickle.loads(pickle.dumps(make_bridge(hooks=[EMAHook()])))):
        fit(tmp_path, twin)
        assert isinstance(twin, EventLoopCallback)
        assert isinstance(twin, Callback)
        assert twin.bus is not bridge.bus


def test_a_bus_with_handlers_is_not_copied(make_bridge: MakeBridge) -> None:
    """Handlers would be missing in a copy, so the copy is refused."""
    bridge = make_bridge()
    bridge.bus.subscribe(lambda event: None, "after_run", name="show")

    with pytest.raises(TypeError, match=r"without the handlers of its bus, and show was given to it"):
        copy.deepcopy(bridge)


def test_two_bridges_on_one_trainer(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The trainer refuses a second bridge when it is made, and one that joins later when it begins."""
    with pytest.raises(RuntimeError, match=r"more than one stateful callback of type `EventLoopCallback`"):
        make_trainer(tmp_path, make_bridge(), make_bridge())
    trainer = make_trainer(tmp_path, make_bridge())
    trainer.callbacks.append(make_bridge())
    with pytest.raises(ValueError, match=r"expected one EventLoopCallback in the callbacks.*, got 2"):
        trainer.fit(Classifier(), loader())


def test_hooks_that_own_the_step_are_refused() -> None:
    """A hook that does Lightning's part is an error at the line that makes the bridge."""
    with pytest.raises(ValueError, match=r"OptimizerHook does .* itself, which Lightning does here"):
        EventLoopCallback(hooks=[OptimizerHook()])


@pytest.mark.parametrize(("arguments", "words"), [
    ({"bus": 3}, r"bus must be a Bus, as Bus\(\) makes one, got 3"),
    ({"hooks": "EMAHook"}, r"hooks must be a list, got 'EMAHook'"),
    ({"measure": 1}, r"measure must be True or False, got 1"),
])  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    """Each argument is checked where the bridge is made."""
    with pytest.raises(TypeError, match=words):
        EventLoopCallback(**arguments)


def test_a_lightning_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old version is an error that names the version needed, the one found, and the extra."""
    monkeypatch.setattr(host, "version", lambda _: "1.9.5")
    with pytest.raises(ImportError, match=r"needs lightning>=2\.4, got 1\.9\.5: pip install .*\[lightning\]"):
        EventLoopCallback()


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


def test_a_module_without_an_optimizer(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A module that returns no optimizer is trained as without the bridge, and the trainer has none."""

    class Without(Classifier):
        def configure_optimizers(self) -> None:
            return None

    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(lambda trainer, event: seen.append(trainer.optimizer), "before_train")

    fit(tmp_path, bridge, model=Without())

    assert seen == [None]


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
    assert costs(tmp_path / "ride")[0].complete
    assert sum("train_loss_step" in line for line in lines(tmp_path / "ride")) == 1


@pytest.mark.slow
def test_the_other_package(tmp_path: Path) -> None:
    """A program of `pytorch_lightning` trains with the bridge, and one with both packages can use either."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    program = f"""
        import {{first}}
        from pytorch_lightning import Trainer
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.demos.boring_classes import BoringModel
        from eventloop.bridges.lightning import EventLoopCallback
        bridge, seen = EventLoopCallback(work_dir={str(tmp_path)!r}), []
        assert isinstance(bridge, Callback)
        bridge.bus.subscribe(lambda event: seen.append(event.iter), "after_train_iter")
        Trainer(max_steps=2, callbacks=[bridge], logger=False, enable_checkpointing=False, accelerator="cpu",
                default_root_dir={str(tmp_path)!r}).fit(BoringModel())
        assert seen == [0, 1]
    """
    for first in ("pytorch_lightning", "lightning.pytorch"):
        text = textwrap.dedent(program.format(first=first))
        ran = forked.run(["-c", text], env={**os.environ, "PYTHONPATH": forked.ROOT})
        assert ran.returncode == 0, ran.stderr
