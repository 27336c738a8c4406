"""Test several watched metrics, published files, and parts that are left out."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.retention.best import BestMetrics
from eventloop.hooks import CheckpointHook

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]

SCORES = [{"acc": 0.5, "loss": 3.0}, {"acc": 0.25, "loss": 2.0}, {"acc": 0.75, "loss": 2.5}]


@pytest.fixture
def train(make_trainer: Make, scripted: Scripted) -> Callable[..., Trainer]:
    """Return a function that trains an epoch for each of `SCORES`."""

    def run(**options: Any) -> Trainer:
        hook = CheckpointHook(**options)
        trainer = make_trainer(max_epochs=len(SCORES), hooks=[hook], **scripted(*SCORES))
        trainer.train()
        return trainer

    return run


def hook_of(trainer: Trainer) -> CheckpointHook:
    return next(hook for hook in trainer.hooks if isinstance(hook, CheckpointHook))


def test_one_rule_each(train: Callable[..., Trainer], files: Files) -> None:
    """Rules may be given for each metric in order, or one for all."""
    train(save_best=["acc", "loss"], rule=["less", "greater"], save_last=False)
    assert files() == ["best_acc_epoch_2", "best_loss_epoch_1"]

    train(save_best=["acc", "loss"], rule="less", save_last=False)
    assert "best_loss_epoch_2" in files()


@pytest.mark.parametrize("metrics", [["acc", "loss"], ["loss", "acc"]])
def test_resume_from_the_best_of_several(
    train: Callable[..., Trainer], make_trainer: Make, scripted: Scripted, metrics: list[str]
) -> None:
    """`resume("best")` and `hook.best` go by the first metric of `save_best`."""
    trained = hook_of(train(save_best=metrics, save_last=False))
    resumed = make_trainer(max_epochs=4, hooks=[CheckpointHook(save_best=metrics)], **scripted(*SCORES))

    assert resumed.resume("best").name == trained.best.name
    assert trained.best.metric == metrics[0]


def test_a_best_that_a_kill_left_out_is_saved_by_the_resumed_run(
    train: Callable[..., Trainer], make_trainer: Make, scripted: Scripted, files: Files, tmp_path: Path
) -> None:
    """If a kill came between the best checkpoints of one validation, the resumed run saves the missing
    ones."""
    options: dict[str, Any] = {"save_best": ["acc", "loss"], "rule": "less", "save_last": False}
    train(**options)
    shutil.rmtree(tmp_path / "run" / "best_loss_epoch_2")

    hook = CheckpointHook(**options)
    resumed = make_trainer(max_epochs=3, hooks=[hook], **scripted(SCORES[2]))
    resumed.resume("best_acc_epoch_2")
    resumed.train()

    assert {m: (b.score, b.name) for m, b in hook.bests.items()} == {
        "acc": (0.25, "best_acc_epoch_2"),
        "loss": (2.0, "best_loss_epoch_2"),
    }
    assert files() == ["best_acc_epoch_2", "best_loss_epoch_2"]


@pytest.mark.parametrize(
    ("metric", "keys", "rule"),
    [
        ("quality", {"greater_keys": "qual"}, "greater"),
        ("acc", {"less_keys": ["acc"]}, "less"),
        ("stop_loss", {"greater_keys": "stop_loss", "less_keys": "loss"}, "greater"),
        ("accuracy", {"less_keys": "perplexity"}, "greater"),
    ],
)
def test_keys_say_what_is_better(metric: str, keys: dict[str, Any], rule: str) -> None:
    """`greater_keys` and `less_keys` decide before the built-in words, and a whole name before a part."""
    assert BestMetrics(metric, **keys).rule_of(metric) == rule


def test_published(train: Callable[..., Trainer], make_trainer: Make, files: Files) -> None:
    """The last and the best checkpoint are published with the chosen keys under their hash, and `resume()`
    ignores these files."""
    trainer = train(save_best="acc", published_keys=["state_dict", "meta"])
    made = [name for name in files() if "-" in name]

    assert sorted(name.rsplit("-")[0] for name in made) == ["best_acc_epoch_3", "epoch_3"]
    for name in made:
        path = trainer.work_dir / name
        assert load_checkpoint(path).keys() == {"state_dict", "meta"}
        assert hashlib.sha256(path.read_bytes()).hexdigest()[:8] == path.stem.rsplit("-")[1]
    assert make_trainer(max_epochs=4).resume() == trainer.work_dir / "epoch_3"


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ({"published_keys": ["state_dict", "ema"]}, [".pth"]),
        ({"published_keys": "ema", "published_format": "safetensors"}, []),
    ],
)
def test_a_key_that_is_not_there_to_publish(
    train: Callable[..., Trainer], caplog: pytest.LogCaptureFixture, options: Any, published: list[str]
) -> None:
    """A missing key is logged, and the other keys are published."""
    trainer = train(**options)

    assert "epoch_3 has no ema to publish: it has meta, state_dict" in caplog.text
    paths = [*trainer.work_dir.glob("epoch_3-*")]
    assert [path.suffix for path in paths] == published
    assert all([*torch.load(path, weights_only=True)] == ["state_dict"] for path in paths)


def test_left_out(train: Callable[..., Trainer], make_trainer: Make) -> None:
    """A checkpoint without optimizer and schedulers loads as weights, and cannot be resumed from."""
    trainer = train(save_optimizer=False, save_param_scheduler=False)
    path = trainer.work_dir / "epoch_3"

    assert {"optimizer", "param_schedulers"}.isdisjoint(load_checkpoint(path))
    with pytest.raises(
        CheckpointError, match="cannot be resumed from, it has no optimizer, param_schedulers"
    ):
        make_trainer(max_epochs=4).resume(path)
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint to resume from; epoch_3 .* it has no optimizer"
    ):
        make_trainer(max_epochs=4).resume()
    make_trainer(max_epochs=4).load_checkpoint(path)
