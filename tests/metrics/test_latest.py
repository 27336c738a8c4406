"""`trainer.metrics.latest()`: the newest values, as a person and as a program reads them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eventloop.metrics import EventStorage
from tests.support.trainers import MakeTrainer, batches


@pytest.fixture
def storage() -> EventStorage:
    """Twelve iterations of a loss, the last of them ln 2."""
    storage = EventStorage()
    for storage.iter in range(12):
        storage.put_scalar("loss", torch.tensor(math.log(2), dtype=torch.float64))
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
    return storage


def test_a_value_says_what_it_is(storage: EventStorage) -> None:
    """It has a value and a step, the completed iterations, and prints as both; also within its mapping."""
    loss = storage.latest()["loss"]

    storage.put_scalar("loss", 5.0)
    median = storage.latest_with_smoothing_hint(3)["loss"]

    assert (loss.value, loss.step) == (median.value, median.step) == (math.log(2), 12)
    assert f"{loss}" == str(loss) == "0.693147 (step 12)"
    assert str(storage.latest()) == "{'loss': 5 (step 12), 'lr': 0.1 (step 12)}"


def test_a_value_is_a_number(storage: EventStorage) -> None:
    """It converts to a float, formats as one, and compares with numbers, as `latest()["loss"] < 0.3` in a handler."""
    loss = storage.latest()["loss"]

    assert float(loss) == math.log(2)
    assert f"{loss:.3f}" == "0.693"
    assert (loss < 1, loss <= math.log(2), loss > 1, loss >= 0.5) == (True, True, False, True)


def test_a_value_is_detectron2_s_pair(storage: EventStorage) -> None:
    """The value and the 0-based iteration, by place and by unpacking."""
    value, iteration = storage.latest()["loss"]

    assert (value, iteration) == storage.latest()["loss"] == (math.log(2), 11)
    assert storage.latest()["loss"][0] == value


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_is_the_same(storage: EventStorage, copied: Callable[[Any], Any]) -> None:
    """Copies and pickles keep the step."""
    loss = copied(storage.latest()["loss"])

    assert (loss.value, loss.step, loss) == (math.log(2), 12, (math.log(2), 11))


def test_the_step_is_that_of_the_logs(make_trainer: MakeTrainer) -> None:
    """A loss counts its own iteration; a score of the validation after it does not count another one."""
    trainer = make_trainer(train_loader=batches(3), val_loader=batches(1), max_epochs=1)
    trainer.bus.subscribe(lambda trainer, event: trainer.metrics.put_scalar("score", 1.0), "after_val_epoch")
    with trainer.bus.capture("scalars_logged") as seen:
        trainer.train()
    steps = {name: event.step for event in seen for name in event.scalars}  # type: ignore[attr-defined]

    latest = trainer.metrics.latest()
    assert (latest["loss"].step, latest["score"].step) == (3, 3)
    assert all(value.step == steps[name] for name, value in latest.items())


@pytest.mark.parametrize(
    "read", [EventStorage.latest, EventStorage.latest_with_smoothing_hint, EventStorage.histories]
)
def test_a_misspelled_name_gets_a_suggestion(
    storage: EventStorage, read: Callable[[EventStorage], dict[str, Any]]
) -> None:
    """The error has the known names too; `get` and `in` are those of every mapping."""
    values = read(storage)

    with pytest.raises(KeyError, match=r"no scalar 'los': did you mean 'loss'\?; known are loss, lr"):
        values["los"]
    assert (values.get("los"), "los" in values) == (None, False)
