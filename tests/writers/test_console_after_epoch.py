"""Values that a handler puts after an epoch have a console line of their own step."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.writers import ConsoleWriter
from tests.support.trainers import batches, build_trainer


def _lines(event: str, tmp_path: Any, mode: str = "train", **options: Any) -> list[str]:
    """Train with a handler that puts `mine` at an event, and return the console's lines of a mode."""
    stream = io.StringIO()
    trainer = build_trainer(
        tmp_path, writers=[ConsoleWriter(interval=1, progress=False, stream=stream)], **options
    )

    def put(trainer: Trainer, event: Any) -> None:
        trainer.metrics.put_scalar("mine", trainer.epoch + 0.5)

    trainer.bus.subscribe(put, event)
    trainer.train()
    trainer.close()
    return [line for line in stream.getvalue().splitlines() if f"({mode})" in line]


def test_each_epoch_has_its_own_line(tmp_path: Any) -> None:
    """The value of epoch 1 is printed at its last iteration, not in a line of epoch 2."""
    lines = _lines("after_train_epoch", tmp_path, train_loader=batches(20), max_epochs=2)

    assert [line for line in lines if "mine" in line] == [
        "Epoch(train) [1][20/20]  mine: 0.5000",
        "Epoch(train) [2][20/20]  mine: 1.5000",
    ]
    assert [line.split("  ")[0] for line in lines] == [
        "Epoch(train) [1][10/20]",
        "Epoch(train) [1][20/20]",
        "Epoch(train) [1][20/20]",
        "Epoch(train) [2][10/20]",
        "Epoch(train) [2][20/20]",
        "Epoch(train) [2][20/20]",
    ]


@pytest.mark.parametrize("unit", [{"max_epochs": 1}, {"max_iters": 20}], ids=str)
def test_the_last_line_has_no_empty_columns(unit: dict[str, Any], tmp_path: Any) -> None:
    """A value that is put at the end of the training is not behind 140 blanks."""
    last = _lines("after_train", tmp_path, train_loader=batches(20), **unit)[-1]

    assert re.fullmatch(r"(Epoch\(train\) \[1\]|Iter\(train\) )\[20/20\]  mine: [01]\.5000", last)


def test_a_value_after_a_validation_has_no_empty_columns(tmp_path: Any) -> None:
    """It has a line of its own, without the columns of the validation's scores, in each epoch."""
    loaders = {"train_loader": batches(4), "val_loader": batches(2)}

    lines = _lines("after_val_epoch", tmp_path, "val", max_epochs=3, **loaders)

    assert [line for line in lines if "mine" in line] == [
        f"Epoch(val) [{epoch}]  mine: {epoch}.5000" for epoch in (1, 2, 3)
    ]
