"""Handlers of pytorch-ignite in this engine's trainer: each has the effect that it has in ignite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, Events
from ignite.handlers import (
    BasicTimeProfiler,
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    FastaiLRFinder,
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
from tests.support.trainers import batches, build_trainer, tiny_model

Seen = list[Any]
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
        model, optimizer=optimizer, loss_fn=F.cross_entropy, train_loader=batches(4), max_epochs=epochs,
        hooks=[Foreign(engine)], writers=[], work_dir=folder / "run", default_hooks={"checkpoint": None},
    )  # fmt: skip
    torch.manual_seed(3)
    trainer.train()
    trainer.close()
    return seen


def counters(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    for event in (
        Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED, Events.COMPLETED,
    ):  # fmt: skip
        engine.add_event_handler(
            event,
            lambda e, name=event.name: seen.append(
                (name, e.state.iteration, e.state.epoch, e.state.max_epochs)
            ),
        )


def filters(engine: Engine, model: Any, optimizer: Any, seen: Seen, folder: Path) -> None:
    for number, event in enumerate([
        Events.ITERATION_COMPLETED(every=3), Events.ITERATION_COMPLETED(once=5), Events.EPOCH_COMPLETED(every=2),
        Events.ITERATION_STARTED(event_filter=lambda e, n: n % 4 == 0), Events.ITERATION_COMPLETED(before=3, after=1),
    ]):  # fmt: skip
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
        engine, start=Events.EPOCH_STARTED, resume=Events.ITERATION_STARTED, pause=Events.ITERATION_COMPLETED,
        step=Events.ITERATION_COMPLETED,
    )  # fmt: skip
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
        {"model": model}, DiskSaver(str(where), create_dir=True, require_empty=False), n_saved=2,
        score_function=lambda e: float(e.state.iteration), global_step_transform=lambda e, _: e.state.iteration,
    )  # fmt: skip
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    engine.add_event_handler(
        Events.COMPLETED, lambda: seen.append(sorted(path.name for path in where.iterdir()))
    )


WORKS: dict[str, Attach] = {
    "counters": counters, "filters": filters, "a handler that is removed": removed, "RunningAverage": running_average,
    "EMAHandler": ema, "TerminateOnNan": terminate_on_nan, "EarlyStopping": early_stopping, "TimeLimit": time_limit,
    "Timer": timer, "PiecewiseLinear": schedule, "Checkpoint": checkpoint,
}  # fmt: skip


@pytest.mark.parametrize("attach", WORKS.values(), ids=WORKS.keys())
def test_effect_is_the_same(tmp_path: Path, attach: Attach) -> None:
    """What a handler notes, stops or saves in this engine's trainer is what it does in ignite."""
    expected = natively(attach, tmp_path / "native", epochs=3)

    seen = here(attach, tmp_path / "here", epochs=3)

    assert seen
    assert seen == expected


def test_metrics_and_handlers_of_an_evaluator(tmp_path: Path) -> None:
    """An engine marked as an evaluator computes ignite's metrics in validations, and its handlers see them."""
    model, seen = tiny_model(), Seen()
    evaluator = evaluates(Engine(never_run))
    Accuracy(output_transform=lambda out: (out["preds"], out["target"])).attach(evaluator, "acc")
    evaluator.add_event_handler(
        Events.COMPLETED, lambda e: seen.append((e.state.metrics["acc"], e.state.metrics["accuracy"]))
    )
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=batches(2), val_loader=batches(3), max_epochs=2, hooks=[Foreign(evaluator)], writers=[],
        work_dir=tmp_path, default_hooks={"checkpoint": None},
    )  # fmt: skip

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
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=batches(2), max_epochs=1, hooks=[Foreign(engine, priority=20)], writers=[], work_dir=tmp_path,
    )  # fmt: skip

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
    FastaiLRFinder().attach(finds := Engine(never_run), parts).__enter__()
    with pytest.raises(ValueError, match=r"FastaiLRFinder attaches its handlers .* trainer\.find_lr\(\)"):
        Foreign(finds)
    attach(bridged := Engine(never_run))
    with pytest.raises(ValueError, match=r"the engine has a bridge by attach\(\)"):
        Foreign(bridged)
    with pytest.raises(ValueError, match='mode must be "val" or "test", got \'train\''):
        evaluates(engine, "train")


def test_an_engine_among_the_hooks(tmp_path: Path) -> None:
    """An object of another system in `hooks` is refused with the name of its wrapper."""
    with pytest.raises(TypeError, match=r"expected a hook, got Engine of ignite: wrap it, .*Foreign\(Engine"):
        build_trainer(tmp_path, hooks=[Engine(never_run)])
