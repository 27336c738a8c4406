"""The bus in a runner of MMEngine."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

with warnings.catch_warnings():  # of torch.jit, when torch.distributed.optim is imported
    warnings.simplefilter("ignore")
    import mmengine.runner

import mmengine.hooks
from mmengine.evaluator import BaseMetric
from mmengine.hooks import IterTimerHook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader, default_collate

from eventloop import Bus
from eventloop.bridges.mmengine import EventLoopHook
from eventloop.costs.records import read_costs
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.trainers import samples, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind


class Model(BaseModel):  # type: ignore[misc]
    """The tiny model with MMEngine's interface."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_model()

    def forward(self, inputs: Any, target: Any, mode: str = "tensor") -> Any:
        out = self.net(inputs)
        if mode == "loss":
            return {"loss": F.cross_entropy(out, target)}
        return [{"right": float((out.argmax(1) == target).float().mean())}]


class Accuracy(BaseMetric):  # type: ignore[misc]
    """The mean of what the model says."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [sample["right"] for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(samples(count * 4), batch_size=4, collate_fn=default_collate)


def runner(work_dir: Path, *hooks: Any, epochs: int = 2, **changes: Any) -> Runner:
    """A small training as MMEngine's documentation writes it."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Model(),
        "work_dir": str(work_dir / "mm"),
        "train_dataloader": loader(4),
        "train_cfg": {"by_epoch": True, "max_epochs": epochs, "val_interval": 1},
        "val_dataloader": loader(1),
        "val_cfg": {},
        "val_evaluator": [Accuracy()],
        "optim_wrapper": {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        "custom_hooks": list(hooks),
        "default_hooks": {"logger": {"type": "LoggerHook", "interval": 2}},
        "default_scope": "mmengine",
        "log_level": "ERROR",
        "experiment_name": f"r{id(work_dir)}{perf_counter()}",
        "randomness": {"seed": 3},
        **changes,
    }
    return Runner(**options)


AMP = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "loss_scale": 1.0}


@pytest.mark.parametrize(
    "wrapper",
    [
        {"type": "OptimWrapper"},
        {"type": "OptimWrapper", "accumulative_counts": 2},
        AMP,
        {**AMP, "accumulative_counts": 2},
    ],
    ids=["plain", "accumulated", "amp", "amp and accumulated"],
)
def test_weights_are_those_without_the_bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: dict[str, Any]
) -> None:
    """The weights of a training with the bridge are bitwise those without it."""
    # its AmpOptimWrapper refuses a CPU, on which it works with bfloat16, without a scale of the loss
    monkeypatch.setattr("mmengine.optim.optimizer.amp_optimizer_wrapper.is_cuda_available", lambda: True)
    wrapper = {**wrapper, "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
    attachment = EventLoopHook(hooks=[EMAHook()], writers=[JSONLWriter()], work_dir=tmp_path)

    alone = runner(tmp_path, optim_wrapper=dict(wrapper)).train()
    ours = runner(tmp_path, attachment, optim_wrapper=dict(wrapper)).train()

    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), ours.parameters(), strict=True))


def test_events_and_their_counters(tmp_path: Path) -> None:
    """A run emits the events of a training and its validations in order, with its counters."""
    attachment = EventLoopHook(work_dir=tmp_path)
    rows: list[tuple[Any, ...]] = []

    @attachment.bus.on("*")
    def record(event: Any) -> None:
        if hasattr(event, "epoch"):
            rows.append((type(event).__name__, event.iter, event.epoch, event.max_iters))

    runner(tmp_path, attachment, epochs=1, train_dataloader=loader(2)).train()

    step = ["BeforeTrainIter", "AfterBackward", "BeforeOptimizerStep", "AfterOptimizerStep", "AfterTrainIter"]
    val = ["BeforeVal", "BeforeValEpoch", "BeforeValIter", "AfterValIter", "AfterValEpoch", "AfterVal"]
    found = [row[0] for row in rows if "Checkpoint" not in row[0]]
    assert found == [
        "BeforeRun",
        "BeforeTrain",
        "BeforeTrainEpoch",
        *step,
        *step,
        "AfterTrainEpoch",
        *val,
        "AfterTrain",
        "AfterRun",
    ]
    assert [row[1:] for row in rows if row[0] == "AfterTrainIter"] == [(0, 0, 2), (1, 0, 2)]
    assert (after_val := attachment.bus.latest("after_val_epoch")) is None or "accuracy" in after_val.metrics


def test_what_is_logged(tmp_path: Path) -> None:
    """Writers get the losses, the rates, the metrics of validations and what hooks put into the message hub."""

    class Puts(mmengine.hooks.Hook):  # type: ignore[misc]
        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            runner.message_hub.update_scalar("train/mine", batch_idx)

    attachment = EventLoopHook(writers=[JSONLWriter()])

    runner(tmp_path, Puts(), attachment).train()

    lines = [json.loads(line) for line in (tmp_path / "mm" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "lr", "mine", "accuracy"} <= set().union(*lines)


class Tensors(BaseMetric):  # type: ignore[misc]
    """Metrics of the kinds that evaluators return."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {
            "accuracy": torch.tensor(0.5),
            "single": torch.tensor([0.25]),
            "numpy": np.float32(0.75),
            "array": np.array([1.5]),
            "count": 3,
            "matrix": torch.eye(2),
            "text": "good",
        }


def test_metrics_of_every_kind(tmp_path: Path) -> None:
    """Metrics that are tensors or arrays of one number arrive as floats, and hooks can monitor them."""
    hooks = [CheckpointHook(save_best="accuracy"), EarlyStoppingHook("accuracy", patience=1)]
    attachment = EventLoopHook(hooks=hooks, writers=[JSONLWriter()])

    run = runner(tmp_path, attachment, val_evaluator=[Tensors()], epochs=4)
    run.train()

    numbers = {"accuracy": 0.5, "single": 0.25, "numpy": 0.75, "array": 1.5, "count": 3.0}
    assert (event := attachment.bus.latest("after_val_epoch")) is not None
    assert event.metrics == numbers
    lines = [json.loads(line) for line in (tmp_path / "mm" / "metrics.jsonl").read_text().splitlines()]
    assert numbers.items() <= next(line for line in lines if "accuracy" in line).items()
    assert run.epoch == 2  # the monitored metric has not improved


def test_numbers_of_the_message_hub(tmp_path: Path) -> None:
    """Numbers without a prefix belong to the iteration; those of `val/` to the validation in which they are new."""

    class Puts(mmengine.hooks.Hook):  # type: ignore[misc]
        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            runner.message_hub.update_scalar("mine", runner.iter)
            runner.message_hub.update_scalar("group/mine", 2.0)
            runner.message_hub.update_scalar("train/step_time", -1.0)

        def after_val_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            if runner.epoch == 1:
                runner.message_hub.update_scalar("val/once", 7.0)
            runner.message_hub.update_scalar("val/each", runner.epoch)

    attachment = EventLoopHook(writers=[JSONLWriter()])
    found: list[dict[str, float]] = []
    attachment.bus.on("after_val_epoch")(lambda trainer, event: found.append(dict(event.metrics)))

    runner(tmp_path, Puts(), attachment, val_evaluator=[Tensors()]).train()

    common = {"accuracy": 0.5, "single": 0.25, "numpy": 0.75, "array": 1.5, "count": 3.0}
    assert found == [{"once": 7.0, "each": 1.0, **common}, {"each": 2.0, **common}]
    lines = [json.loads(line) for line in (tmp_path / "mm" / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "loss" in line]
    assert rows[-1]["group/mine"] == 2.0
    assert rows[-1]["mine"] > 0
    assert rows[-1]["host/step_time"] == -1.0
    assert rows[-1]["step_time"] >= 0
    assert not any("val/each" in line or "each" in line for line in rows)


class Slow(mmengine.hooks.Hook):  # type: ignore[misc]
    """A hook that works for some time, by a clock of its own."""

    seconds = 0.0

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        began = perf_counter()
        while perf_counter() - began < 2e-3:
            pass
        self.seconds += perf_counter() - began


def test_each_hook_has_its_cost(tmp_path: Path) -> None:
    """Every hook of the runner has a row in the costs, with all the seconds of a clock of its own; its methods are put
    back."""
    slow = Slow()

    began = perf_counter()
    runner(tmp_path, slow, EventLoopHook(work_dir=tmp_path)).train()
    wall = perf_counter() - began

    costs = {cost.name: cost for cost in read_costs(tmp_path).handlers}
    assert slow.seconds <= costs["Slow.after_train_iter"].seconds <= wall
    assert costs["Slow.after_train_iter"].in_iteration
    assert "CheckpointHook.after_train_epoch (mmengine)" in costs
    assert {"LoggerHook.after_train_iter", "LoggerHook.after_train_iter (mmengine)"} <= costs.keys()
    assert read_costs(tmp_path).phases.backward > 0
    assert "after_train_iter" not in vars(slow)


def test_hooks_of_one_class_have_rows_of_their_own(tmp_path: Path) -> None:
    """The second hook of a class has rows with its number, in the order in which the runner calls them."""
    last, first = Notes(), named_notes()
    first.priority = "VERY_HIGH"

    runner(tmp_path, last, first, IterTimerHook(), EventLoopHook(work_dir=tmp_path)).train()

    calls = {cost.name: cost.calls for cost in read_costs(tmp_path).handlers}
    assert {name: count for name, count in calls.items() if name.startswith("Notes")} == {
        "Notes.after_train_iter": 8,
        "Notes.after_train_epoch": 2,
        "Notes #2.after_train_iter": 8,
    }
    assert calls["IterTimerHook.after_train_iter (mmengine)"] == 8
    assert calls["IterTimerHook #2.after_train_iter (mmengine)"] == 8
    assert "after_train_iter" not in vars(first) | vars(last)


class Notes(mmengine.hooks.Hook):  # type: ignore[misc]
    """A hook with one method."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Do nothing."""


def named_notes() -> Notes:
    """A hook of another class named Notes, with a method more."""

    class Another(Notes):
        def after_train_epoch(self, runner: Any) -> None:
            """Do nothing."""

    Another.__name__ = "Notes"
    return Another()


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_stop_ends_the_runner(tmp_path: Path, by_epoch: bool) -> None:
    """`trainer.stop` in a handler ends the runner as its own early stopping does."""
    attachment = EventLoopHook(work_dir=tmp_path)
    attachment.bus.on("after_train_iter", start=2)(lambda trainer, event: trainer.stop("enough"))
    cfg = (
        {"by_epoch": True, "max_epochs": 9}
        if by_epoch
        else {"by_epoch": False, "max_iters": 99, "val_interval": 50}
    )

    mm = runner(tmp_path, attachment, train_cfg=cfg)
    mm.train()

    assert mm.iter == (4 if by_epoch else 3)  # MMEngine finishes its epoch
    assert read_costs(tmp_path).outcome == "enough"


@pytest.mark.parametrize("event", ["after_train_epoch", "after_val_epoch"])
def test_a_stop_between_iterations(tmp_path: Path, event: str) -> None:
    """A stop at the end of an epoch or a validation ends the runner without another epoch."""
    attachment = EventLoopHook(work_dir=tmp_path)
    attachment.bus.on(event)(lambda trainer, event: trainer.stop("enough"))

    mm = runner(tmp_path, attachment, epochs=9)
    mm.train()

    assert mm.iter == 4
    assert read_costs(tmp_path).outcome == "enough"


@pytest.mark.parametrize(
    "error", [ValueError("bad batch"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_an_error_of_the_host(tmp_path: Path, error: BaseException) -> None:
    """An error in the runner reaches the caller as it is; events, writers and costs are complete."""

    class Fails(mmengine.hooks.Hook):  # type: ignore[misc]
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 3:
                raise error

    attachment = EventLoopHook(writers=[JSONLWriter()], work_dir=tmp_path)

    with pytest.raises(type(error)) as raised:
        runner(tmp_path, Fails(), attachment).train()

    assert raised.value is error
    assert attachment.bus.closed
    assert read_costs(tmp_path).complete
    assert "loss" in (tmp_path / "metrics.jsonl").read_text()


def test_states_of_hooks_are_in_the_runners_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner that resumes gives the hooks their states back: an average goes on where it was."""
    monkeypatch.setenv(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"
    )  # MMEngine's checkpoints have objects of its own
    first, second = EMAHook(momentum=0.5), EMAHook(momentum=0.5)
    runner(tmp_path, EventLoopHook(hooks=[first], work_dir=tmp_path), epochs=2).train()
    expected = [weight.clone() for weight in first.ema_model.module.parameters()]
    attachment = EventLoopHook(hooks=[second], work_dir=tmp_path)
    loaded: list[torch.Tensor] = []

    @attachment.bus.on("before_train_epoch")
    def inspect(trainer: Any, event: Any) -> None:
        loaded.extend(weight.clone() for weight in second.ema_model.module.parameters())

    mm = runner(tmp_path, attachment, epochs=3, resume=True, load_from=str(tmp_path / "mm" / "epoch_2.pth"))
    mm.train()

    assert all(torch.equal(a, b) for a, b in zip(expected, loaded, strict=True))
    assert attachment.trainer.iter == 12


def test_a_validation_alone(tmp_path: Path) -> None:
    """`runner.val()` is a run with a validation and without a training."""
    attachment = EventLoopHook(work_dir=tmp_path)
    seen: list[str] = []
    attachment.bus.subscribe(
        lambda event: seen.append(type(event).__name__),
        "before_run",
        "before_train",
        "after_val",
        "after_run",
    )

    runner(tmp_path, attachment).val()

    assert seen == ["BeforeRun", "AfterVal", "AfterRun"]


def test_sigterm_ends_the_run_and_the_program(tmp_path: Path) -> None:
    """SIGTERM ends the run after the iteration, not after the epoch; writers and costs are complete by then."""

    class Terminate(mmengine.hooks.Hook):  # type: ignore[misc]
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    mm = runner(tmp_path, Terminate(), EventLoopHook(writers=[JSONLWriter()], work_dir=tmp_path))

    with pytest.raises(SystemExit) as ended:
        mm.train()

    assert ended.value.code == 128 + signal.SIGTERM
    assert [*read_jsonl(tmp_path / "metrics.jsonl")][-1]["iter"] == 2
    assert read_costs(tmp_path).outcome == "preempted by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_built_from_a_config(tmp_path: Path) -> None:
    """A config builds the hook by its name, as MMEngine's configs do."""
    mm = runner(tmp_path, {"type": "EventLoopHook", "work_dir": str(tmp_path)})

    mm.train()

    assert read_costs(tmp_path).phases.iterations == 8


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: EventLoopHook(hooks=[OptimizerHook()]),
            ValueError,
            "OptimizerHook does backward .* MMEngine does",
        ),
        (lambda: EventLoopHook(cast(Any, 3)), TypeError, "bus must be a Bus, .* got 3"),
        (lambda: EventLoopHook(writers=cast(Any, "jsonl")), TypeError, "writers must be a list, got 'jsonl'"),
        (lambda: EventLoopHook(work_dir=cast(Any, 3)), TypeError, "work_dir must be a path, .* got 3"),
        (
            lambda: EventLoopHook(Bus()).bus.on("optimizer_step_skipped")(print),
            ValueError,
            "optimizer_step_skipped, which this bus never has",
        ),
    ],
)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """A bad argument is refused at its line, with what was expected and what came."""
    with pytest.raises(error, match=words):
        call()


def test_no_trainer_before_the_first_run() -> None:
    """The attribute `trainer` says that the host has not begun a run."""
    with pytest.raises(RuntimeError, match=r"no trainer before the first run of MMEngine"):
        _ = EventLoopHook().trainer


def test_two_bridges(tmp_path: Path) -> None:
    """A second bridge in one runner is refused when the run begins."""
    with pytest.raises(ValueError, match="expected one EventLoopHook in the hooks of a Runner, got two"):
        runner(tmp_path, EventLoopHook(), EventLoopHook()).train()
