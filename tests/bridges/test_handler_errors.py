"""A handler of ours that raises an error at any event, in each of the engines that train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Bus
from eventloop.costs.records import read_costs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EVENTS = (
    "before_run",
    "before_train",
    "before_train_epoch",
    "before_train_iter",
    "before_optimizer_step",
    "after_optimizer_step",
    "after_train_iter",
    "before_val",
    "after_val_iter",
    "after_val_epoch",
    "after_val",
    "after_train_epoch",
    "after_train",
    "after_run",
)


def lightning(work_dir: Path) -> tuple[Bus, Callable[[], object]]:
    """Return the bus of a bridge in Lightning, and a function that trains."""
    from eventloop.bridges.lightning import EventLoopCallback
    from tests.support.lightning import Classifier, loader, make_trainer

    bridge, model = EventLoopCallback(work_dir=work_dir / "attachment"), Classifier()
    trainer = make_trainer(work_dir, bridge, num_sanity_val_steps=0)

    def train() -> None:
        trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        trainer.fit(model, loader(), loader(2))

    return bridge.bus, train


def transformers(work_dir: Path) -> tuple[Bus, Callable[[], object]]:
    """Return the bus of a bridge in Transformers, and a function that trains."""
    from eventloop.bridges.transformers import EventLoopCallback
    from tests.support.transformers_host import host, rows

    bridge = EventLoopCallback(work_dir=work_dir / "attachment")
    return bridge.bus, host(work_dir, bridge, eval_dataset=rows(4), eval_strategy="epoch").train


def ignite(work_dir: Path) -> tuple[Bus, Callable[[], object]]:
    """Return the bus of a bridge in ignite, and a function that trains."""
    import torch
    from ignite.engine import Engine, Events

    from eventloop.bridges.ignite import attach

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    engine = Engine(lambda engine, batch: optimizer.step())
    evaluator = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1, 2]))
    bus = attach(engine, optimizer=optimizer, evaluators={"val": evaluator}, work_dir=work_dir / "attachment")

    def train() -> None:
        engine.state.max_epochs = None
        engine.run(range(4), max_epochs=2)

    return bus, train


def mmengine(work_dir: Path) -> tuple[Bus, Callable[[], object]]:
    """Return the bus of a bridge in MMEngine, and a function that trains."""
    from tests.bridges.test_mmengine import runner  # isort: skip  # silences a warning of torch

    from eventloop.bridges.mmengine import EventLoopHook

    attachment = EventLoopHook(work_dir=work_dir / "attachment")
    ours = runner(work_dir, attachment)

    def train() -> None:
        if ours.epoch:
            ours.train_loop._max_epochs = ours.epoch + 2
        ours.train()

    return attachment.bus, train


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("build", [lightning, transformers, ignite, mmengine])
def test_an_error_of_a_handler(
    tmp_path: Path, build: Callable[[Path], tuple[Bus, Callable[[], object]]], event: str
) -> None:
    """A handler's error ends the engine's run, which is closed; the next run of the engine is whole."""
    pytest.importorskip(build.__name__)
    bus, train = build(tmp_path)
    errors, seen = [OSError("broken")], []

    def fail(trainer: Any, event: Any) -> None:
        if errors:
            raise errors.pop()

    bus.on("*")(lambda each: seen.append(type(each).__name__))
    bus.subscribe(fail, event)

    with pytest.raises(OSError, match="broken"):
        train()

    assert bus.closed
    began = seen.count("BeforeRun")
    train()
    assert seen.count("BeforeRun") == began + 1
    assert seen.count("AfterRun") == seen.count("BeforeRun")
    assert read_costs(tmp_path / "attachment").outcome == "completed"
