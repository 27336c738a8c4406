"""Our hooks in trainings of ignite, MMEngine and Transformers, and what these give to handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, PreciseBN
from eventloop.metrics import EventStorage
from tests.support.trainers import batches

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind

Handler = Callable[[Any, Any], None]


class Host(NamedTuple):
    """A training of another engine with four iterations in an epoch, each of which ends with a validation."""

    net: nn.Sequential
    model: nn.Module
    optimizer: torch.optim.Optimizer
    native: Any
    on: Callable[[str], Callable[[Handler], Handler]]
    train: Callable[[], object]


def ignite(work_dir: Path, hooks: Sequence[Any], epochs: int) -> Host:
    pytest.importorskip("ignite", reason="ignite is not installed: pip install 'torch-eventloop[ignite]'")
    from ignite.engine import Events

    from tests.bridges.test_ignite import Training

    training = Training()
    bus = training.attach(work_dir, hooks=hooks)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(1)))
    model, engine = training.model, training.engine
    assert isinstance(model, nn.Sequential)
    return Host(model, model, training.optimizer, engine, bus.on, lambda: training.run(epochs))


def mmengine(work_dir: Path, hooks: Sequence[Any], epochs: int) -> Host:
    pytest.importorskip(
        "mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'"
    )
    from eventloop.bridges.mmengine import EventLoopHook
    from tests.bridges.test_mmengine import runner

    attachment = EventLoopHook(hooks=hooks, work_dir=work_dir)
    native = runner(work_dir, attachment, epochs=epochs)
    native.optim_wrapper = native.build_optim_wrapper(native.optim_wrapper)  # else a config until it trains
    model = native.model
    return Host(model.net, model, native.optim_wrapper.optimizer, native, attachment.bus.on, native.train)


HOSTS = pytest.mark.parametrize("make_host", [ignite, mmengine])
MakeHost = Callable[[Path, Sequence[Any], int], Host]


@HOSTS
def test_the_average_is_evaluated(make_host: MakeHost, tmp_path: Path) -> None:
    """The host's validation runs with the average of EMAHook, and its training ends with the model's own weights."""
    ema = EMAHook(momentum=0.5)
    host = make_host(tmp_path, [ema], 1)
    seen: list[torch.Tensor] = []
    host.net.register_forward_hook(
        lambda net, *_: None if net.training else seen.append(net[0].weight.detach().clone())
    )

    host.train()

    average = next(iter(ema.ema_model.module.state_dict().values()))
    assert len(seen) == 1
    assert torch.equal(seen[0], average)
    assert not torch.equal(host.net[0].get_parameter("weight"), average)


@HOSTS
def test_a_score_stops_the_host(make_host: MakeHost, tmp_path: Path) -> None:
    """EarlyStoppingHook ends the host after the second validation without a better score."""
    stopping = EarlyStoppingHook("accuracy", patience=1, min_delta=9.0)
    host = make_host(tmp_path, [stopping], 9)
    epochs: list[int] = []
    host.on("after_train_epoch")(lambda trainer, event: epochs.append(event.epoch))

    host.train()

    assert len(epochs) == 2
    assert stopping.wait == 1


@HOSTS
def test_checkpoints_and_the_best_one(make_host: MakeHost, tmp_path: Path) -> None:
    """CheckpointHook saves each epoch, and the best checkpoint by a metric of the host's validation."""
    hook = CheckpointHook(interval=1, save_best="accuracy")
    host = make_host(tmp_path, [hook], 2)

    host.train()

    assert (tmp_path / "epoch_1").is_dir()
    assert (tmp_path / "epoch_2").is_dir()
    assert len([*tmp_path.glob("best_accuracy_epoch_*")]) == 1
    assert hook.best is not None


@HOSTS
def test_precise_statistics(make_host: MakeHost, tmp_path: Path) -> None:
    """PreciseBN makes its pass at the end of each epoch, with the weights that the epoch has left."""
    target = torch.zeros(4, dtype=torch.long)
    data = [(inputs, target) for inputs, _ in batches(4)]
    precise = PreciseBN(1, 4, data, forward=lambda model, batch: model(batch[0], *_second(model, batch)))
    host = make_host(tmp_path, [precise], 2)
    host.net.insert(1, nn.BatchNorm1d(8))

    host.train()

    assert_precise(host.net[0], host.net[1], torch.cat([inputs for inputs, _ in data]))


def _second(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """Return the second argument of MMEngine's `forward`, and none for a plain module."""
    return () if isinstance(model, nn.Sequential) else (batch[1],)


def test_precise_statistics_in_transformers(tmp_path: Path) -> None:
    """PreciseBN makes its pass in Transformers, too, with a loader of its own."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="pip install 'torch-eventloop[transformers]'")
    from eventloop.bridges.transformers import EventLoopCallback
    from tests.support import transformers_host

    model, points = transformers_host.TinyModel(), transformers_host.rows(16)
    model.layers.insert(1, nn.BatchNorm1d(8))
    inputs = torch.stack([row["inputs"] for row in points])
    labels = torch.tensor([row["labels"] for row in points])
    data = [
        {"inputs": some, "labels": right}
        for some, right in zip(inputs.split(4), labels.split(4), strict=True)
    ]
    bridge = EventLoopCallback(hooks=[PreciseBN(1, 4, data, forward=lambda model, batch: model(**batch))])

    transformers_host.host(tmp_path, bridge, model=model).train()

    assert_precise(model.layers[0], model.layers[1], inputs)


def assert_precise(before: nn.Module, norm: nn.Module, inputs: torch.Tensor) -> None:
    """Check that the running mean is the mean over all inputs, by the weights at the end of the training."""
    assert torch.allclose(norm.get_buffer("running_mean"), before(inputs).mean(0), atol=1e-5)


@HOSTS
def test_what_handlers_are_given(make_host: MakeHost, tmp_path: Path) -> None:
    """A handler finds the host's objects and counters under the documented names, and can stop the host."""
    host = make_host(tmp_path, [], 9)
    seen: list[dict[str, Any]] = []
    names = ("iter", "epoch", "batch", "outputs", "metrics", "model", "optimizer", "native", "work_dir")

    @host.on("after_train_iter")
    def inspect(trainer: Any, event: Any) -> None:
        seen.append({name: getattr(trainer, name) for name in names})
        if len(seen) == 6:
            trainer.stop("enough")

    host.train()

    last = seen[5]
    assert [(row["iter"], row["epoch"]) for row in seen[:6]] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
        (5, 1),
    ]
    assert last["model"] is host.model
    assert last["native"] is host.native
    assert last["optimizer"] is host.optimizer
    assert torch.equal(last["batch"][0], batches(4)[1][0])
    assert last["outputs"].keys() >= {"loss"}
    assert isinstance(last["metrics"], EventStorage)
    assert last["work_dir"] == tmp_path
    assert len(seen) in (6, 8)  # MMEngine finishes its epoch
