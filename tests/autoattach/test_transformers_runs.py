"""A bridge in each Transformers trainer, which the program does not see between calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

from eventloop.autoattach.attacher import Attacher
from eventloop.autoattach.hosts import attached
from eventloop.autoattach.options import RunOptions
from eventloop.bridges.transformers import EventLoopCallback
from eventloop.writers import read_jsonl
from tests.support.transformers_host import host, rows


class Seeing(TrainerCallback):
    """Note the bridges that a program sees within a training."""

    def __init__(self) -> None:
        self.bridges: list[int] = []
        self.trainer: Any = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the bridges among the callbacks."""
        self.bridges.append(bridges(self.trainer))


def bridges(trainer: Any) -> int:
    """The number of bridges among a trainer's callbacks."""
    return sum(isinstance(each, EventLoopCallback) for each in trainer.callback_handler.callbacks)


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[None]:
    """Attach a bridge to each trainer that is made in the test."""
    with attached(Attacher(RunOptions(work_dir=str(tmp_path / "attachment")))):
        yield


@pytest.mark.usefixtures("attach")
def test_the_callbacks_are_the_programs_between_calls(tmp_path: Path) -> None:
    """Between calls a trainer has the callbacks that the program gave it; each call is recorded."""
    seeing = Seeing()
    trainer = host(tmp_path / "host", seeing, eval_dataset=rows(4), eval_strategy="epoch")
    seeing.trainer = trainer
    given = list(trainer.callback_handler.callbacks)

    assert bridges(trainer) == 0
    assert [type(each) for each in given][:1] == DEFAULT_CALLBACKS
    trainer.train()
    trainer.evaluate()

    assert seeing.bridges == [1, 1]
    assert trainer.callback_handler.callbacks == given
    lines = list(read_jsonl(tmp_path / "attachment" / "metrics.jsonl"))
    assert sum("lr" in line for line in lines) == 2
    assert sum("eval_loss" in line for line in lines) == 3


@pytest.mark.usefixtures("attach")
def test_a_second_bridge_is_refused(tmp_path: Path) -> None:
    """A bridge that the program adds later is refused, although it does not see the first."""
    trainer = host(tmp_path / "host")

    with pytest.raises(ValueError, match="expected one EventLoopCallback in a Trainer, got two"):
        trainer.add_callback(EventLoopCallback())

    assert bridges(trainer) == 0
    trainer.add_callback(Seeing())
