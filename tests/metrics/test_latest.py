"""`trainer.metrics.latest()`: the newest values, as a person and as a program reads them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop.metrics import EventStorage
from eventloop.training.trainer import Trainer


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

    assert (loss.value, loss.step) == (math.log(2), 12)
    assert f"{loss}" == str(loss) == "0.693147 (step 12)"
    assert str(storage.latest()) == "{'loss': 0.693147 (step 12), 'lr': 0.1 (step 12)}"


def test_a_value_is_a_number(storage: EventStorage) -> None:
    """`float` takes it, and a format of a number."""
    loss = storage.latest()["loss"]

    assert float(loss) == math.log(2)
    assert f"{loss:.3f}" == "0.693"


def test_a_value_is_compared_with_numbers(storage: EventStorage) -> None:
    """As `latest()["loss"] < 0.3` in a handler."""
    loss = storage.latest()["loss"]

    assert (loss < 1, loss <= math.log(2), loss > 1, loss >= 0.5) == (True, True, False, True)
    assert (loss < 1, loss >= 0.5) == (True, True)


def test_a_value_is_detectron2_s_pair(storage: EventStorage) -> None:
    """The value and the 0-based iteration, by place and by unpacking."""
    value, iteration = storage.latest()["loss"]

    assert (value, iteration) == storage.latest()["loss"] == (math.log(2), 11)
    assert storage.latest()["loss"][0] == value


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_is_the_same(storage: EventStorage, copied: Callable[[Any], Any]) -> None:
    """Also in another process."""
    loss = copied(storage.latest()["loss"])

    assert (loss.value, loss.step, loss) == (math.log(2), 12, (math.log(2), 11))


def test_the_median_has_the_step(storage: EventStorage) -> None:
    """`latest_with_smoothing_hint` returns the same kind of value."""
    storage.put_scalar("loss", 5.0)

    loss = storage.latest_with_smoothing_hint(3)["loss"]

    assert (loss.value, loss.step) == (math.log(2), 12)


def test_the_step_is_that_of_the_logs(tmp_path: Path) -> None:
    """A loss counts its own iteration, a score of the validation behind it does not count another one."""
    x = torch.ones(8, 1)
    model = torch.nn.Linear(1, 2)
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=[(x, x[:, 0].long())] * 3, val_loader=[(x, x[:, 0].long())], max_epochs=1, work_dir=tmp_path,
        default_hooks={"checkpoint": None},
    )  # fmt: skip
    steps: dict[str, int] = {}
    trainer.bus.subscribe(
        lambda event: steps.update(dict.fromkeys(event.scalars, event.step)),
        "scalars_logged",
        offload="thread",
    )
    trainer.bus.subscribe(lambda trainer, event: trainer.metrics.put_scalar("score", 1.0), "after_val_epoch")
    trainer.train()
    trainer.close()

    latest = trainer.metrics.latest()
    assert (latest["loss"].step, latest["score"].step) == (3, 3)
    assert all(value.step == steps[name] for name, value in latest.items())


@pytest.mark.parametrize(
    "read", [EventStorage.latest, EventStorage.latest_with_smoothing_hint, EventStorage.histories]
)
def test_a_misspelled_name_gets_a_suggestion(
    storage: EventStorage, read: Callable[[EventStorage], dict[str, Any]]
) -> None:
    """And the names there are; `get` and `in` are those of every mapping."""
    values = read(storage)

    with pytest.raises(KeyError, match=r"no scalar 'los': did you mean 'loss'\?; known are loss, lr"):
        values["los"]
    assert (values.get("los"), "los" in values) == (None, False)


def test_a_name_is_asked_for_too_early() -> None:
    """That nothing was put yet is said."""
    with pytest.raises(KeyError, match="no scalar 'loss': nothing was put yet"):
        EventStorage().latest()["loss"]
