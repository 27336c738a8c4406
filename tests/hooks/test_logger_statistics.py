"""LoggerHook(custom_cfg=...): other statistics of what is logged than the mean of the interval."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import LoggerHook
from tests.hooks.conftest import Make, Record

Log = Callable[..., list[tuple[int, dict[str, float]]]]


def count(trainer: Trainer, event: Any) -> None:
    """Put the number of the iteration, and its half only in odd ones."""
    trainer.metrics.put_scalar("x", float(event.iter))
    if event.iter % 2:
        trainer.metrics.put_scalar("odd", event.iter / 2)


@pytest.fixture
def log(make_trainer: Make, record_scalars: Record) -> Log:
    """Train two epochs of six iterations with a log each third; return what was logged of `x` and `odd`, by step."""

    def train(*custom_cfg: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
        trainer = make_trainer(batches=6, max_epochs=2, hooks=[LoggerHook(3, custom_cfg=custom_cfg)])
        trainer.bus.subscribe(count, "after_train_iter")
        seen = record_scalars(trainer)
        trainer.train()
        wanted = ("x", "odd", *(entry["log_name"] for entry in custom_cfg if "log_name" in entry))
        return [
            (event.step, {name: value for name, value in event.scalars.items() if name in wanted})
            for event in seen
            if event.mode == "train" and any(name in event.scalars for name in wanted)
        ]

    return train


def values_of(name: str, logged: list[tuple[int, dict[str, float]]]) -> list[float]:
    """What was logged under a name."""
    return [scalars[name] for _, scalars in logged if name in scalars]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("method", "window", "expected"),
    [
        ("mean", 4, [1.0, 3.5, 6.5, 9.5]),
        ("median", 5, [1.0, 3.0, 6.0, 9.0]),
        ("min", 4, [0, 2, 5, 8]),
        ("max", "global", [2, 5, 8, 11]),
        ("min", "global", [0, 0, 0, 0]),
        ("mean", "global", [1.0, 2.5, 4.0, 5.5]),
        ("mean", "epoch", [1.0, 2.5, 7.0, 8.5]),
        ("min", "epoch", [0, 0, 6, 6]),
        ("current", "global", [2, 5, 8, 11]),
        (sum, 2, [3, 9, 15, 21]),
    ],
)
def test_methods_and_windows(log: Log, method: Any, window: Any, expected: list[float]) -> None:
    """Each log has the statistic of the window that ends with it, under the new name, beside the mean of the interval."""
    logged = log({"data_src": "x", "method_name": method, "window_size": window, "log_name": "y"})

    assert values_of("y", logged) == expected
    assert values_of("x", logged) == [1, 4, 7, 10]


@pytest.mark.parametrize(
    ("source", "method", "expected"),
    [
        ("x", "max", [(3, 2.0), (6, 5.0), (9, 8.0), (12, 11.0)]),
        ("odd", "current", [(2, 0.5), (6, 2.5), (8, 3.5), (12, 5.5)]),
    ],
)
def test_without_a_name_it_takes_the_place_of_the_mean(
    log: Log, source: str, method: str, expected: list[tuple[int, float]]
) -> None:
    """Of its source, at the step of the last value of its source in the interval."""
    logged = log({"data_src": source, "method_name": method, "window_size": "global"})

    assert [(step, scalars[source]) for step, scalars in logged if source in scalars] == expected


@pytest.mark.parametrize(("source", "expected"), [("never", []), ("lr", [0.125] * 4)])
def test_one_value_an_interval_in_which_the_source_was_put(
    log: Log, source: str, expected: list[float]
) -> None:
    """A source that is logged at each value, without a smoothing hint, has one, too."""
    assert values_of("y", log({"data_src": source, "method_name": "max", "log_name": "y"})) == expected


def test_validations_are_left_alone(make_trainer: Make, make_batches: Any, record_scalars: Record) -> None:
    """What a validation logs under the same name is its own."""
    hook = LoggerHook(3, custom_cfg=[{"data_src": "loss", "method_name": "max"}])
    trainer = make_trainer(hooks=[hook], val_loader=make_batches(1))
    seen = record_scalars(trainer)
    loss = trainer.val()["loss"]
    trainer.train()

    assert next(event for event in seen if event.mode == "val").scalars == {"loss": loss}


def test_a_function_that_fails_leaves_the_mean(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """An error of a function of the user's is told once, and the log goes on without its statistic."""

    def fails(values: Any) -> float:
        raise ArithmeticError("no")

    with caplog.at_level(logging.ERROR, "eventloop"):
        logged = log({"data_src": "x", "method_name": fails, "window_size": 2})

    assert values_of("x", logged) == [1, 4, 7, 10]
    assert [record.getMessage() for record in caplog.records] == [
        "the statistic x of custom_cfg failed, and is not logged"
    ]


@pytest.mark.parametrize(
    ("custom_cfg", "message"),
    [
        ([{"data_src": "x"}, {"data_src": "x", "method_name": "max"}], "two statistics .* logged as 'x'"),
        ([{"data_src": "x", "log_name": "y"}, {"data_src": "y", "log_name": "z"}], "log_name='y' .*: choose"),
        ([{"data_src": "x", "window_size": "epoch"}], 'window_size="epoch", .* run measured in iterations'),
    ],
)
def test_entries_that_contradict_are_refused(
    make_trainer: Make, custom_cfg: list[dict[str, Any]], message: str
) -> None:
    """Two under one name, a name that is another's source, and a window of an epoch in a run without epochs."""
    with pytest.raises(ValueError, match=message):
        make_trainer(max_iters=3, hooks=[LoggerHook(custom_cfg=custom_cfg)])
