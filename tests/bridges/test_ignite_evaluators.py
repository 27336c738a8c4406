"""Evaluations within an ignite training: which data they are of, and under which names they are logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, Events

from eventloop.bridges.ignite import attach
from eventloop.writers import JSONLWriter


def rows_of(path: Path) -> list[tuple[str, int, float]]:
    """Return the mode, step and accuracy of each row that has one."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [(line["mode"], line["step"], line["accuracy"]) for line in lines if "accuracy" in line]


@pytest.mark.parametrize("other_loader", [False, True], ids=["same loader", "same data set"])
def test_one_evaluator_over_training_and_validation_data(tmp_path: Path, other_loader: bool) -> None:
    """Its runs over the data of the training have a mode of their own, and only the others are validations."""
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    train, val = torch.utils.data.DataLoader(data), [1]
    again = torch.utils.data.DataLoader(data, batch_size=2) if other_loader else train
    engine, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    bus = attach(engine, evaluators={"val": evaluator}, writers=[JSONLWriter()], work_dir=tmp_path)
    accuracies = iter([0.9, 0.5, 0.95, 0.6])
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(accuracy=next(accuracies))
    )
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(again))
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(val))
    seen: list[Any] = []
    bus.on("after_val_epoch")(lambda trainer, event: seen.append(dict(event.metrics)))

    engine.run(train, max_epochs=2)

    assert rows_of(tmp_path) == [
        ("train_data", 4, 0.9),
        ("val", 4, 0.5),
        ("train_data", 8, 0.95),
        ("val", 8, 0.6),
    ]
    assert seen == [{"accuracy": 0.5}, {"accuracy": 0.6}]


def test_two_runs_at_one_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second of two runs of an evaluator at one step has a mode of its own, which a line of the log names."""
    engine, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    attach(engine, evaluators={"val": evaluator}, writers=[JSONLWriter()], work_dir=tmp_path)
    accuracies = iter([0.5, 0.7, 0.6, 0.8])
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(accuracy=next(accuracies))
    )
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: [evaluator.run([data]) for data in (1, 2)])

    with caplog.at_level(logging.WARNING, "eventloop"):
        engine.run(range(3), max_epochs=2)

    assert rows_of(tmp_path) == [("val", 3, 0.5), ("val_2", 3, 0.7), ("val", 6, 0.6), ("val_2", 6, 0.8)]
    assert sum("'val_2'" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("source", ["engine.state.metrics", "an evaluator"])
def test_a_metric_with_the_name_of_an_output(tmp_path: Path, source: str) -> None:
    """A metric of an epoch with the name of a step's output has a prefix, as the step has that name already."""
    engine, evaluator = Engine(lambda engine, batch: {"accuracy": 0.25}), Engine(lambda engine, batch: None)
    metrics, prefix = (engine, "epoch") if source == "engine.state.metrics" else (evaluator, "evaluated")
    metrics.add_event_handler(
        Events.EPOCH_COMPLETED,
        lambda engine: engine.state.metrics.update(accuracy=0.75),
    )
    attach(engine, evaluators={"train": evaluator}, writers=[JSONLWriter()], work_dir=tmp_path)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))

    engine.run(range(10), max_epochs=1)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines if "accuracy" in line] == [0.25]
    assert {line.get(f"{prefix}/accuracy") for line in lines} == {None, 0.75}


def test_an_evaluator_that_is_interrupted(tmp_path: Path) -> None:
    """An evaluation that is interrupted, and goes on, and one that ends without COMPLETED, train as without."""
    engine, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    bus = attach(engine, evaluators={"val": evaluator}, work_dir=tmp_path)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: evaluator.interrupt())
    evaluator.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: evaluator.terminate(skip_completed=True)
    )
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run(range(3), max_epochs=2))
    opened: list[str] = []
    bus.on("before_val", "after_val")(lambda trainer, event: opened.append(type(event).__name__))

    engine.run(range(4), max_epochs=1)

    assert engine.state.iteration == 4
    assert opened[::2].count("BeforeVal") == opened[1::2].count("AfterVal") == len(opened) / 2
