"""LoggerHook(custom_cfg=...): other statistics of what is logged than the mean of the interval."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook
from eventloop.training.trainer import Trainer

Log = Callable[..., list[tuple[int, dict[str, float]]]]


class Counting:
    """Puts the number of the iteration, and its half only in odd ones."""

    def __call__(self, trainer: Trainer, event: Any) -> None:
        trainer.metrics.put_scalar("x", float(event.iter))
        if event.iter % 2:
            trainer.metrics.put_scalar("odd", event.iter / 2)


@pytest.fixture
def log(
    make_trainer: Callable[..., Trainer], record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> Log:
    """Train two epochs of six iterations with a log each third; return what was logged of `x` and `odd`, by step."""

    def train(*custom_cfg: dict[str, Any], **options: Any) -> list[tuple[int, dict[str, float]]]:
        options = {"max_epochs": 2, **options}
        trainer = make_trainer(batches=6, hooks=[LoggerHook(3, custom_cfg=custom_cfg)], **options)
        trainer.bus.subscribe(Counting(), "after_train_iter")
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


def test_without_a_name_it_takes_the_place_of_the_mean(log: Log) -> None:
    """An entry without `log_name` is what is logged of its source."""
    logged = log({"data_src": "x", "method_name": "max", "window_size": "global"})

    assert values_of("x", logged) == [2, 5, 8, 11]


def test_it_is_said_where_its_source_was_last_put(log: Log) -> None:
    """The statistic stands at the step of the last value of its source in the interval."""
    logged = log({"data_src": "odd", "method_name": "current", "log_name": "half"})

    assert [(step, s["half"]) for step, s in logged if "half" in s] == [
        (2, 0.5),
        (6, 2.5),
        (8, 3.5),
        (12, 5.5),
    ]


def test_a_source_that_is_not_there_says_nothing(log: Log) -> None:
    """Intervals in which nothing was put under the source have no statistic."""
    assert values_of("y", log({"data_src": "never", "log_name": "y"})) == []


def test_names_that_are_logged_at_each_value(log: Log) -> None:
    """A name without a smoothing hint has one value an interval where a statistic takes its place."""
    trainer_log = log({"data_src": "lr", "method_name": "max", "log_name": "y"})

    assert values_of("y", trainer_log) == [0.125] * 4


def test_validations_are_left_alone(
    make_trainer: Callable[..., Trainer],
    make_batches: Any,
    record_scalars: Callable[[Trainer], list[ScalarsLogged]],
) -> None:
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
    ("config", "error", "message"),
    [
        ("loss", TypeError, r"an entry of custom_cfg must be a dict\(data_src=..., ...\), got 'loss'"),
        ({"data_scr": "x"}, ValueError, "an entry of custom_cfg has no 'data_scr': did you mean 'data_src'"),
        (
            {"method_name": "mean"},
            ValueError,
            "an entry of custom_cfg needs data_src, .*, got {'method_name': 'mean'}",
        ),
        (
            {"data_src": "x", "method_name": "maen"},
            ValueError,
            "method_name must be one of mean, .*'maen': did you mean",
        ),
        (
            {"data_src": "x", "window_size": 0},
            ValueError,
            'window_size must be a positive int, "epoch" or "global", got 0',
        ),
        (
            {"data_src": "x", "window_size": True},
            ValueError,
            "window_size must be a positive int, .*, got True",
        ),
        (
            {"data_src": "x", "method_name": "median"},
            ValueError,
            "method_name='median' needs the values",
        ),
    ],
)
def test_bad_entries(config: Any, error: type[Exception], message: str) -> None:
    """What an entry says that is not there is refused at the line that wrote it."""
    with pytest.raises(error, match=message):
        LoggerHook(custom_cfg=[config])


def test_two_of_one_name() -> None:
    """Two statistics cannot be logged under one name."""
    with pytest.raises(ValueError, match="two statistics that are logged as 'x': give one a log_name"):
        LoggerHook(custom_cfg=[{"data_src": "x"}, {"data_src": "x", "method_name": "max"}])


def test_a_name_that_is_a_source() -> None:
    """A new name that is another entry's source would mix the two."""
    with pytest.raises(
        ValueError, match="log_name='y' of custom_cfg is the name of a logged scalar: choose another"
    ):
        LoggerHook(custom_cfg=[{"data_src": "x", "log_name": "y"}, {"data_src": "y", "log_name": "z"}])


def test_epochs_in_a_run_of_iterations(make_trainer: Callable[..., Trainer]) -> None:
    """A window of an epoch needs epochs."""
    hook = LoggerHook(custom_cfg=[{"data_src": "x", "window_size": "epoch"}])
    with pytest.raises(
        ValueError, match='custom_cfg has window_size="epoch", and a run measured in iterations has no'
    ):
        make_trainer(max_iters=3, hooks=[hook])
