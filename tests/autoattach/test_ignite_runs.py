"""Which engines of ignite train, and what they train."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop.autoattach.ignite_runs import trained_parts
from tests.support.ignite_host import handlers_of
from tests.support.trainers import batches, tiny_model

model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()


def step(engine: Any, batch: Any) -> None:
    """Train the variables of this module."""
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Training:
    """A process function as a method."""

    def __init__(self) -> None:
        self.net, self.optim, self.other = model, optimizer, torch.nn.Linear(1, 1)

    def step(self, engine: Any, batch: Any) -> None:
        """Train the attributes."""


def given(engine: Any, batch: Any, net: Any, optim: Any) -> None:
    """Train the arguments."""


@pytest.mark.parametrize("function", [step, Training().step, partial(given, net=model, optim=optimizer)])
def test_the_parts_that_a_function_trains(function: Any) -> None:
    """Variables, attributes and arguments are looked through; the module has the optimizer's parameters."""
    assert trained_parts(function) == (model, optimizer)


def test_parts_that_are_not_to_be_seen() -> None:
    """A function without an optimizer has no parts; several optimizers have their names."""
    two = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2)]

    assert trained_parts(lambda engine, batch: model(batch)) == (None, None)
    assert trained_parts(partial(given, net=two[0], optim=two[1])).optimizer == {
        "net": two[0],
        "optim": two[1],
    }


def test_an_evaluator_is_found_by_its_nesting(tmp_path: Path) -> None:
    """It may run before the training and after it, too; a run within the training emits a validation."""
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    from eventloop.autoattach.attacher import Attacher
    from eventloop.autoattach.hosts import attached
    from eventloop.autoattach.options import RunOptions
    from eventloop.writers import read_jsonl

    run_of_the_class = Engine.run
    attacher = Attacher(RunOptions(work_dir=str(tmp_path)))
    with attached(attacher):
        evaluator = create_supervised_evaluator(model, metrics={"nll": Loss(F.cross_entropy)})
        trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches(1)))
        evaluator.run(batches(1))
        trainer.run(batches(2), max_epochs=2)
        evaluator.run(batches(1))

    assert [*attacher.summaries] == [tmp_path]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl") if "nll" in line] == [2, 4]
    assert Engine.run is run_of_the_class


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_engine_is_as_the_script_made_it(tmp_path: Path, evaluates: bool) -> None:
    """An engine has the script's handlers alone, in and after runs, and is freed with its last reference."""
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    from ignite.engine import Engine, Events

    from eventloop.autoattach.attacher import Attacher
    from eventloop.autoattach.hosts import attached
    from eventloop.autoattach.options import RunOptions
    from eventloop.costs.records import read_costs

    attacher = Attacher(RunOptions(work_dir=str(tmp_path)))
    counts: list[int] = []
    with attached(attacher):
        engine, evaluator = Engine(lambda engine, batch: 0.5), Engine(lambda engine, batch: None)
        if evaluates:
            engine.add_event_handler(Events.EPOCH_COMPLETED, run_inside, evaluator)
        engine.add_event_handler(Events.EPOCH_COMPLETED, count_handlers, counts)
        engine.run(range(10), max_epochs=2)
        counts.append(handlers_of(engine))
        gone = weakref.ref(engine)
        gc.collect()
        gc.disable()
        try:
            del engine
            assert gone() is None
        finally:
            gc.enable()

    assert counts == [1 + evaluates] * 3
    assert read_costs(tmp_path).complete


def count_handlers(engine: Any, counts: list[int]) -> None:
    """Note the number of an engine's handlers."""
    counts.append(handlers_of(engine))


def run_inside(engine: Any, evaluator: Any) -> None:
    """Evaluate within the training."""
    evaluator.run(range(2))
