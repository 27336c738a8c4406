"""Test the best checkpoint of CheckpointHook."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint, read_manifest, save_checkpoint
from eventloop.checkpoint.directory import scan
from eventloop.checkpoint.manifest import Label
from eventloop.hooks import CheckpointHook
from tests.hooks.conftest import Train

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]


LONG_NAME = "a/../acc\x1b\0" + "x" * 300


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("scores", "options", "name"),
    [
        ([{"loss": 2.0}, {"loss": 0.5}, {"loss": 1.0}], {"save_best": "loss"}, "best_loss_epoch_2"),
        (
            [{"quality": 2.0}, {"quality": 0.5}],
            {"save_best": "quality", "rule": "less"},
            "best_quality_epoch_2",
        ),
        ([{"acc": 0.5, "loss": 1.0}, {"acc": 0.25, "loss": 0.5}], {"save_best": "auto"}, "best_acc_epoch_1"),
        ([{"val/acc": 1.0}], {"save_best": "val/acc"}, "best_val_acc_epoch_1"),
        ([{LONG_NAME: 0.5}], {"save_best": LONG_NAME}, r"best_a_.._acc%1B%00xxx*_epoch_1"),
        ([0.5], {"filename_tmpl": "model_{}.pth"}, "best_acc_model_1"),
    ],
    ids=["loss", "rule", "auto", "slash", "long", "template"],
)
def test_which_and_under_which_name(
    train: Train, files: Files, scores: list[Any], options: dict[str, Any], name: str
) -> None:
    """The metric's name decides the rule unless it is given, and is made safe for a file's name."""
    train(*scores, **options)

    assert [fnmatch(found, name) for found in files()] == [True]


@pytest.mark.parametrize(
    ("metrics", "save_best", "error", "message"),
    [
        (
            {},
            "auto",
            ValueError,
            "save_best='auto' needs a metric which .* not report: it returned no metrics",
        ),
        (
            {"quality": 1.0},
            "auto",
            ValueError,
            "cannot infer from its name whether a greater 'quality' is better",
        ),
        (
            {"accuracy_1": 1.0},
            "accuracy",
            ValueError,
            "save_best='accuracy' needs .* does not report: did you mean 'accuracy_1'",
        ),
    ],
)
def test_missing_metric_is_an_error(
    train: Train, metrics: dict[str, float], save_best: str, error: type[Exception], message: str
) -> None:
    """The first validation without a watched metric raises an error with a suggestion."""
    with pytest.raises(error, match=message):
        train(metrics, save_best=save_best)


def test_best_without_a_validation_is_an_error(make_trainer: Make) -> None:
    """A trainer with `save_best` and without a validation is refused."""
    with pytest.raises(ValueError, match="save_best='acc' needs a validation: give the Trainer a val_loader"):
        make_trainer(hooks=[CheckpointHook(save_best="acc")])


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("run", "options", "expected"),
    [
        ({"max_epochs": 2}, {"interval": 8, "by_epoch": False}, {"best_acc_iter_8", "iter_8"}),
        (
            {"max_epochs": 2},
            {"interval": 8, "by_epoch": False, "filename_tmpl": "it_{}.pth"},
            {"best_acc_it_8", "it_8"},
        ),
        ({"max_iters": 8, "val_interval": 4}, {"save_last": False}, {"best_acc_iter_8"}),
    ],
)
def test_best_is_named_by_the_hooks_own_unit(
    make_trainer: Make,
    scripted: Scripted,
    files: Files,
    run: dict[str, Any],
    options: Any,
    expected: set[str],
) -> None:
    """A hook that counts iterations names its best checkpoint by the iteration, in a run of epochs too."""
    make_trainer(hooks=[CheckpointHook(save_best="acc", **options)], **run, **scripted(0.25, 0.5)).train()

    assert set(files()) == expected


def test_run_resumed_from_the_best_equals_the_uninterrupted_one(
    make_trainer: Make, scripted: Scripted, tmp_path: Path
) -> None:
    """A run resumed from the best checkpoint ends like the uninterrupted one, does not repeat its validation,
    and saves greater sequences."""
    hook = CheckpointHook(interval=1, save_best="acc")
    whole = make_trainer(max_epochs=3, hooks=[hook], **scripted(0.25, 0.75, 0.5))
    whole.train()
    best = tmp_path / "run" / "best_acc_epoch_2"
    assert load_checkpoint(best)["hooks"]["checkpoint"]["bests"] == {"acc": [0.75, best.name, "acc"]}
    hook = CheckpointHook(interval=1, save_best="acc")
    resumed = make_trainer(max_epochs=3, hooks=[hook], **scripted(0.5))

    assert resumed.resume("best") == best
    assert resumed.epoch == 2
    resumed.train()

    assert hook.best.score == 0.75
    assert resumed.iter == whole.iter
    assert torch.equal(resumed.model.state_dict()["weight"], whole.model.state_dict()["weight"])
    manifests = scan(tmp_path / "run").manifests
    assert {path.name: manifest.sequence for path, manifest in manifests.items()}["epoch_3"] == 6


def test_best_is_found_again_after_resuming_before_its_validation(train: Train, files: Files) -> None:
    """A checkpoint that is saved before the validation of its epoch leads to the same best checkpoint."""
    train(0.25, 0.75, interval=1)

    train(0.75, 0.5, resumed="auto", epochs=3)

    assert [name for name in files() if name.startswith("best")] == ["best_acc_epoch_2"]


def test_kept_files_survive_a_resume(make_trainer: Make, files: Files) -> None:
    """A resumed run removes the checkpoints of the former run too, with its own limit."""
    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, max_keep_ckpts=3)]).train()

    resumed = make_trainer(max_epochs=4, hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)])
    resumed.resume()
    resumed.train()

    assert files() == ["epoch_3", "epoch_4"]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("damaged", "taken"),
    [
        ([], "epoch_2"),
        (["epoch_2/manifest.json"], "best_loss_epoch_2"),
        (["epoch_2/state.pth", "best_loss_epoch_2/state.pth"], "best_acc_epoch_2"),
    ],
)
def test_resume_prefers_the_regular_one_of_an_iteration(
    make_trainer: Make, scripted: Scripted, tmp_path: Path, damaged: list[str], taken: str
) -> None:
    """Of one iteration `resume("auto")` takes the regular checkpoint, or a best one if the regular one is
    damaged."""
    hook = CheckpointHook(interval=1, save_best=["acc", "loss"])
    scores = scripted({"acc": 0.25, "loss": 2.0}, {"acc": 0.5, "loss": 1.0})
    trainer = make_trainer(max_epochs=2, hooks=[hook], **scores)
    trainer.train()
    for name in damaged:
        (tmp_path / "run" / name).write_bytes(b"torn")

    assert trainer.resume("auto").name == taken
    assert (trainer.epoch, trainer.iter) == (2, 8)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("hook", "newest"),
    [
        ({"interval": 1}, "epoch_2"),
        ({"interval": 2, "by_epoch": False}, "iter_6"),
        ({"interval": -1}, "best_acc_iter_6"),
    ],
)
def test_a_newer_best_one_is_taken(
    make_trainer: Make, scripted: Scripted, hook: dict[str, Any], newest: str
) -> None:
    """`resume("auto")` takes a best checkpoint that is newer than every regular one."""
    by_iteration = {"val_interval": 3, "max_iters": 6} if "epoch" not in newest else {"max_epochs": 2}
    hooks = [CheckpointHook(**hook, save_best="acc", save_last=False)]
    trainer = make_trainer(hooks=hooks, **by_iteration, **scripted(0.25, 0.5, 0.75))
    trainer.train()

    assert trainer.resume("auto").name == newest


def test_the_manifest_has_the_scores(make_trainer: Make, scripted: Scripted, tmp_path: Path) -> None:
    """The manifest of a best checkpoint has its rule, and every score of its validation."""
    hook = CheckpointHook(interval=1, save_best=["acc", "loss"])
    scores = scripted({"acc": 0.5, "loss": 2.0, "odd": nan})
    make_trainer(max_epochs=1, hooks=[hook], **scores).train()

    epoch, acc, loss = (
        read_manifest(tmp_path / "run" / name)
        for name in ("epoch_1", "best_acc_epoch_1", "best_loss_epoch_1")
    )
    assert (epoch.best, epoch.metrics) == ({}, {})
    assert (acc.best, loss.best) == ({"acc": "greater"}, {"loss": "less"})
    assert acc.metrics == loss.metrics == {"acc": 0.5, "loss": 2.0, "odd": "nan"}
    assert (epoch.sequence, acc.sequence, loss.sequence) == (1, 2, 3)


def test_every_manifest_has_the_last_scores(make_trainer: Make, scripted: Scripted, tmp_path: Path) -> None:
    """Every manifest has the scores and the iteration of the last validation, also after a resume and without
    `save_best`."""
    run = tmp_path / "run"
    make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)], **scripted(0.25, 0.5)).train()
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1)], **scripted(0.5, 0.75))
    trainer.resume(run / "epoch_2")
    trainer.train()

    found = [read_manifest(run / f"epoch_{n}") for n in (1, 2, 3)]
    assert [(each.iter, each.metrics, each.validated_at) for each in found] == [
        (4, {}, None),
        (8, {"acc": 0.25}, 4),
        (12, {"acc": 0.5}, 8),
    ]


@pytest.mark.parametrize(
    "state",
    [
        {"kept": ["../victim"]},
        {"bests": {"other": [0.0, "/victim", "other"]}},
        {"bests_behind": {"acc": [[0.0, "a/../../victim", "acc"]]}},
    ],
)
def test_a_state_that_lists_paths_is_refused(make_trainer: Make, state: dict[str, Any]) -> None:
    """A hook's state that lists a path is refused, because pruning would remove that path."""
    hook = CheckpointHook(save_best="acc")

    with pytest.raises(CheckpointError, match=r"lists '.*victim' .* expected the name of a folder in"):
        hook.load_state_dict({"kept": [], "bests": {}, **state})


def test_what_is_no_checkpoint_is_not_removed(make_trainer: Make, scripted: Scripted, tmp_path: Path) -> None:
    """A directory without a manifest is not removed, although a resumed checkpoint lists its name."""
    run = tmp_path / "run"
    options: dict[str, Any] = {"save_best": "acc", "max_keep_ckpts": 1}
    make_trainer(hooks=[CheckpointHook(**options)], **scripted(0.25)).train()
    state = load_checkpoint(run / "best_acc_epoch_1")
    state["hooks"]["checkpoint"] |= {"kept": ["notes"], "bests": {"acc": [0.25, "notes", "acc"]}}
    save_checkpoint(state, run / "epoch_1", Label(sequence=9))
    (run / "notes").mkdir()

    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(**options)], **scripted(0.5))
    trainer.resume(run / "epoch_1")
    trainer.train()

    assert (run / "notes").is_dir()
    assert (run / "best_acc_epoch_2").is_dir()
