"""Test `keep_best`, the number of best checkpoints of each metric."""

from __future__ import annotations

import errno
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint, read_manifest
from eventloop.hooks import CheckpointHook
from tests.hooks.conftest import Train
from tests.support.saving import Ended, Writes

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]


@pytest.mark.representative(5)
@pytest.mark.parametrize(
    ("metric", "keep_best", "scores", "epochs"),
    [
        ("acc", 1, (0.0, 0.0, -1.0), [1]),
        ("acc", 1, (nan, 0.25, inf, 0.5, -inf), [4]),
        ("acc", 2, (0.25, 0.5, 0.75), [2, 3]),
        ("loss", 2, (3.0, 1.0, 2.0, 2.5), [2, 3]),
        ("acc", 2, (nan, 0.25, inf, 0.5, -inf), [2, 4]),
        ("acc", 1, (-1.0, 0.0), [2]),
        ("acc", 1, (nan, nan), []),
        ("acc", 2, (0.5, 0.25, 0.25, 0.5), [1, 4]),
        ("acc", -1, (0.25, 0.75, nan, 0.5, 0.125), [1, 2, 4, 5]),
    ],
)
def test_the_best_few_are_kept(
    train: Train, files: Files, metric: str, keep_best: int, scores: tuple[float, ...], epochs: list[int]
) -> None:
    """The `keep_best` best scores are kept; ties do not beat, 0.0 is a score, and NaN and infinities never
    count."""
    hook = train(*({metric: score} for score in scores), save_best=metric, keep_best=keep_best)

    assert files() == [f"best_{metric}_epoch_{epoch}" for epoch in epochs]
    best = (min if metric == "loss" else max)([scores[epoch - 1] for epoch in epochs], default=None)
    assert hook.best.score == best


def test_each_metric_has_its_own(train: Train, files: Files) -> None:
    """Each metric has its own best checkpoints; `best` and `bests` have the first of each."""
    scores = [{"acc": 0.5, "loss": 1.0}, {"acc": 0.75, "loss": 2.0}, {"acc": 0.625, "loss": 3.0}]
    hook = train(*scores, save_best=["acc", "loss"], keep_best=2)

    assert files() == [
        f"best_{name}" for name in ("acc_epoch_2", "acc_epoch_3", "loss_epoch_1", "loss_epoch_2")
    ]
    assert sorted(best.name for best in hook.bests.values()) == ["best_acc_epoch_2", "best_loss_epoch_1"]
    assert hook.best.score == 0.75


@pytest.mark.parametrize("keep", [1, 2])
def test_the_outdone_one_is_there_until_the_new_one_is_durable(
    train: Train, files: Files, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """A beaten best checkpoint exists until the better one is durable."""
    before_write: list[list[str]] = []
    names = ["best_acc_epoch_1", "best_acc_epoch_2", "best_acc_epoch_3"]

    def before(path: Path) -> None:
        before_write.append([name for name in files() if not name.startswith(".")])

    Writes.of_hooks(monkeypatch, before)
    train(0.25, 0.5, 0.75, keep_best=keep)

    assert before_write == [[], names[:1], names[2 - keep : 2] if keep == 1 else names[:2]]
    assert files() == names[3 - keep :]


def test_one_that_was_not_saved_is_not_compared_with(
    make_trainer: Make, scripted: Scripted, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed best checkpoint removes none, and once it has failed a lower score may take its place."""

    def full(path: Path) -> None:
        if path.name == "best_acc_epoch_3":
            raise OSError(errno.ENOSPC, "No space left on device")

    Writes.of_hooks(monkeypatch, full)
    hook = CheckpointHook(save_best="acc", save_last=False, keep_best=2)
    make_trainer(max_epochs=4, hooks=[hook, Ended(hook)], **scripted(0.25, 0.5, 0.875, 0.375)).train()

    assert files() == ["best_acc_epoch_2", "best_acc_epoch_4"]
    assert hook.best.score == 0.5


def test_each_says_of_itself_that_it_is_one_of_them(train: Train, tmp_path: Path) -> None:
    """The manifests of all best checkpoints name their metric, and the hook's state has them in order."""
    train(0.75, 0.25, 0.5, keep_best=3)

    run = tmp_path / "run"
    assert [read_manifest(run / f"best_acc_epoch_{n}").best for n in (1, 2, 3)] == [{"acc": "greater"}] * 3
    assert read_manifest(run / "best_acc_epoch_2").keep_best == 3
    saved = load_checkpoint(run / "best_acc_epoch_3")["hooks"]["checkpoint"]
    assert saved["bests"] == {"acc": [0.75, "best_acc_epoch_1", "acc"]}
    assert saved["bests_behind"] == {
        "acc": [[0.5, "best_acc_epoch_3", "acc"], [0.25, "best_acc_epoch_2", "acc"]]
    }


@pytest.mark.parametrize("scores", [(0.25, 0.75, 0.5), (0.75, 0.25, 0.75)], ids=["highest", "equal"])
def test_resume_takes_the_best_of_them(train: Train, make_trainer: Make, scores: tuple[float, ...]) -> None:
    """`resume("best")` takes the highest score, and of equal scores the newest, like `hook.best`."""
    hook = train(*scores, keep_best=3)

    assert make_trainer(max_epochs=3).resume("best").name == hook.best.name


@pytest.mark.representative(4)
@pytest.mark.parametrize(
    ("keep", "later", "kept"),
    [
        (1, (0.625,), [2]),
        (1, (0.75,), [4]),
        (2, (0.5, 0.75), [2, 5]),
        (2, (0.375,), [2, 3]),
        (2, (0.25,), [2, 3]),
        (2, (0.875, 0.9375), [4, 5]),
    ],
)
def test_all_of_them_survive_a_resume(
    train: Train, files: Files, keep: int, later: tuple[float, ...], kept: list[int]
) -> None:
    """A resumed run compares with the best checkpoints of the former run, and removes beaten ones."""
    train(0.25, 0.625, 0.375, keep_best=keep, save_last=True)

    train(*later, keep_best=keep, resumed="auto", epochs=3 + len(later))

    assert [name for name in files() if name.startswith("best")] == [
        f"best_acc_epoch_{epoch}" for epoch in kept
    ]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("first", "keep_best", "later", "kept"),
    [
        (3, 1, 0.9375, [4]),
        (1, 2, 0.75, [2, 3]),
        (3, 1, 0.75, [1, 2, 3]),
        (3, 2, 0.75, [2, 4]),
        (3, -1, 0.125, [1, 2, 3, 4]),
    ],
)
def test_another_number_in_a_resumed_run(
    train: Train, files: Files, first: int, keep_best: int, later: float, kept: list[int]
) -> None:
    """A resumed run with a greater `keep_best` saves more; with a smaller one the next best save removes the
    surplus."""
    train(0.25, 0.875, 0.5, keep_best=first)

    train(later, keep_best=keep_best, resumed="auto", epochs=4 if first > 1 else 3)

    assert files() == [f"best_acc_epoch_{epoch}" for epoch in kept]


def test_the_newest_are_counted_by_themselves(train: Train, files: Files) -> None:
    """`max_keep_ckpts` and `keep_best` count separately."""
    train(0.75, 0.5, 0.25, interval=1, max_keep_ckpts=1, keep_best=2)

    assert files() == ["epoch_3", "best_acc_epoch_1", "best_acc_epoch_2"]


def test_the_best_of_each_is_published(train: Train, files: Files) -> None:
    """Only the first of the best checkpoints of a metric is published."""
    train(0.25, 0.75, 0.5, keep_best=3, published_keys="state_dict")

    assert [name.rpartition("-")[0] for name in files() if name.endswith(".pth")] == ["best_acc_epoch_2"]


def test_of_validations_of_one_name_the_best_stays(
    make_trainer: Make, scripted: Scripted, tmp_path: Path
) -> None:
    """Of several validations in one epoch, which share a name, the best score stays."""
    hook = CheckpointHook(save_best="acc", keep_best=2, save_last=False)
    trainer = make_trainer(max_epochs=1, batches=3, hooks=[hook], **scripted(0.5, 0.25, 0.75, 0.125))
    trainer.bus.subscribe(lambda trainer, event: trainer.val(), "after_train_iter", name="validate")
    trainer.train()

    names = sorted(path.name for path in (tmp_path / "run").glob("best_*"))
    assert names == ["best_acc_epoch_0", "best_acc_epoch_1"]
    assert read_manifest(tmp_path / "run" / "best_acc_epoch_0").metrics == {"acc": 0.75}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"keep_best": number}, rf"keep_best must be -1, for all, or a positive int, got {number!r}")
            for number in (0, True, "3", -2)
        ),
        (
            {"keep_best": 3, "save_best": None},
            'keep_best=3 needs a metric: save_best="accuracy", .* max_keep_ckpts=3$',
        ),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    """An invalid `keep_best` is refused when the hook is built, with advice."""
    with pytest.raises(ValueError, match=message):
        CheckpointHook(**{"save_best": "acc", **options})
