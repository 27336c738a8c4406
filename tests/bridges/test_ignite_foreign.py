"""Handlers of pytorch-ignite in this engine's trainer: each has the effect that it has in ignite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite import handlers as ih
from ignite.contrib import handlers as contrib  # where 0.4 has the loggers, and 0.5 has them too
from ignite.engine import Engine, Events
from ignite.handlers import (
    BasicTimeProfiler,
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    FastaiLRFinder,
    HandlersTimeProfiler,
    ModelCheckpoint,
    PiecewiseLinear,
    TerminateOnNan,
    TimeLimit,
    Timer,
)
from ignite.metrics import Accuracy, RunningAverage

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.ignite import attach
from eventloop.bridges.ignite.foreign import evaluates
from tests.support.class_tables import classes_named
from tests.support.trainers import batches, build_trainer, samples, tiny_model

Seen = list[Any]
ORDER = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.TERMINATE,
    Events.COMPLETED,
)
Attach = Callable[[Engine, torch.nn.Module, torch.optim.Optimizer, Seen, Path], object]


def never_run(engine: Engine, batch: Any) -> None:
    raise AssertionError("the engine was run")


def natively(attach: Attach, folder: Path, epochs: int) -> Seen:
    """Train by ignite, with what `attach` attaches, and return what it notes."""
    model, seen = tiny_model(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine: Engine, batch: Any) -> torch.Tensor:
        model.train()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    engine = Engine(step)
    attach(engine, model, optimizer, seen, folder)
    torch.manual_seed(3)
    engine.run(batches(4), max_epochs=epochs)
    return seen


def here(attach: Attach, folder: Path, epochs: int) -> Seen:
    """Train by this engine, with the same attached to an engine that is never run."""
    model, seen = tiny_model(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(never_run)
    attach(engine, model, optimizer, seen, folder)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=batches(4),
        max_epochs=epochs,
        hooks=[Foreign(engine)],
        writers=[],
        work_dir=folder / "run",
        default_hooks={"checkpoint": None},
    )
    torch.manual_seed(3)
    trainer.train()
    trainer.close()
    return seen


def counters(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    for event in reversed(ORDER):
        engine.add_event_handler(
            event,
            lambda e, name=event.name: seen.append(
                (name, e.state.iteration, e.state.epoch, e.state.max_epochs)
            ),
        )


def filters(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    for number, event in enumerate(
        [
            Events.ITERATION_COMPLETED(every=3),
            Events.ITERATION_COMPLETED(once=5),
            Events.EPOCH_COMPLETED(every=2),
            Events.ITERATION_STARTED(event_filter=lambda e, n: n % 4 == 0),
            Events.ITERATION_COMPLETED(before=3, after=1),
            Events.GET_BATCH_COMPLETED(every=2),
        ]
    ):
        engine.add_event_handler(event, lambda e, number=number: seen.append((number, e.state.iteration)))


def removed(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    handle = engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: handle.remove())


def running_average(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.append(round(e.state.metrics["loss"], 6))
    )


def ema(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    handler = EMAHandler(model, momentum=0.5)
    handler.attach(engine)
    engine.add_event_handler(
        Events.COMPLETED,
        lambda: seen.append([round(float(p.sum()), 6) for p in handler.ema_model.parameters()]),
    )


def terminate_on_nan(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    def spoil(e: Engine) -> None:
        if e.state.iteration == 3:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    engine.add_event_handler(Events.ITERATION_STARTED, spoil)
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.iteration))


def early_stopping(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    stopping = EarlyStopping(2, lambda e: -e.state.iteration, engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED, stopping)


def time_limit(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    limit = TimeLimit(1000)
    limit.limit_sec = -1
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED, limit)


def timer(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    clock = Timer(average=True)
    clock.attach(
        engine,
        start=Events.EPOCH_STARTED,
        resume=Events.ITERATION_STARTED,
        pause=Events.ITERATION_COMPLETED,
        step=Events.ITERATION_COMPLETED,
    )
    engine.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: seen.append((clock.step_count, clock.value() > 0))
    )


def schedule(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 0.1), (4, 0.02), (8, 0.05)])
    engine.add_event_handler(Events.ITERATION_STARTED, scheduler)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append(round(optimizer.param_groups[0]["lr"], 6))
    )


def checkpoint(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    where = folder / "saved"
    saver = Checkpoint(
        {"model": model},
        DiskSaver(str(where), create_dir=True, require_empty=False),
        n_saved=2,
        score_function=lambda e: float(e.state.iteration),
        global_step_transform=lambda e, _: e.state.iteration,
    )
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    engine.add_event_handler(
        Events.COMPLETED, lambda: seen.append(sorted(path.name for path in where.iterdir()))
    )


def model_checkpoint(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    where = folder / "saved"
    saver = ModelCheckpoint(str(where), "best", score_function=lambda e: float(e.state.iteration), n_saved=2)
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver, {"model": model})
    engine.add_event_handler(
        Events.COMPLETED, lambda: seen.append(sorted(path.name for path in where.iterdir()))
    )


def epoch_outputs(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    ih.EpochOutputStore().attach(engine, "losses")
    engine.add_event_handler(
        Events.EPOCH_COMPLETED, lambda e: seen.append([round(float(loss), 6) for loss in e.state.losses])
    )


def progress(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    text = StringIO()
    shown = {
        "bar_format": "{desc} {n_fmt}/{total_fmt}{postfix}",
        "file": text,
        "mininterval": 0,
        "miniters": 1,
    }
    contrib.ProgressBar(persist=True, **shown).attach(
        engine, output_transform=lambda loss: {"loss": float(loss)}
    )
    contrib.ProgressBar(desc="epochs", **shown).attach(
        engine, event_name=Events.EPOCH_COMPLETED, closing_event_name=Events.COMPLETED
    )
    engine.add_event_handler(Events.COMPLETED, lambda: seen.append(text.getvalue()))


def tensorboard(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = contrib.TensorboardLogger(log_dir=str(folder / "board"))
    logger.attach_output_handler(
        engine, Events.ITERATION_COMPLETED(every=2), tag="train", output_transform=lambda loss: {"loss": loss}
    )
    logger.attach_opt_params_handler(engine, Events.EPOCH_STARTED, optimizer)

    def record() -> None:
        logger.close()
        found = read.EventAccumulator(str(folder / "board")).Reload()
        for name in ("train/loss", "lr/group_0"):
            seen.append([(each.step, round(each.value, 5)) for each in found.Scalars(name)])

    engine.add_event_handler(Events.COMPLETED, record)


class Halves(ih.ParamScheduler):  # type: ignore[misc]
    """A schedule of one's own for a parameter of the optimizer."""

    def get_param(self) -> float:
        return float(0.1 * 0.5 ** (self.event_index // 4))


class Squares(ih.StateParamScheduler):  # type: ignore[misc]
    """A schedule of one's own for a value in the engine's state."""

    def get_param(self) -> float:
        return float(self.event_index**2)


def rates(make: Callable[[torch.optim.Optimizer], Any]) -> Attach:
    """Return what attaches a scheduler of the learning rate, and notes the rate of each iteration."""

    def attach(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
        engine.add_event_handler(Events.ITERATION_STARTED, make(optimizer))
        engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: seen.append(round(optimizer.param_groups[0]["lr"], 8))
        )

    return attach


def grouped(optimizer: torch.optim.Optimizer) -> Any:
    parts = [PiecewiseLinear(optimizer, name, [(0, 0.1), (6, 0.02)]) for name in ("lr", "weight_decay")]
    return ih.ParamGroupScheduler(parts, ["first", "second"])


def joined(optimizer: torch.optim.Optimizer) -> Any:
    parts = [
        ih.LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.5, 4),
        ih.CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.01, 6),
    ]
    return ih.ConcatScheduler(parts, durations=[5])


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return ih.create_lr_scheduler_with_warmup(after, 0.0, warmup_duration=3, warmup_end_value=0.1)


def plateau(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    def worse(e: Engine) -> None:
        e.state.metrics["score"] = float(e.state.epoch)

    engine.add_event_handler(Events.EPOCH_COMPLETED, worse)
    scheduler = ih.ReduceLROnPlateauScheduler(optimizer, metric_name="score", factor=0.5, patience=0)
    engine.add_event_handler(Events.EPOCH_COMPLETED, scheduler)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(optimizer.param_groups[0]["lr"]))


def state_schedule(make: Callable[..., Any]) -> Attach:
    """Return what attaches a scheduler of a value in the engine's state, and notes the value."""

    def attach(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
        make(param_name="beta", create_new=True, save_history=True).attach(engine, Events.ITERATION_COMPLETED)
        engine.add_event_handler(Events.COMPLETED, lambda e: seen.append(dict(e.state.param_history)))

    return attach


SCHEDULERS: dict[str, Attach] = {
    "CosineAnnealingScheduler": rates(
        lambda optimizer: ih.CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 7)
    ),
    "LinearCyclicalScheduler": rates(
        lambda optimizer: ih.LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.01, 7)
    ),
    "LRScheduler": rates(
        lambda optimizer: ih.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    ),
    "ParamScheduler": rates(lambda optimizer: Halves(optimizer, "lr")),
    "StateParamScheduler": state_schedule(Squares),
    "ConcatScheduler": rates(joined),
    "ParamGroupScheduler": rates(grouped),
    "create_lr_scheduler_with_warmup": rates(warmed),
    "ReduceLROnPlateauScheduler": plateau,
    "LambdaStateScheduler": state_schedule(
        partial(ih.LambdaStateScheduler, lambda_obj=lambda index: index * 0.5)
    ),
    "PiecewiseLinearStateScheduler": state_schedule(
        partial(ih.PiecewiseLinearStateScheduler, milestones_values=[(2, 1.0), (8, 0.0)])
    ),
    "ExpStateScheduler": state_schedule(partial(ih.ExpStateScheduler, initial_value=1.0, gamma=0.9)),
    "StepStateScheduler": state_schedule(
        partial(ih.StepStateScheduler, initial_value=1.0, gamma=0.5, step_size=3)
    ),
    "MultiStepStateScheduler": state_schedule(
        partial(ih.MultiStepStateScheduler, initial_value=1.0, gamma=0.5, milestones=[2, 5])
    ),
}
WORKS: dict[str, Attach] = {
    "counters": counters,
    "filters": filters,
    "a handler that is removed": removed,
    "RunningAverage": running_average,
    "EMAHandler": ema,
    "TerminateOnNan": terminate_on_nan,
    "EarlyStopping": early_stopping,
    "TimeLimit": time_limit,
    "Timer": timer,
    "PiecewiseLinear": schedule,
    "Checkpoint": checkpoint,
    "ModelCheckpoint": model_checkpoint,
    "EpochOutputStore": epoch_outputs,
    "ProgressBar": progress,
    "TensorboardLogger": tensorboard,
    **SCHEDULERS,
}


@pytest.mark.parametrize("attach", WORKS.values(), ids=WORKS.keys())
def test_effect_is_the_same(tmp_path: Path, attach: Attach) -> None:
    """What a handler notes, stops or saves in this engine's trainer is what it does in ignite."""
    expected = natively(attach, tmp_path / "native", epochs=3)

    seen = here(attach, tmp_path / "here", epochs=3)

    assert seen
    assert seen == expected


def terminating(at: Any, call: int, *, skip: bool) -> Attach:
    """Return what notes each event, and terminates the engine at one of them."""

    def attach(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
        calls = iter(range(1, 100))

        def terminate(e: Engine) -> None:
            if next(calls) == call:
                e.terminate(skip) if skip else e.terminate()

        for event in ORDER:
            engine.add_event_handler(event, lambda e, name=event.name: seen.append((name, e.state.epoch)))
        engine.add_event_handler(at, terminate)
        engine.add_event_handler(at, lambda: seen.append("a later handler of the event"))

    return attach


SKIPS = "skip_completed" in signature(Engine.terminate).parameters


@pytest.mark.parametrize("skip", [False, True] if SKIPS else [False], ids=lambda skip: f"skip_{skip}")
@pytest.mark.parametrize("call", [1, 2, 4], ids=["first", "second", "last iteration"])
@pytest.mark.parametrize("at", ORDER, ids=lambda event: event.name)
def test_events_after_terminate(tmp_path: Path, at: Any, call: int, skip: bool) -> None:
    """The events that follow `terminate()`, and their epochs, are those of ignite, whichever event calls it."""
    attach = terminating(at, call, skip=skip)
    expected = natively(attach, tmp_path / "native", epochs=2)

    seen = here(terminating(at, call, skip=skip), tmp_path / "here", epochs=2)

    assert seen == expected


def test_a_stop_of_the_trainer_is_a_termination(tmp_path: Path) -> None:
    """After `trainer.stop` in an epoch, TERMINATE and COMPLETED follow with that epoch, as after `terminate()`."""
    engine, seen = Engine(never_run), Seen()
    for event in ORDER[-3:]:
        engine.add_event_handler(event, lambda e, name=event.name: seen.append((name, e.state.epoch)))
    trainer = build_trainer(tmp_path, hooks=[Foreign(engine)], writers=[])
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter")

    trainer.train()
    trainer.close()

    assert seen == [("TERMINATE", 1), ("COMPLETED", 1)]


def test_a_run_after_a_termination(tmp_path: Path) -> None:
    """A second training calls the handlers again, and a handler of COMPLETED that terminates does not stop it."""
    engine, seen = Engine(never_run), Seen()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.terminate())
    engine.add_event_handler(Events.COMPLETED, lambda: engine.terminate())
    trainer = build_trainer(
        tmp_path, train_loader=batches(4), max_epochs=1, hooks=[Foreign(engine)], writers=[]
    )

    trainer.train()
    first = list(seen)
    trainer.train()
    trainer.close()

    assert first == [1, 2]
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("given", ["both", "the evaluator"])
def test_a_handler_of_an_evaluator_stops_the_training(tmp_path: Path, given: str) -> None:
    """EarlyStopping of an evaluator ends the training after that validation, if its engine is in a Foreign, too."""
    engine, evaluator, seen = Engine(never_run), evaluates(Engine(never_run)), Seen()
    evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(1, lambda e: -len(seen), engine))
    evaluator.add_event_handler(Events.COMPLETED, lambda: seen.append(1))
    hooks = (
        [Foreign(engine), Foreign(evaluator, name="evaluator")] if given == "both" else [Foreign(evaluator)]
    )

    def build() -> Trainer:
        return build_trainer(
            tmp_path, train_loader=batches(4), val_loader=batches(1), max_epochs=5, hooks=hooks, writers=[]
        )

    if given == "both":
        trainer = build()
        trainer.train()
        assert trainer.iter == 8
        assert str(trainer.stop_reason).startswith("EarlyStopping")
    else:
        with pytest.raises(ValueError, match="EarlyStopping controls an ignite engine that is in no Foreign"):
            build()


def test_metrics_and_handlers_of_an_evaluator(tmp_path: Path) -> None:
    """An engine marked as an evaluator computes ignite's metrics in validations, and its handlers see them."""
    model, seen = tiny_model(), Seen()
    evaluator = evaluates(Engine(never_run))
    Accuracy(output_transform=lambda out: (out["preds"], out["target"])).attach(evaluator, "acc")
    evaluator.add_event_handler(
        Events.COMPLETED, lambda e: seen.append((e.state.metrics["acc"], e.state.metrics["accuracy"]))
    )
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(2),
        val_loader=batches(3),
        max_epochs=2,
        hooks=[Foreign(evaluator)],
        writers=[],
        work_dir=tmp_path,
        default_hooks={"checkpoint": None},
    )

    trainer.train()
    trainer.close()

    assert len(seen) == 2
    assert all(theirs == pytest.approx(ours) for theirs, ours in seen)


def test_each_handler_is_a_subscription(tmp_path: Path) -> None:
    """Each handler has a name of its own in the plan."""
    engine = Engine(never_run)
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    model = tiny_model()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(2),
        max_epochs=1,
        hooks=[Foreign(engine, priority=20)],
        writers=[],
        work_dir=tmp_path,
    )

    rows = {row.name: row.priority for row in trainer.bus.plan("after_train_iter")}
    trainer.close()

    assert rows["Engine.TerminateOnNan at ITERATION_COMPLETED (ignite)"] == 20


def test_bad_arguments() -> None:
    """A handler without an engine, a handler that would never be called and an unknown mode are refused."""
    engine, profiled = Engine(never_run), Engine(never_run)
    engine.add_event_handler(Events.GET_BATCH_STARTED, print)
    BasicTimeProfiler().attach(profiled)

    with pytest.raises(
        TypeError, match="Foreign takes an ignite Engine with its handlers, got TerminateOnNan"
    ):
        Foreign(TerminateOnNan())
    with pytest.raises(ValueError, match=r"the engine has a handler of .*GET_BATCH_STARTED"):
        Foreign(engine)
    with pytest.raises(ValueError, match="BasicTimeProfiler attaches its handlers when an engine runs"):
        Foreign(profiled)
    parts = {"model": tiny_model(), "optimizer": torch.optim.SGD(tiny_model().parameters(), lr=0.1)}
    (own := Engine(never_run)).register_events("mine")
    own.add_event_handler("mine", print)
    with pytest.raises(ValueError, match="the engine has a handler of mine, which this trainer never has"):
        Foreign(own)
    HandlersTimeProfiler().attach(profiled := Engine(never_run))
    with pytest.raises(
        ValueError, match=r"HandlersTimeProfiler attaches its handlers .*has the time of each handler"
    ):
        Foreign(profiled)
    FastaiLRFinder().attach(finds := Engine(never_run), parts).__enter__()
    with pytest.raises(ValueError, match=r"FastaiLRFinder attaches its handlers .* trainer\.find_lr\(\)"):
        Foreign(finds)
    attach(bridged := Engine(never_run))
    with pytest.raises(ValueError, match=r"the engine has a bridge by attach\(\)"):
        Foreign(bridged)
    with pytest.raises(ValueError, match='mode must be "val" or "test", got \'train\''):
        evaluates(engine, "train")


@pytest.mark.skipif(not hasattr(ih, "FBResearchLogger"), reason="this ignite has no FBResearchLogger")
def test_a_logger_of_loading_times() -> None:
    """FBResearchLogger, which measures the loading of batches by an engine, is refused by name."""
    ih.FBResearchLogger(logging.getLogger("train")).attach(engine := Engine(never_run), "train")

    with pytest.raises(
        ValueError, match=r"FBResearchLogger measures how an engine loads batches, .*`eventloop report`"
    ):
        Foreign(engine)


@pytest.mark.skipif(not hasattr(ih, "BatchSizeScheduler"), reason="this ignite has no BatchSizeScheduler")
@pytest.mark.parametrize(
    "event", [Events.EPOCH_STARTED, Events.EPOCH_STARTED(every=2)], ids=["every", "filtered"]
)
def test_a_schedule_of_batch_sizes(event: Any) -> None:
    """BatchSizeScheduler is refused by name, because an epoch would have another number of iterations."""
    loader = DataLoader(samples(8), batch_size=2)
    ih.BatchSizeScheduler(loader, lambda index: 2 + index).attach(engine := Engine(never_run), event)

    with pytest.raises(ValueError, match=r"BatchSizeScheduler changes the batches .* ends with its loader"):
        Foreign(engine)


@pytest.mark.parametrize("method", ["terminate_epoch", "interrupt"])
def test_flags_without_an_effect(tmp_path: Path, method: str) -> None:
    """A handler that ends an epoch alone, or interrupts the engine, is an error that names it."""

    def ends(engine: Engine) -> None:
        getattr(engine, method)()

    engine = Engine(never_run)
    engine.add_event_handler(Events.ITERATION_COMPLETED, ends)
    trainer = build_trainer(tmp_path, hooks=[Foreign(engine)], writers=[])

    with pytest.raises(
        RuntimeError, match=rf"ends of an ignite engine called {method}\(\), which has no effect"
    ):
        trainer.train()
    trainer.close()


def test_every_class_is_in_a_table() -> None:
    """Each handler class that ignite exports is in a table of the page, as one that works, is refused or not tried."""
    exported = {
        name
        for module in (ih, contrib)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__.startswith(("ignite.handlers", "ignite.contrib"))
    }

    assert exported - classes_named("ignite.md") == set()


def test_an_engine_among_the_hooks(tmp_path: Path) -> None:
    """An object of another system in `hooks` is refused with the name of its wrapper."""
    with pytest.raises(TypeError, match=r"expected a hook, got Engine of ignite: wrap it, .*Foreign\(Engine"):
        build_trainer(tmp_path, hooks=[Engine(never_run)])
