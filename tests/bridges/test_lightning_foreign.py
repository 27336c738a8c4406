"""Lightning's callbacks in this trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    Timer,
    TQDMProgressBar,
)

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.checkpoint import CheckpointError
from eventloop.costs.records import read_costs
from tests.support.class_tables import classes_named
from tests.support.internals import substitute
from tests.support.lightning import Classifier, fit
from tests.support.trainers import batches, tiny_model

EMAWeightAveraging: Any = getattr(pl_callbacks, "EMAWeightAveraging", None)  # of Lightning 2.6
WeightAveraging: Any = getattr(pl_callbacks, "WeightAveraging", None)
averages = pytest.mark.skipif(EMAWeightAveraging is None, reason="this Lightning has no EMAWeightAveraging")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of much

RunWith = Callable[..., Trainer]


@pytest.fixture
def run_with(tmp_path: Path) -> RunWith:
    """Train with Lightning's callbacks for two epochs, and return the trainer."""

    def run(*callbacks: Any, train: bool = True, model: nn.Module | None = None, **options: Any) -> Trainer:
        model = model or tiny_model()
        arguments = {
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "loss_fn": F.cross_entropy,
            "train_loader": batches(4),
            "val_loader": batches(2),
            "max_epochs": 2,
            "writers": [],
            "work_dir": tmp_path / "run",
            **options,
        }
        trainer = Trainer(model, hooks=[Foreign(each) for each in callbacks], **arguments)
        if train:
            trainer.train()
        return trainer

    return run


METHODS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


class Ends(Callback):  # type: ignore[misc]
    """Write down the first and the last call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append(("setup", stage))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append(("teardown", stage))


def _recording(method: str) -> Callable[..., None]:
    def record(self: Ends, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        stage = "val" if trainer.validating else "train"
        shapes = [tuple(a[0].shape) for a in arguments if isinstance(a, list | tuple)]
        self.calls.append((method, trainer.current_epoch, trainer.global_step, stage, shapes))

    return record


Recorder: Any = type("Recorder", (Ends,), {method: _recording(method) for method in METHODS})
"""A callback that writes down each call, with the counters of Lightning's trainer."""


def test_methods_are_called_as_in_lightning(run_with: RunWith, tmp_path: Path) -> None:
    """Each method is called in Lightning's order, with its counters, stage and batches."""
    native, here = Recorder(), Recorder()

    fit(tmp_path, native, num_sanity_val_steps=0)
    run_with(here)

    assert here.calls == native.calls


def test_each_method_is_a_subscription_with_a_row(run_with: RunWith, tmp_path: Path) -> None:
    """Each method that a callback defines has its name in the plan and in the costs."""
    trainer = run_with(EarlyStopping("loss"))

    plan = str(trainer.bus)
    rows = {row.name: row.calls for row in read_costs(tmp_path / "run").handlers}
    assert "EarlyStopping.on_validation_end (lightning)" in plan
    assert "EarlyStopping.on_train_batch_end" not in plan
    assert rows["EarlyStopping.on_validation_end (lightning)"] == 2


def test_a_priority_is_that_of_all_methods(run_with: RunWith) -> None:
    """A given priority places every method of the callback."""
    trainer = run_with(train=False)
    callback = Foreign(Timer(), priority="VERY_LOW")
    trainer = Trainer(
        trainer.model,
        loss_fn=F.cross_entropy,
        optimizer=trainer.optimizer,
        train_loader=batches(1),
        max_epochs=1,
        hooks=[callback],
        work_dir=trainer.work_dir,
        writers=[],
    )

    rows = trainer.bus.plan("after_train_iter")
    assert next(row.priority for row in rows if row.name.startswith("Timer.on_train_batch_end")) == 90


# --- the effect of each class ------------------------------------------------------------------------------


def test_early_stopping_stops(run_with: RunWith) -> None:
    """EarlyStopping stops the run after its patience, with its name in the reason."""
    stopping = EarlyStopping("loss", patience=1, min_delta=9.0)

    trainer = run_with(stopping, max_epochs=9)

    assert (trainer.epoch, stopping.stopped_epoch) == (2, 1)
    assert trainer.stop_reason == "EarlyStopping of Lightning set trainer.should_stop"


@pytest.mark.parametrize("interval", [2, 3])
def test_early_stopping_counts_the_validations(run_with: RunWith, interval: int) -> None:
    """Where epochs have no validation, EarlyStopping waits for the next one."""
    stopping = EarlyStopping("loss", patience=1, min_delta=9.0)

    trainer = run_with(stopping, max_epochs=9, val_interval=interval)

    assert trainer.epoch == 2 * interval


def test_early_stopping_without_a_validation(run_with: RunWith) -> None:
    """Without a validation the training's own numbers can be monitored."""
    trainer = run_with(EarlyStopping("loss", patience=1, min_delta=9.0), max_epochs=9, val_loader=None)

    assert trainer.epoch == 2


def test_timer_stops(run_with: RunWith) -> None:
    """A Timer whose time is over stops the run."""
    trainer = run_with(Timer(duration={"seconds": 0}))

    assert trainer.iter == 0
    assert trainer.stop_reason == "Timer of Lightning set trainer.should_stop"


def test_learning_rates_reach_the_metrics(run_with: RunWith) -> None:
    """LearningRateMonitor logs to this trainer's metrics."""
    trainer = run_with(LearningRateMonitor(), train_loader=batches(12))

    assert trainer.metrics.latest()["lr-SGD"].value == 0.1


def test_device_stats_reach_the_metrics(run_with: RunWith) -> None:
    """DeviceStatsMonitor logs to this trainer's metrics."""
    pytest.importorskip("psutil", reason="DeviceStatsMonitor needs psutil, which is not installed")
    trainer = run_with(DeviceStatsMonitor(cpu_stats=True), train_loader=batches(12))

    assert "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in trainer.metrics.latest()


def test_lambdas_are_called(run_with: RunWith) -> None:
    """A LambdaCallback has the methods that it was given."""
    seen: list[int] = []

    run_with(LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.current_epoch)))

    assert seen == [0, 1]


@averages
@pytest.mark.parametrize(
    "make", [lambda: EMAWeightAveraging(decay=0.5), lambda: WeightAveraging()], ids=["EMA", "mean"]
)
def test_average_is_lightnings(run_with: RunWith, tmp_path: Path, make: Callable[[], Any]) -> None:
    """EMAWeightAveraging and WeightAveraging end with the weights that they have in Lightning's own trainer."""
    native, here = Classifier(), Classifier()
    native.model[2].p = here.model[2].p = 0.0

    fit(tmp_path, make(), model=native)
    run_with(make(), model=here.model)

    assert all(torch.equal(a, b) for a, b in zip(native.parameters(), here.parameters(), strict=True))


@averages
def test_average_is_in_checkpoints(run_with: RunWith, tmp_path: Path) -> None:
    """A resumed run has the average of the uninterrupted one."""

    def model() -> Any:
        made: Any = tiny_model()
        made[2].p = 0.0
        return made

    whole = run_with(EMAWeightAveraging(decay=0.5), model=model(), work_dir=tmp_path / "whole")
    run_with(EMAWeightAveraging(decay=0.5), model=model(), max_epochs=1)
    rest = run_with(EMAWeightAveraging(decay=0.5), model=model(), train=False)
    rest.resume("auto")
    rest.train()

    pairs = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_pruning_is_lightnings(run_with: RunWith, tmp_path: Path) -> None:
    """ModelPruning leaves as many zeros as in Lightning's own trainer."""
    native, here = Classifier(), tiny_model()

    fit(tmp_path, ModelPruning("l1_unstructured", amount=0.5), model=native)
    run_with(ModelPruning("l1_unstructured", amount=0.5), model=here)

    zeros = [sum(int((p == 0).sum()) for p in m.parameters()) for m in (native, here)]
    assert zeros[0] == zeros[1] > 0


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (TQDMProgressBar(), "Epoch 1: 100%"),
        (RichProgressBar(), "Epoch 1/1"),
        (ModelSummary(), "Total params"),
        (RichModelSummary(), "Total params"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_callbacks_that_print(
    run_with: RunWith,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    callback: Any,
    words: str,
) -> None:
    """Progress bars and summaries print as in Lightning."""
    run_with(callback)

    printed = capsys.readouterr()
    assert words in printed.out + printed.err + caplog.text


# --- callbacks that change the optimizer or end the run ----------------------------------------------------


class TwoParts(nn.Module):
    """A model with the backbone that BackboneFinetuning needs."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = tiny_model()
        self.backbone, self.head = layers[0], layers[3]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.relu(self.backbone(inputs)))
        return out


class TwoPartsNatively(Classifier):
    """The same model as a LightningModule, which first trains its head alone."""

    def __init__(self) -> None:
        super().__init__()
        parts = TwoParts()
        del self.model
        self.backbone, self.head = parts.backbone, parts.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return TwoParts.forward(cast(Any, self), inputs)

    def configure_optimizers(self) -> Any:
        return head_alone(self)


def head_alone(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)


class Unfreezes(BaseFinetuning):  # type: ignore[misc]
    """A finetuning of one's own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


def backbone() -> Any:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


@pytest.mark.parametrize("make", [backbone, Unfreezes], ids=["BackboneFinetuning", "BaseFinetuning"])
def test_finetuning_is_lightnings(run_with: RunWith, tmp_path: Path, make: Callable[[], Any]) -> None:
    """A finetuning ends with the weights, and the rates of each group, that it has in Lightning's own trainer."""
    native, here = TwoPartsNatively(), TwoParts()
    start = here.backbone.weight.clone()
    optimizer = head_alone(here)

    theirs = fit(tmp_path, make(), model=native, max_epochs=4)
    run_with(make(), model=here, optimizer=optimizer, max_epochs=4)

    assert all(torch.equal(a, b) for a, b in zip(native.parameters(), here.parameters(), strict=True))
    assert not torch.equal(here.backbone.weight, start)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in theirs.optimizers[0].param_groups]
    assert len(rates) == 2


class UnfreezesLate(Unfreezes):
    """A finetuning that unfreezes after three epochs."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        super().finetune_function(pl_module, epoch - 2, optimizer)


def test_a_resume_before_the_unfreezing(run_with: RunWith, tmp_path: Path) -> None:
    """A run resumed before its unfreezing ends as the uninterrupted one, with the rates of its schedule."""

    def run(epochs: int, folder: str, resumes: bool = False) -> tuple[TwoParts, list[float]]:
        model = TwoParts()
        optimizer = head_alone(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer = run_with(
            UnfreezesLate(),
            model=model,
            optimizer=optimizer,
            schedulers=[schedule],
            max_epochs=epochs,
            train=False,
            work_dir=tmp_path / folder,
        )
        if resumes:
            trainer.resume("auto")
        trainer.train()
        return model, [group["lr"] for group in optimizer.param_groups]

    whole, rates = run(5, "whole")
    run(2, "parts")
    resumed, found = run(5, "parts", resumes=True)

    assert found == rates
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_resume_after_the_unfreezing(run_with: RunWith) -> None:
    """A checkpoint with the group that a finetuning added is refused by an optimizer without it."""
    first, second = TwoParts(), TwoParts()
    run_with(Unfreezes(), model=first, optimizer=head_alone(first))

    trainer = run_with(Unfreezes(), model=second, optimizer=head_alone(second), max_epochs=3, train=False)

    gone = r"parameters of the optimizer: \['backbone\.weight', 'backbone\.bias'\] in the checkpoint, \[\] in this"
    with pytest.raises(CheckpointError, match=gone):
        trainer.resume("auto")


def spiking(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A loss that is a hundred times as large in the seventh iteration."""
    count = 0

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += model.training
        return F.cross_entropy(scores, target) * (100 if count == 7 else 1)

    return loss


class Spiking(Classifier):
    """The classifier with that loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = spiking(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self(batch[0]), batch[1])


def test_a_spike_ends_the_run(run_with: RunWith, tmp_path: Path) -> None:
    """SpikeDetection raises its error and writes the batches to skip, as in Lightning's own trainer."""
    native, here, model = SpikeDetection(window=2), SpikeDetection(window=2), tiny_model()

    with pytest.raises(RuntimeError, match="Training spike detected in batch 2"):
        fit(tmp_path / "native", native, model=Spiking())
    with pytest.raises(RuntimeError, match="Training spike detected in batch 2"):
        run_with(here, model=model, loss_fn=spiking(model))

    skipped = [(tmp_path / name / "skip_batches.json").read_text() for name in ("native", "run")]
    assert skipped[0] == skipped[1]
    assert here.bad_batches == native.bad_batches == [1, 2]


def test_a_resume_without_the_state_of_a_spike(run_with: RunWith) -> None:
    """A run with SpikeDetection, whose state Lightning itself cannot load, is resumed under another name."""
    run_with(SpikeDetection(warmup=100))
    model = tiny_model()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn=F.cross_entropy,
        train_loader=batches(4),
        val_loader=batches(2),
        max_epochs=3,
        writers=[],
        work_dir=run_with(train=False).work_dir,
        hooks=[Foreign(SpikeDetection(warmup=100), name="another")],
    )

    trainer.resume("auto")
    trainer.train()

    assert trainer.epoch == 3


def test_a_spike_of_one_rank(run_with: RunWith, monkeypatch: pytest.MonkeyPatch) -> None:
    """SpikeDetection is refused in a run of several processes, where each rank would decide alone."""
    substitute(monkeypatch, "data_ranks.rank_and_world_size", lambda: (0, 2))

    with pytest.raises(
        ValueError, match=r"SpikeDetection of Lightning needs a run of one process, got one of 2"
    ):
        run_with(SpikeDetection(), train=False)


class OwnBar(ProgressBar):  # type: ignore[misc]
    """A progress bar that notes what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.seen.append((self.total_train_batches, self.total_val_batches, self.train_description))


@pytest.mark.parametrize("validates", [True, False])
def test_a_bar_of_ones_own(run_with: RunWith, tmp_path: Path, validates: bool) -> None:
    """A subclass of ProgressBar gets the totals that it gets in Lightning's own trainer."""
    native, here = OwnBar(), OwnBar()

    fit(tmp_path, native, enable_progress_bar=True, validates=validates)
    run_with(here, val_loader=batches(2) if validates else None)

    assert here.seen == native.seen


def test_states_are_in_checkpoints(run_with: RunWith) -> None:
    """A resumed run goes on with the state of a callback."""
    first = EarlyStopping("loss", patience=3, min_delta=9.0)
    run_with(first)
    second = EarlyStopping("loss", patience=3, min_delta=9.0)
    trainer = run_with(second, train=False, max_epochs=9)

    trainer.resume("auto")
    trainer.train()

    assert (first.wait_count, second.wait_count, trainer.epoch) == (1, 3, 4)


def test_an_error_is_told(run_with: RunWith) -> None:
    """`on_exception` is called with the error, and `on_train_end` is not."""
    seen: list[Any] = []
    error = RuntimeError("no")

    def fail(model: Any, batch: Any) -> Any:
        raise error

    callback = LambdaCallback(
        on_exception=lambda t, m, e: seen.append(e), on_train_end=lambda *_: seen.append("end")
    )
    with pytest.raises(RuntimeError, match="no"):
        run_with(callback, loss_fn=None, train_step=fail)

    assert seen == [error]


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: pl_callbacks.GradientAccumulationScheduler({0: 2}),
            "use hooks=.GradientCumulativeOptimizerHook",
        ),
        (lambda: pl_callbacks.LearningRateFinder(), "LearningRateFinder needs Lightning's own loop"),
        (lambda: pl_callbacks.BatchSizeFinder(), "BatchSizeFinder needs Lightning's own loop"),
        (lambda: pl_callbacks.StochasticWeightAveraging(0.1), "use hooks=.EMAHook"),
        (
            lambda: pl_callbacks.BasePredictionWriter(),
            r"BasePredictionWriter needs Lightning's own loop.*use trainer.predict",
        ),
        (lambda: pl_callbacks.Checkpoint(), "Checkpoint needs Lightning's own loop"),
        (
            lambda: pl_callbacks.ModelCheckpoint(),
            "ModelCheckpoint needs Lightning's own loop.*use hooks=.CheckpointHook",
        ),
        (lambda: pl_callbacks.OnExceptionCheckpoint("."), "OnExceptionCheckpoint needs Lightning's own loop"),
        (lambda: pl_callbacks.ThroughputMonitor(len), "ThroughputMonitor needs Lightning's own loop"),
        (
            lambda: LambdaCallback(on_before_zero_grad=print),
            "LambdaCallback defines on_before_zero_grad, which would never",
        ),
    ],
)
def test_callbacks_without_an_effect_are_refused(make: Callable[[], Any], words: str) -> None:
    """A callback that steers Lightning's loop is an error that names its class and what serves here."""
    with pytest.raises(ValueError, match=words):
        Foreign(make())


def test_an_object_of_lightning_that_is_no_callback() -> None:
    """A LightningModule is no callback."""
    with pytest.raises(
        TypeError, match="takes a callback of Lightning, got Classifier, which does not derive from Callback"
    ):
        Foreign(Classifier())


def test_a_name_that_is_no_text() -> None:
    """The name of a callback's state is a str."""
    with pytest.raises(TypeError, match=r"name must be a str, .* got 3"):
        Foreign(LambdaCallback(), name=cast(Any, 3))


def test_every_class_is_in_a_table() -> None:
    """Each callback class that Lightning exports is in a table of the page, as one that works or is refused."""
    assert set(pl_callbacks.__all__) - classes_named("lightning.md") == set()
