"""A real run, and what CSV, JSONL and TensorBoard have of it: the same metrics, steps and values in all three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop.events import AfterRun, AfterTrainIter
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.training.trainer import Trainer
from eventloop.writers.csv_writer import CSVWriter
from eventloop.writers.jsonl import JSONLWriter, read_jsonl
from eventloop.writers.tensorboard import TensorBoardWriter
from tests.writers.conftest import tensorboard
from tests.writers.csv_rows import rows

Values = dict[tuple[str, int, str], float]
"""By mode, step and name."""


class Extra(Hook):
    """Puts values where writers are likely to lose them, and breaks off where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        if event.iter == self.fail_at:
            raise RuntimeError("power cut")
        metrics = trainer.metrics
        if event.iter % 7 == 3:
            metrics.put_scalar("now_and_then", torch.tensor(float(event.iter)), smoothing_hint=False)
        if event.iter >= 12:
            metrics.put_scalar("late", event.iter / 8, smoothing_hint=False, cur_iter=event.iter - 12)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        trainer.metrics.put_scalar("final", 42.0, smoothing_hint=False)


def make_trainer(work_dir: Path, fail_at: int | None = None) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(23)]
    model = torch.nn.Linear(3, 2)
    return Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.125), loss_fn=F.cross_entropy,
        train_loader=data, val_loader=data[:2], max_iters=23, val_interval=4, work_dir=work_dir,
        hooks=[Extra(fail_at), LoggerHook(interval=5), CheckpointHook(interval=5)],
        writers=[CSVWriter(), JSONLWriter(), TensorBoardWriter()],
    )  # fmt: skip


def in_csv(work_dir: Path) -> Values:
    values: Values = {}
    for row in rows(work_dir / "metrics.csv"):
        mode, step = row.pop("mode"), int(row.pop("step"))
        found = {name: float(value) for name, value in row.items() if value and name not in ("iter", "epoch")}
        assert not {(mode, step, name) for name in found} & {*values}
        values |= {(mode, step, name): value for name, value in found.items()}
    return values


def in_jsonl(work_dir: Path) -> Values:
    values: Values = {}
    for row in read_jsonl(work_dir / "metrics.jsonl"):
        if "event" not in row:
            place: Any = row.pop("mode"), row.pop("step")
            values |= {(*place, name): row[name] for name in row if name not in ("iter", "epoch")}
    return values


def in_tensorboard(work_dir: Path) -> Values:
    reader = tensorboard(work_dir / "tensorboard")
    values: Values = {}
    for tag in reader.Tags()["scalars"]:
        mode, name = tag.split("/", 1)
        values |= {(mode, point.step, name): point.value for point in reader.Scalars(tag)}
    return values


def without_times(values: Values) -> Values:
    return {key: value for key, value in values.items() if "time" not in key[2]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went through."""
    work_dir = tmp_path_factory.mktemp("run")
    trainer = make_trainer(work_dir)
    trainer.train()
    trainer.close()
    return work_dir


def test_all_writers_have_the_same(run: Path) -> None:
    """Key by key: nothing is in one file and missing in another."""
    ours = in_csv(run)

    assert ours == in_jsonl(run)
    theirs = in_tensorboard(run)
    assert theirs.keys() == ours.keys()
    assert theirs == pytest.approx(ours, rel=1e-6)  # TensorBoard's curves are float32


def test_every_validation_is_there(run: Path) -> None:
    """Also those between two logs of the training."""
    steps = sorted(step for mode, step, name in in_csv(run) if (mode, name) == ("val", "accuracy"))

    assert steps == [4, 8, 12, 16, 20, 23]


def test_late_and_rare_values_are_at_their_own_step(run: Path) -> None:
    """A value put for an earlier iteration is in the row of that iteration; the last ones come after the last iteration."""
    values = in_csv(run)

    assert {s: v for (_, s, n), v in values.items() if n == "late"} == {i - 11: i / 8 for i in range(12, 23)}
    assert {s: v for (_, s, n), v in values.items() if n == "now_and_then"} == {4: 3.0, 11: 10.0, 18: 17.0}
    assert [value for (_, _, name), value in values.items() if name == "final"] == [42.0]


@pytest.mark.slow
def test_an_interrupted_and_resumed_run_has_the_same_rows(run: Path, tmp_path: Path) -> None:
    """No row is lost or doubled by a failure between two checkpoints, and each value is that of the whole run."""
    broken = make_trainer(tmp_path, fail_at=18)
    with pytest.raises(RuntimeError, match="power cut"):
        broken.train()

    resumed = make_trainer(tmp_path)
    resumed.resume()
    resumed.train()
    resumed.close()

    assert without_times(in_csv(tmp_path)) == pytest.approx(without_times(in_csv(run)))
    assert without_times(in_tensorboard(tmp_path)) == pytest.approx(without_times(in_tensorboard(run)))
