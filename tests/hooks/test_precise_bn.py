"""PreciseBN: when it runs, on what, and that training does not notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook, Hook, PreciseBN

Make = Callable[..., Trainer]


def model_with_bn() -> nn.Module:
    """A layer right behind the inputs, whose population is that of the data, and a dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


@pytest.fixture
def make(make_trainer: Make) -> Make:
    """Build trainers of the model above."""

    def make(*hooks: Hook, **options: Any) -> Trainer:
        return make_trainer(model=options.pop("model", None) or model_with_bn(), hooks=hooks, **options)

    return make


class Watch(Hook):
    """Runs after PreciseBN: notes the completed iterations at which the first layer was precise."""

    priority = 85

    def __init__(self, data: list[Any]) -> None:
        self.mean = torch.cat([rows for rows, _ in data]).mean(0)
        self.precise: list[tuple[str, int]] = []

    def _compare(self, trainer: Trainer, where: str, done: int) -> None:
        layer: Any = trainer.model[0]  # type: ignore[index]
        if torch.allclose(layer.running_mean, self.mean, atol=1e-6):
            self.precise.append((where, done))

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Look after an iteration."""
        self._compare(trainer, "iter", trainer.iter + 1)

    def after_train_epoch(self, trainer: Trainer, event: Any) -> None:
        """Look after an epoch."""
        self._compare(trainer, "epoch", trainer.iter)


@pytest.mark.parametrize(
    ("options", "unit", "expected"),
    [
        ({"interval": 2}, {"max_epochs": 5}, [("epoch", 6), ("epoch", 12), ("epoch", 15)]),
        ({}, {"max_epochs": 3}, [("epoch", 9)]),
        ({"interval": 2}, {"max_iters": 5}, [("iter", 2), ("iter", 4), ("iter", 5), ("epoch", 5)]),
        ({}, {"max_iters": 4}, [("iter", 4), ("epoch", 4)]),
        ({"interval": 4, "by_epoch": False}, {"max_epochs": 2}, [("iter", 4), ("iter", 6), ("epoch", 6)]),
    ],
)
def test_when(
    make: Make, make_batches: Any, options: Any, unit: Any, expected: list[tuple[str, int]]
) -> None:
    """It runs every `interval` epochs or iterations, and at the end of the run."""
    watch = Watch(make_batches(3))

    make(PreciseBN(num_iter=None, **options), watch, batches=3, **unit).train()

    assert watch.precise == expected


def test_last_iteration_not_known_beforehand(make: Make, make_batches: Any) -> None:
    """Counted by iteration in epochs of unknown length, the end of the run is the last epoch's."""

    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(make_batches(3))

    watch = Watch(make_batches(3))

    make(PreciseBN(num_iter=None, by_epoch=False), watch, train_loader=Unsized(), max_epochs=2).train()

    assert watch.precise == [("epoch", 6)]


def test_once_at_the_end(make: Make, make_batches: Any) -> None:
    """The end of the run in the last iteration is not met again in the last epoch."""
    passes: list[int] = []

    class Counted:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            return iter(make_batches(3))

    make(PreciseBN(3, None, Counted(), by_epoch=False), batches=3).train()

    assert len(passes) == 1


def test_checkpoint_and_validation_have_it(make: Make, make_batches: Any, tmp_path: Path) -> None:
    """The checkpoint and the validation of the same epoch have the precise statistics."""
    mean = torch.cat([rows for rows, _ in make_batches(4)]).mean(0)
    validated: list[torch.Tensor] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        validated.append(trainer.model[0].running_mean.clone())  # type: ignore[index]
        return {"acc": 1.0}

    make(
        PreciseBN(num_iter=None), CheckpointHook(interval=1), val_loader=[torch.zeros(1)], val_step=val_step
    ).train()

    saved = torch.load(tmp_path / "run" / "epoch_1" / PAYLOAD, weights_only=True)["state_dict"]
    torch.testing.assert_close(saved["0.running_mean"], mean)
    torch.testing.assert_close(validated[0], mean)


def test_a_loader_of_its_own(make: Make, make_batches: Any) -> None:
    """`data_loader` is what the population is taken from."""
    rows = torch.randn(20, 2) + 5
    trainer = make(PreciseBN(num_iter=2, data_loader=[rows[:15], rows[15:]]))

    trainer.train()

    torch.testing.assert_close(trainer.model[0].running_mean, rows.mean(0))  # type: ignore[index]


def test_hand_written_loops(make: Make, make_batches: Any) -> None:
    """The loader of a hand-written loop is the default there."""
    trainer = make(PreciseBN(num_iter=None), train_loader=None)
    loader = make_batches(3)

    for _ in trainer.epochs():
        for rows, target in trainer.batches(loader):
            trainer.outputs = {"loss": F.mse_loss(trainer.model(rows), target)}

    mean = torch.cat([rows for rows, _ in loader]).mean(0)
    torch.testing.assert_close(trainer.model[0].running_mean, mean)  # type: ignore[index]


def test_runs_the_train_step(make: Make, make_batches: Any) -> None:
    """A `train_step` of one's own is what batches are run through; the trainer's batch, outputs and metrics are
    training's again afterwards."""
    graphs: list[bool] = []

    def step(trainer: Trainer, batch: Any) -> Any:
        loss = F.mse_loss(trainer.model(batch["rows"]), batch["target"])
        graphs.append(loss.requires_grad)
        trainer.metrics.put_scalar("steps", len(graphs))
        trainer.batch = trainer.outputs = None
        return loss

    data = [{"rows": rows, "target": target} for rows, target in make_batches(3)]
    trainer = make(PreciseBN(), train_loader=data, train_step=step, max_iters=3)
    held: list[Any] = []
    trainer.bus.subscribe(
        lambda event: held.append((trainer.batch, trainer.outputs)), "after_train_iter", priority="LOWEST"
    )

    trainer.train()

    assert graphs == [True] * 3 + [False] * 200
    assert trainer.metrics.latest()["steps"] == (3, 2)
    assert held[-1][1] is not None


def test_steps_that_need_gradients(make: Make) -> None:
    """A step that does more than a forward pass fails with the advice to give a forward."""

    def step(trainer: Trainer, batch: Any) -> Any:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        loss.backward()
        return loss

    trainer = make(PreciseBN(), train_step=step, default_hooks={"optimizer": None})

    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        trainer.train()

    assert any("give it forward=lambda model, batch" in note for note in caught.value.__notes__)


def test_forward_of_ones_own(make: Make, make_batches: Any) -> None:
    """`forward` replaces the step, and is given the model inside its wrappers."""
    trainer = make(PreciseBN(num_iter=None, forward=lambda model, batch: model(batch[0] + 1)))

    trainer.train()

    mean = torch.cat([rows for rows, _ in make_batches(4)]).mean(0)
    torch.testing.assert_close(trainer.model[0].running_mean, mean + 1)  # type: ignore[index]


# --- training does not notice ------------------------------------------------------------------------------


def loader_of(**options: Any) -> DataLoader[Any]:
    """Twelve rows in random order, three batches."""
    generator = torch.Generator().manual_seed(7)
    rows, target = torch.randn(12, 2, generator=generator), torch.randn(12, 1, generator=generator)
    return DataLoader(TensorDataset(rows, target), batch_size=4, shuffle=True, **options)


def weights(trainer: Trainer) -> dict[str, Any]:
    """What training makes of the model, without running statistics."""
    return {n: v.tolist() for n, v in trainer.model.state_dict().items() if "running" not in n}


@pytest.mark.parametrize("unit", [{"max_epochs": 3}, {"max_iters": 9}])
@pytest.mark.parametrize("own", [True, False])
def test_training_goes_on_as_without_it(make: Make, unit: Any, own: bool) -> None:
    """With dropout and a shuffled loader, weights and counters are bitwise those of a run without the hook."""
    ends = []
    for hooks in ((), (PreciseBN(interval=1, num_iter=4),)):
        loader = loader_of(generator=torch.Generator().manual_seed(1) if own else None)
        trainer = make(*hooks, train_loader=loader, **unit)
        torch.manual_seed(3)
        trainer.train()
        ends.append((weights(trainer), torch.rand(1).item()))

    assert ends[0] == ends[1]


@pytest.mark.parametrize("at", [2, 3, 5])
def test_interrupted_and_resumed(make: Make, at: int, tmp_path: Path) -> None:
    """A run stopped in mid-epoch or at an epoch's end and resumed ends with the statistics of one that was not."""

    def run(folder: str, stop_at: int | None = None, *, resume: bool = False) -> dict[str, Any]:
        trainer = make(
            PreciseBN(interval=1, num_iter=2),
            train_loader=loader_of(),
            max_epochs=3,
            work_dir=tmp_path / folder,
            default_hooks={"checkpoint": CheckpointHook()},
        )

        def stop(trainer: Trainer, event: AfterTrainIter) -> None:
            if event.iter + 1 == stop_at:
                trainer.stop("enough")

        trainer.bus.subscribe(stop, "after_train_iter")
        torch.manual_seed(3)
        if resume:
            trainer.resume()
        trainer.train()
        return {name: value.tolist() for name, value in trainer.model.state_dict().items()}

    whole = run("whole")
    run("parts", at)

    assert run("parts", resume=True) == whole


def test_a_hand_written_loop_that_was_stopped_says_what_it_lacks(
    make: Make, make_batches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed by another process, its loader is not known when the pass that a stop cut short should be made."""

    def run(*, stop: bool, **options: Any) -> None:
        trainer = make(
            PreciseBN(interval=1, num_iter=2, **options), CheckpointHook(), train_loader=None, max_epochs=2
        )
        if stop:
            trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=2)
        else:
            trainer.resume()
        for _ in trainer.epochs():
            for rows, target in trainer.batches(make_batches(3)):
                trainer.outputs = {"loss": F.mse_loss(trainer.model(rows), target)}

    run(stop=True)
    run(stop=False, data_loader=make_batches(3))
    assert "PreciseBN cannot" not in caplog.text

    run(stop=True)
    run(stop=False)
    assert "PreciseBN cannot make the pass that a stop cut short" in caplog.text
    assert "give PreciseBN a data_loader" in caplog.text


def test_its_time_is_no_iterations(make: Make, clock: Any, record_scalars: Any) -> None:
    """A pass in the middle of a run counts in no iteration's time."""

    def forward(model: nn.Module, batch: Any) -> Any:
        clock.advance(64.0)
        return model(batch[0])

    trainer = make(PreciseBN(interval=2, num_iter=3, forward=forward), max_iters=4)
    seen = record_scalars(trainer)

    trainer.train()

    times = [event.scalars["time"] for event in seen if "time" in event.scalars]
    assert times
    assert max(times) == 0.0


def test_an_error_restores_the_trainer(make: Make) -> None:
    """When the loader raises, model, batch and metrics are the trainer's own again."""

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield torch.randn(3, 2)
            raise OSError("the disk is gone")

    model = model_with_bn()
    trainer = make(PreciseBN(data_loader=Broken()), model=model)
    metrics = trainer.metrics

    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()

    assert trainer.model is model
    assert trainer.metrics is metrics
    assert model.training


def test_not_after_a_failure(make: Make) -> None:
    """When a handler before it failed there is nothing to make precise."""
    ran: list[int] = []

    def fail(trainer: Trainer, event: Any) -> None:
        raise ArithmeticError("overflow")

    for unit in ({"max_epochs": 1}, {"max_iters": 1}):
        trainer = make(PreciseBN(1, 2, forward=lambda model, batch: ran.append(1)), **unit)
        trainer.bus.subscribe(fail, "after_train_epoch" if "max_epochs" in unit else "after_train_iter")
        with pytest.raises(ArithmeticError):
            trainer.train()

    assert ran == []


def test_not_after_an_error(make: Make) -> None:
    """An epoch that an error in the step ended is not made precise on the way out."""
    ran: list[int] = []

    def step(trainer: Trainer, batch: Any) -> Any:
        raise ArithmeticError("overflow")

    trainer = make(PreciseBN(1, 2, forward=lambda model, batch: ran.append(1)), train_step=step)
    with pytest.raises(ArithmeticError):
        trainer.train()

    assert ran == []


# --- stopping ----------------------------------------------------------------------------------------------


def test_a_stop_ends_the_pass(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A stop asked for during the pass is met at the next batch; the running averages stay."""
    before: list[Any] = []
    ran: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        if not ran:
            before.append({name: value.clone() for name, value in model.state_dict().items()})
        ran.append(1)
        if len(ran) == 2:
            trainer.request_stop("preempted")
        return model(batch[0])

    trainer = make(PreciseBN(interval=1, forward=forward), max_epochs=3)
    with caplog.at_level(logging.INFO, "eventloop"):
        trainer.train()

    assert len(ran) == 2
    assert trainer.epoch == 1
    torch.testing.assert_close(
        dict(trainer.model.state_dict()),
        {
            **before[0],
            **{name: value for name, value in trainer.model.state_dict().items() if "num_batches" in name},
        },
    )
    assert "the run is stopping: the running averages stay" in caplog.text


def test_not_after_an_epoch_cut_short(make: Make) -> None:
    """An epoch that a stop cut short is no epoch, and not the end of the run."""
    ran: list[int] = []
    trainer = make(PreciseBN(1, forward=lambda model, batch: ran.append(1)))
    trainer.bus.subscribe(lambda event: trainer.stop("enough"), "after_train_iter", once=True)

    trainer.train()

    assert ran == []


# --- nothing to do, and bad input --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "frozen"])
def test_says_once_that_there_is_nothing_to_do(
    make: Make, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A model without batch norm in training mode gives one warning, when its training begins, and no passes."""

    class Freeze(Hook):
        def before_train_epoch(self, trainer: Trainer, event: Any) -> None:
            """As users freeze layers, which `model.train()` has just thawed."""
            trainer.model[0].eval()  # type: ignore[index]

    layer = nn.Linear(2, 2) if kind == "none" else nn.BatchNorm1d(2)
    trainer = make(PreciseBN(interval=1), Freeze(), model=nn.Sequential(layer, nn.Linear(2, 1)), max_epochs=3)

    trainer.train()

    told = [record.message for record in caplog.records if "PreciseBN" in record.message]
    says = "PreciseBN does nothing: Sequential has no batch norm layer that is in training mode and keeps running"
    assert [line.removesuffix(" statistics") for line in told] == [says]


def test_no_warning_for_a_model_that_was_evaluated(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A model in eval mode before training, which sets the modes, is no reason for a warning."""
    trainer = make(PreciseBN())
    trainer.model.eval()

    trainer.train()

    assert "PreciseBN" not in caplog.text


@pytest.mark.parametrize("interval", [0, -2, 1.5, True])
def test_bad_interval(interval: Any) -> None:
    """An interval that is no positive number of epochs or iterations is refused."""
    with pytest.raises(ValueError, match="interval must be -1, for only at the end, or a positive int, got"):
        PreciseBN(interval=interval)


@pytest.mark.parametrize("num_iter", [0, -1, True, "200"])
def test_bad_num_iter(num_iter: Any) -> None:
    """A number of batches that is none is refused."""
    with pytest.raises(ValueError, match="num_iter must be None, for a whole pass, or a positive int, got"):
        PreciseBN(num_iter=num_iter)


def test_bad_forward() -> None:
    """A forward that cannot be called is refused."""
    with pytest.raises(TypeError, match=r"forward must be a function \(model, batch\), got 3"):
        PreciseBN(forward=3)  # type: ignore[arg-type]


def test_bad_loader() -> None:
    """What is no iterable, and an iterator, which would be used up by the first pass, are refused."""
    with pytest.raises(TypeError, match="data_loader must be an iterable of batches, got 3"):
        PreciseBN(data_loader=3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"data_loader is an iterator \(list_iterator\), which can be run only"
    ):
        PreciseBN(data_loader=iter([torch.zeros(2)]))


def test_train_loader_that_is_an_iterator(make: Make, make_batches: Any) -> None:
    """Batches that training would miss are not taken: refused when the trainer is built, or the loader known."""
    with pytest.raises(TypeError, match="train_loader is an iterator"):
        make(PreciseBN(), train_loader=iter(make_batches(3)))

    trainer = make(PreciseBN(), train_loader=None)
    next(epochs := trainer.epochs())
    with pytest.raises(TypeError, match="the train loader is an iterator"):
        next(trainer.batches(iter(make_batches(3))))
    epochs.close()  # type: ignore[attr-defined]


def test_epochs_in_a_run_of_iterations(make: Make) -> None:
    """An interval in epochs means nothing where there are none."""
    with pytest.raises(ValueError, match=r"PreciseBN\(by_epoch=True\) in a run measured in iterations"):
        make(PreciseBN(by_epoch=True), max_iters=3)


def test_nothing_to_run_on(make: Make) -> None:
    """Called by hand without any loader, it says what to give it."""
    hook = PreciseBN()
    trainer = make(hook, train_loader=None)

    with pytest.raises(ValueError, match="PreciseBN has no data: give it a data_loader"):
        hook.update_stats(trainer)
