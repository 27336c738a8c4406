"""The bus in a runner of MMEngine that does not train, or whose loop is the program's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

from torch.utils.data import Dataset

from tests.bridges.test_mmengine import Accuracy, loader, runner  # isort: skip  # silences a warning of torch

from eventloop.bridges.mmengine import EventLoopHook
from eventloop.costs.records import read_costs

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind


class Missing(Dataset[Any]):
    """Training data that is not on this machine."""

    def __init__(self) -> None:
        raise FileNotFoundError("train.json")


def without_training_data(work_dir: Path, *hooks: Any) -> Any:
    """Return a runner whose training data is not there, with data to validate and to test."""
    data = {
        "batch_size": 4,
        "dataset": {"type": Missing},
        "sampler": {"type": "DefaultSampler", "shuffle": False},
    }
    tests: dict[str, Any] = {"test_dataloader": loader(1), "test_cfg": {}, "test_evaluator": [Accuracy()]}
    return runner(work_dir, *hooks, train_dataloader=data, **tests)


@pytest.mark.parametrize("mode", ["val", "test"])
def test_training_data_that_is_not_there(tmp_path: Path, mode: str) -> None:
    """`runner.test()` and `runner.val()` read no training data, as without the bridge, and are recorded."""
    attachment = EventLoopHook(work_dir=tmp_path)
    alone, ours = (
        without_training_data(tmp_path / "alone"),
        without_training_data(tmp_path / "ours", attachment),
    )

    expected = getattr(alone, mode)()
    metrics = getattr(ours, mode)()

    assert metrics.keys() == expected.keys()
    event = attachment.bus.latest(f"after_{mode}_epoch")
    assert event is not None
    assert dict(event.metrics) == {name: pytest.approx(value) for name, value in metrics.items()}
    assert read_costs(tmp_path).complete


def test_hooks_that_a_program_calls_itself(tmp_path: Path) -> None:
    """A program that calls the runner's hooks outside of a run, and leaves out ends, meets no error."""
    attachment = EventLoopHook(work_dir=tmp_path)
    ours = runner(tmp_path, attachment)
    batch = next(iter(loader(1)))

    for stage in ("train", "val", "test"):
        for when in ("before", "after"):
            getattr(attachment, f"{when}_{stage}_iter")(ours, batch_idx=0, data_batch=batch)
            getattr(attachment, f"{when}_{stage}_epoch")(ours)
    ours.train()

    assert read_costs(tmp_path).complete
    assert ours.iter == 8
