"""Test that weights are loaded only into tensors that can hold them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import EMAHook
from tests.support.trainers import MakeTrainer, tiny_model


def saved(make_trainer: MakeTrainer, work_dir: Path, buffer: torch.Tensor, **changes: Any) -> Trainer:
    """Return a trainer of a model that has a buffer."""
    model = tiny_model()
    model.register_buffer("scale", buffer)
    return make_trainer(model=model, work_dir=work_dir, **changes)


INTO = [
    (torch.full((3,), 3.7), torch.int64, "float32", "int64"),
    (torch.full((3,), 3.7), torch.bool, "float32", "bool"),
    (torch.full((3,), 3.0), torch.int64, "float32", "int64"),
    (torch.full((3,), 2), torch.bool, "int64", "bool"),
    (torch.full((3,), 1 + 2j), torch.float32, "complex64", "float32"),
    (torch.tensor([300, -5, 0]), torch.int8, "int64 from -5 to 300", "int8"),
    (torch.tensor([2**40, 0, 0]), torch.int32, f"int64 from 0 to {2**40}", "int32"),
    (torch.tensor([-1, 0, 0], dtype=torch.int8), torch.uint8, "int8 from -1 to 0", "uint8"),
    (torch.tensor([1e5, 0.0, torch.inf]), torch.float16, r"float32 up to 100000", "float16"),
    (torch.tensor([70_000, 0, 0]), torch.float16, "int64 up to 70000", "float16"),
    (torch.tensor([1e39, 0.0, 0.0], dtype=torch.float64), torch.float32, r"float64 up to 1e\+39", "float32"),
    (torch.tensor([1e3, 0.0, 0.0]), torch.float8_e4m3fn, "float32 up to 1000", "float8_e4m3fn"),
]


HOW = [
    ("resume", [EMAHook]),
    ("load_checkpoint", []),
    ("load_checkpoint", [EMAHook]),
    ("plain file", []),
    ("plain file", [EMAHook]),
]


@pytest.mark.parametrize(
    ("how", "hooks", "buffer", "dtype", "has", "own"),
    [*(("resume", [], *into) for into in INTO), *((*how, *INTO[0]) for how in HOW)],
)
def test_a_buffer_of_another_kind(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    how: str,
    hooks: list[Any],
    buffer: torch.Tensor,
    dtype: torch.dtype,
    has: str,
    own: str,
) -> None:
    """Values that the model's buffer cannot hold are refused by its name, and nothing is loaded."""
    first = saved(make_trainer, tmp_path, buffer, hooks=[hook() for hook in hooks])
    first.train()
    path = tmp_path / "epoch_2"
    if how == "plain file":
        path = tmp_path / "weights.pth"
        torch.save(first.model.state_dict(), path)
    trainer = saved(make_trainer, tmp_path, torch.zeros(3, dtype=dtype), hooks=[hook() for hook in hooks])
    before = trainer.model.state_dict()["0.weight"].clone()

    load = partial(trainer.resume, changed="apply") if how == "resume" else trainer.load_checkpoint

    with pytest.raises(
        CheckpointError, match=f"scale: the checkpoint has {has}, the model {own}, which cannot hold it"
    ):
        load(path)

    assert torch.equal(trainer.model.state_dict()["0.weight"], before)


@pytest.mark.parametrize(
    ("buffer", "dtype"),
    [
        (torch.full((3,), 0.1), torch.float16),
        (torch.ones(3, dtype=torch.int32), torch.float32),
        (torch.tensor([-128, 0, 127]), torch.int8),
        (torch.tensor([-65504.0, torch.inf, 0.0]), torch.float16),
    ],
)
def test_another_type_of_a_buffer(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    buffer: torch.Tensor,
    dtype: Any,
) -> None:
    """A resume refuses a buffer of another type, as it does for parameters; `changed` converts and logs it."""
    saved(make_trainer, tmp_path, buffer).train()
    trainer = saved(make_trainer, tmp_path, torch.zeros(3, dtype=dtype))
    has, own = (str(each).removeprefix("torch.") for each in (buffer.dtype, dtype))
    line = f"types of buffers: {{'scale': '{has}'}} in the checkpoint, {{'scale': '{own}'}} in this trainer"

    with pytest.raises(CheckpointError, match=line):
        trainer.resume()
    trainer.resume(changed="apply")

    assert torch.equal(trainer.model.state_dict()["scale"], buffer.to(dtype))
    assert line in caplog.text


def test_counts_of_batches_keep_their_type(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """BatchNorm's statistics and its count are of the model's own types, and are loaded without a word."""

    def make() -> Trainer:
        torch.default_generator.manual_seed(0)
        return make_trainer(model=nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), work_dir=tmp_path)

    first, trainer = make(), make()
    first.train()

    trainer.resume()

    assert int(trainer.model.state_dict()["0.num_batches_tracked"]) == 6
