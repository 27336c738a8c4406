"""`trainer.model_summary()`: a table of the layers, by torchinfo."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from eventloop.data.rng import rng_state
from eventloop.hooks import AmpOptimizerHook, RuntimeInfoHook
from eventloop.writers import JSONLWriter
from tests.support.inside_torch import module_hooks
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches


@pytest.fixture
def torchinfo() -> Any:
    """Skip the tests where it is not installed."""
    return pytest.importorskip("torchinfo", reason="not installed: pip install 'torch-eventloop[summary]'")


class Frozen(nn.Module):
    """A model of two arguments with an eval layer in it, dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.body[1].eval()

    def forward(self, points: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(points)) * (1.0 if scale is None else scale)
        return scores


def test_the_table(torchinfo: Any, make_trainer: MakeTrainer) -> None:
    """Layers and parameters; with a batch, its inputs or the arguments by name, also shapes and multiply-adds."""
    trainer = make_trainer(model=Frozen())
    batch = batches(1)[0]

    alone = trainer.model_summary()
    tables = [
        trainer.model_summary(batch),
        trainer.model_summary(batch[0]),
        trainer.model_summary({"points": batch[0], "scale": torch.ones(1)}),
    ]

    assert "BatchNorm1d (1)" in alone
    assert "Total params: 67" in alone
    assert "[4, 8]" not in alone
    for table in tables:
        assert "[4, 8]" in table
        assert "Total mult-adds" in table
    assert "BatchNorm1d" not in trainer.model_summary(batch, depth=1)


def test_nothing_changes(torchinfo: Any, make_trainer: MakeTrainer) -> None:
    """Modes of single modules, buffers, parameters, random states and hooks of modules stay, and no layer is kept."""
    trainer = make_trainer(model=Frozen(), hooks=[AmpOptimizerHook(dtype="bfloat16")])
    modes = [module.training for module in trainer.model.modules()]
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    drawn = rng_state()

    trainer.model_summary(batches(1)[0])

    assert [module.training for module in trainer.model.modules()] == modes
    assert_same(dict(trainer.model.state_dict()), state)
    assert_same(rng_state(), drawn)
    assert not any(module_hooks(trainer.model))
    layer = ref(trainer.model.head)
    trainer.close()
    trainer.model = trainer.optimizer = None  # type: ignore[assignment]
    trainer.state.settings = None  # type: ignore[assignment]
    gc.collect()
    held = [type(holder).__name__ for holder in gc.get_referrers(layer())] if layer() is not None else []
    assert "LayerInfo" not in held


def test_it_is_logged_before_the_first_iteration(torchinfo: Any, make_trainer: MakeTrainer) -> None:
    """`RuntimeInfoHook(model_summary=True)` logs the table of the first batch once, as a text of all writers."""
    trainer = make_trainer(hooks=[RuntimeInfoHook(model_summary=True)], writers=[JSONLWriter()])

    trainer.train()

    lines = [json.loads(line) for line in (trainer.work_dir / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [line for line in lines if line.get("name") == "model_summary"]
    assert "[4, 2]" in logged["text"]
    assert "Total params: 51" in logged["text"]


def test_a_training_with_a_summary(torchinfo: Any, make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """The weights are bitwise those without it."""
    weights = []
    for asked in (False, True):
        trainer = make_trainer(hooks=[RuntimeInfoHook(model_summary=asked)], work_dir=tmp_path / str(asked))
        torch.manual_seed(3)
        trainer.train()
        weights.append(dict(trainer.model.state_dict()))

    assert_same(weights[0], weights[1])


def test_a_lazy_model(torchinfo: Any, make_trainer: MakeTrainer) -> None:
    """A parameter without a shape is named: torchinfo's forward pass would draw its values."""
    trainer = make_trainer(model=nn.Sequential(nn.LazyLinear(3)), optimizer=None, train_loader=None)

    with pytest.raises(
        ValueError, match=r"needs a model whose parameters have shapes, and '0\.weight' is lazy"
    ):
        trainer.model_summary()


@pytest.mark.parametrize(
    ("depth", "error", "message"),
    [
        (0, ValueError, "depth must be at least 1, got 0"),
        ("all", TypeError, "depth must be an int, got 'all'"),
    ],
)
def test_bad_depths(make_trainer: MakeTrainer, depth: Any, error: type[Exception], message: str) -> None:
    """A depth is a positive number of levels."""
    with pytest.raises(error, match=message):
        make_trainer().model_summary(depth=depth)


def test_without_torchinfo(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, where the summary is asked for and where the hook is built."""
    monkeypatch.setitem(sys.modules, "torchinfo", None)

    for use in (lambda: make_trainer().model_summary(), lambda: RuntimeInfoHook(model_summary=True)):
        with pytest.raises(
            ImportError, match=r"model_summary needs torchinfo: pip install 'torch-eventloop\[summary\]'"
        ):
            use()
