"""Hooks of MMEngine in this engine's trainer: each has the effect that it has in a runner."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

with warnings.catch_warnings():  # of torch.jit, when torch.distributed.optim is imported
    warnings.simplefilter("ignore")
    from mmengine import hooks as mm
    from mmengine.evaluator import BaseMetric, Evaluator
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.mmengine import EventLoopHook
from tests.support.class_tables import classes_named
from tests.support.cuda import set_cuda
from tests.support.trainers import batches, samples, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind


class Model(BaseModel):  # type: ignore[misc]
    """The tiny model with MMEngine's interface, and the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_model()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        out = self.net(inputs)
        return {"loss": F.cross_entropy(out, target)} if mode == "loss" else out


def loader() -> DataLoader[Any]:
    return DataLoader(samples(16), batch_size=4)


Seen = list[Any]


class Notes(mm.Hook):  # type: ignore[misc]
    """A hook that notes each stage with its counters."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def before_train(self, runner: Any) -> None:
        self.seen.append(("before_train", runner.iter, runner.epoch, runner.max_epochs, runner.max_iters))

    def before_train_epoch(self, runner: Any) -> None:
        self.seen.append(("epoch", runner.iter, runner.epoch))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        loss = round(float(outputs["loss"]), 5)
        self.seen.append(
            (
                batch_idx,
                runner.iter,
                loss,
                self.every_n_train_iters(runner, 3),
                self.is_last_train_iter(runner),
            )
        )

    def after_train_epoch(self, runner: Any) -> None:
        self.seen.append(
            ("end", runner.epoch, self.is_last_train_epoch(runner), self.every_n_epochs(runner, 2))
        )


class Freezes(mm.Hook):  # type: ignore[misc]
    """A hook that freezes a layer after one epoch, as those of mmdet do."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            for parameter in runner.model.net[0].parameters():
                parameter.requires_grad_(False)
                parameter.grad = None

    def after_train(self, runner: Any) -> None:
        self.seen.append([round(float(p.detach().sum()), 5) for p in runner.model.parameters()])


class Averages(mm.EMAHook):  # type: ignore[misc]
    """MMEngine's average; its results and those of validations with it are noted."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        super().__init__(momentum=0.5)
        self.seen = seen

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        super().after_val_epoch(runner, metrics)
        self.seen.append(round(metrics["score"], 4))

    def after_train(self, runner: Any) -> None:
        for model in (self.ema_model, runner.model):
            self.seen.append([round(float(p.sum()), 5) for p in model.parameters()])


class StopsEarly(mm.EarlyStoppingHook):  # type: ignore[misc]
    """MMEngine's early stopping, whose end is noted."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        super().__init__("score", rule="greater", min_delta=9.0, patience=2)
        self.seen = seen

    def after_train(self, runner: Any) -> None:
        self.seen.append((runner.epoch, runner.iter, self.wait_count, round(self.best_score, 4)))


class Times(mm.IterTimerHook):  # type: ignore[misc]
    """MMEngine's clock of iterations; the number of its times is noted."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        super().__init__()
        self.seen = seen

    def after_train(self, runner: Any) -> None:
        hub = runner.message_hub
        self.seen.append(
            {name: len(each.data[0]) for name, each in hub.log_scalars.items() if "time" in name}
        )
        self.seen.append("eta" in hub.runtime_info)


class Stops(mm.Hook):  # type: ignore[misc]
    """A hook that stops the training as MMEngine's early stopping does."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def after_train_epoch(self, runner: Any) -> None:
        self.seen.append(runner.epoch)
        runner.train_loop.stop_training = runner.epoch == 1


class Puts(mm.Hook):  # type: ignore[misc]
    """A hook that logs, and reads back what it logged."""

    def __init__(self, seen: Seen, *_: Any) -> None:
        self.seen = seen

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        runner.message_hub.update_scalar("train/mine", batch_idx * 2)
        self.seen.append(float(runner.message_hub.get_scalar("train/mine").current()))


class Profiles(mm.ProfilerHook):  # type: ignore[misc]
    """MMEngine's profiler; the number of losses in its trace is noted."""

    def __init__(self, seen: Seen, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(by_epoch=False, profile_times=3, json_trace_path=str(folder / "trace.json"))
        self.seen = seen

    def after_train(self, runner: Any) -> None:
        events = json.loads(Path(self.json_trace_path).read_text())["traceEvents"]
        self.seen.append(sum(event.get("name") == "aten::cross_entropy_loss" for event in events))


def checkpoint(seen: Seen, folder: Path) -> mm.Hook:
    return mm.CheckpointHook(
        interval=1, max_keep_ckpts=2, save_best="score", rule="less", out_dir=str(folder / "saved")
    )


def empty_cache(seen: Seen, folder: Path) -> mm.Hook:
    return mm.EmptyCacheHook(before_epoch=True, after_epoch=True, after_iter=True)


def sync_buffers(seen: Seen, folder: Path) -> mm.Hook:
    hook = mm.SyncBuffersHook()
    hook.distributed = True
    return hook


Make = Callable[[Seen, Path], Any]
BY_ITERATION = {"max_iters": 20, "val_interval": 4}


class Score(BaseMetric):  # type: ignore[misc]
    """The mean of what the model returns for a batch."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(torch.stack(list(data_samples)).sum()))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"score": sum(results) / len(results)}


def natively(make: Make, folder: Path, **loop: int) -> tuple[Seen, set[str]]:
    """Train by MMEngine, and return what the hook notes and saves."""
    seen: Seen = []
    runner = Runner(
        model=Model(),
        work_dir=str(folder),
        train_dataloader=loader(),
        val_dataloader=loader(),
        val_cfg={},
        train_cfg={"by_epoch": not loop, **(loop or {"max_epochs": 5})},
        custom_hooks=[make(seen, folder)],
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}},
        default_scope="mmengine",
        experiment_name=f"r{abs(hash(folder))}",
        randomness={"seed": 3},
        val_evaluator=Evaluator([Score()]),
        default_hooks={"checkpoint": None, "timer": None},
        log_level="ERROR",
    )
    torch.manual_seed(3)
    runner.train()
    return seen, saved(folder)


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.pth")}


def built(make: Make, folder: Path, seen: Seen, **options: Any) -> Trainer:
    """Return a trainer of the same training with the same hook."""
    model = Model()
    torch.manual_seed(3)
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=loader(),
        val_loader=loader(),
        writers=[],
        work_dir=folder,
        val_step=lambda trainer, batch: {"score": trainer.model(batch[0]).sum()},
        hooks=[Foreign(make(seen, folder))],
        **options,
    )


def here(make: Make, folder: Path, **loop: int) -> tuple[Seen, set[str]]:
    """Train by this engine with the same hook."""
    seen = Seen()
    trainer = built(make, folder, seen, **(loop or {"max_epochs": 5}), default_hooks={"checkpoint": None})
    torch.manual_seed(3)
    trainer.train()
    trainer.close()
    return seen, saved(folder)


@pytest.mark.parametrize(
    "make",
    [Notes, Freezes, Averages, Stops, StopsEarly, Times, Profiles, Puts, checkpoint],
    ids=lambda make: make.__name__,
)
def test_effect_is_the_same(tmp_path: Path, make: Make) -> None:
    """What a hook notes, stops or saves in this engine's trainer is what it does in a runner."""
    expected = natively(make, tmp_path / "native")

    found = here(make, tmp_path / "here")

    assert any(found)
    assert found == expected


@pytest.mark.parametrize(
    "make", [Notes, Averages, StopsEarly, Times, Profiles], ids=lambda make: make.__name__
)
def test_effect_is_the_same_by_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """So it is in a run that is measured in iterations."""
    monkeypatch.setattr("mmengine.runner.loops.time", SimpleNamespace(sleep=lambda seconds: None))
    expected = natively(make, tmp_path / "native", **BY_ITERATION)

    found = here(make, tmp_path / "here", **BY_ITERATION)

    assert any(found)
    assert found == expected


def test_files_are_those_of_mmengine(tmp_path: Path) -> None:
    """A CheckpointHook writes the weights, the optimizer and the counters that it writes in a runner."""
    natively(checkpoint, tmp_path / "native")
    here(checkpoint, tmp_path / "here")

    files = [next((tmp_path / name).rglob("epoch_5.pth")) for name in ("native", "here")]
    theirs, ours = (torch.load(file, weights_only=False) for file in files)
    assert ours.keys() == theirs.keys()
    assert ours["optimizer"] == theirs["optimizer"]
    assert [ours["meta"][name] for name in ("epoch", "iter")] == [5, 20]
    assert all(torch.equal(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items())


@pytest.mark.parametrize("make", [empty_cache, sync_buffers], ids=lambda make: make.__name__)
def test_calls_to_devices_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """A hook empties a device's cache, or averages buffers over the ranks, as often as in a runner."""
    calls: list[str] = []
    set_cuda(monkeypatch, empty_cache=lambda: calls.append("emptied"))
    monkeypatch.setattr("mmengine.hooks.empty_cache_hook.is_cuda_available", lambda: True)
    monkeypatch.setattr(
        "mmengine.hooks.sync_buffer_hook.all_reduce_params", lambda *_, **__: calls.append("synced")
    )
    counts = []

    for train, name in ((natively, "native"), (here, "here")):
        calls.clear()
        train(make, tmp_path / name)
        counts.append(len(calls))

    assert counts[0] == counts[1] > 0


def test_each_run_begins_once(tmp_path: Path) -> None:
    """`before_run` comes before a checkpoint that is loaded for a run, and not again for one loaded within it."""
    seen = Seen()

    class Begins(mm.Hook):  # type: ignore[misc]
        def before_run(self, runner: Any) -> None:
            seen.append("run")

        def after_load_checkpoint(self, runner: Any, checkpoint: Any) -> None:
            seen.append("load")

    built(lambda *_: Begins(), tmp_path, seen, max_epochs=1).train()
    seen.clear()
    trainer = built(lambda *_: Begins(), tmp_path, seen, max_epochs=2)
    trainer.bus.subscribe(lambda t, event: t.load_checkpoint("auto"), "after_train_iter", once=True)
    trainer.resume("auto")
    trainer.train()

    assert seen == ["run", "load", "load"]


def test_an_average_is_in_checkpoints(tmp_path: Path) -> None:
    """A run resumed with MMEngine's EMAHook ends as the uninterrupted one, and the average is in `state_dict`."""

    def run(epochs: int, folder: str, resumes: bool = False) -> Seen:
        seen = Seen()
        trainer = built(Averages, tmp_path / folder, seen, max_epochs=epochs)
        if resumes:
            trainer.resume("auto")
        trainer.train()
        trainer.close()
        return seen

    whole = run(4, "whole")
    run(2, "parts")
    assert run(4, "parts", resumes=True) == whole[1:]  # with the validation that was due when it was saved

    trainer = built(Averages, tmp_path / "parts", [], max_epochs=4)
    trainer.load_checkpoint("auto")
    assert [round(float(p.sum()), 5) for p in trainer.model.parameters()] == whole[-2]
    trainer.close()


def test_a_best_score_is_in_checkpoints(tmp_path: Path) -> None:
    """A run resumed with MMEngine's CheckpointHook ends with the files of the uninterrupted one."""

    def run(epochs: int, folder: str, resumes: bool = False) -> set[str]:
        trainer = built(checkpoint, tmp_path / folder, [], max_epochs=epochs)
        if resumes:
            trainer.resume("auto")
        trainer.train()
        trainer.close()
        return saved(tmp_path / folder / "saved")

    whole = run(5, "whole")
    run(3, "parts")

    assert run(5, "parts", resumes=True) == whole
    assert len(whole) == 3


def test_numbers_of_the_message_hub_are_logged(tmp_path: Path) -> None:
    """What a hook puts into the message hub is a metric of this trainer."""
    model = Model()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        max_epochs=1,
        train_loader=batches(3),
        writers=[],
        work_dir=tmp_path,
        hooks=[Foreign(Puts([]))],
    )

    trainer.train()
    trainer.close()

    assert trainer.metrics.latest()["mine"].value == 4.0


def test_priorities_and_names(tmp_path: Path) -> None:
    """A hook keeps its own priority, or has the one that is given, and a name with its system."""
    model, low = Model(), Notes([])
    low.priority = "VERY_LOW"
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        max_epochs=1,
        train_loader=batches(3),
        writers=[],
        work_dir=tmp_path,
        hooks=[Foreign(low), Foreign(Stops([]), priority="HIGH")],
    )

    rows = {row.name: row.priority for row in trainer.bus.plan("after_train_epoch")}
    trainer.close()

    assert rows["Notes.after_train_epoch (mmengine)"] == 90
    assert rows["Stops.after_train_epoch (mmengine)"] == 30


def test_random_state_is_kept(tmp_path: Path) -> None:
    """Building the trainer draws nothing from the random state, although a runner seeds everything."""
    model = Model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        max_epochs=1,
        train_loader=batches(1),
        writers=[],
        work_dir=tmp_path,
        hooks=[Foreign(Notes([]))],
    ).close()

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            mm.ParamSchedulerHook,
            ValueError,
            r"ParamSchedulerHook can have no effect here: give .* schedulers=\[...\]",
        ),
        (
            mm.DistSamplerSeedHook,
            ValueError,
            "DistSamplerSeedHook can have no effect here: this trainer seeds",
        ),
        (
            mm.LoggerHook,
            ValueError,
            r"LoggerHook can have no effect here: .* writers=\[...\] record the numbers",
        ),
        (mm.RuntimeInfoHook, ValueError, "RuntimeInfoHook can have no effect here: this trainer collects"),
        (
            lambda: mm.PrepareTTAHook({}),
            ValueError,
            "PrepareTTAHook can have no effect here: it replaces the model of a test",
        ),
        (
            mm.NaiveVisualizationHook,
            ValueError,
            "NaiveVisualizationHook can have no effect here: it reads batches of a form",
        ),
        (
            lambda: object.__new__(mm.NPUProfilerHook),
            ValueError,
            "NPUProfilerHook can have no effect here: .* runs on no NPU",
        ),
        (
            EventLoopHook,
            ValueError,
            "EventLoopHook can have no effect here: give its hooks and writers to this",
        ),
        (lambda: mm.IterTimerHook, TypeError, "got the class IterTimerHook"),
        (
            Model,
            TypeError,
            "Foreign takes a hook of MMEngine, got Model, which does not derive from mmengine.hooks.Hook",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    """A hook that steers a runner's loop, a class and another object are refused by name."""
    with pytest.raises(error, match=words):
        Foreign(make())


def test_every_class_is_in_a_table() -> None:
    """Each hook class that MMEngine exports is in a table of the page, as one that works or is refused."""
    assert set(mm.__all__) - classes_named("mmengine.md") == set()
