"""EarlyStoppingHook: when a training is ended, and that a resumed one ends there too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.events import AfterRun, StopRequested
from eventloop.hooks import CallbackHook, CheckpointHook, EarlyStoppingHook
from tests.hooks.conftest import Make, Scripted
from tests.support.internals import substitute

Run = Callable[..., Trainer]

RISING = [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45]


@pytest.fixture
def run(make_trainer: Make, scripted: Scripted) -> Run:
    """Train one epoch per scripted score (at most), one batch each, with the hook."""

    def train(hook: EarlyStoppingHook, *scores: Any, **options: Any) -> Trainer:
        options.setdefault("max_epochs", len(scores))
        hooks = [hook, *options.pop("hooks", [])]
        trainer = make_trainer(batches=1, hooks=hooks, **scripted(*scores), **options)
        trainer.train()
        return trainer

    return train


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "scores", "epochs"),
    [
        ({"patience": 2}, [0.5, 0.4, 0.3, 0.9, 0.9], 3),
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.5, 0.6, 0.9], 5),  # an equal score is no better one
        ({"patience": 1}, [0.5, 0.5, 0.9], 2),
        ({"patience": 0}, [0.4, 0.5, 0.45, 0.9], 3),  # as in MMEngine: a better score goes on
        ({"patience": 2, "rule": "less"}, [0.5, 0.4, 0.4, 0.4, 0.1], 4),
        ({"patience": 5}, RISING, 8),  # MMEngine's default stops it in the sixth
        ({"patience": 5, "min_delta": 0.1}, RISING, 8),  # what rises slowly beats the best in the end
        ({"patience": 2, "min_delta": 0.2}, RISING, 3),
        ({"patience": 2, "min_delta": 0.1, "delta_mode": "rel"}, [1.0, 1.05, 1.09, 9.0], 3),
        ({"patience": 2, "min_delta": 0.1, "delta_mode": "rel", "rule": "less"}, [1.0, 0.95, 0.85, 0.8], 4),
        ({"stopping_threshold": 0.5}, [0.25, 0.5, 0.75, 1.0], 3),  # to reach it is not to be better
        ({"stopping_threshold": 0.25, "rule": "less"}, [0.5, 0.25, 0.125, 0.0], 3),
        ({"patience": 2}, [0.0, 0.0, 0.0, 0.5], 3),  # a score of 0 is a score
    ],
)
def test_training_ends_in_this_epoch(
    run: Run, options: dict[str, Any], scores: list[float], epochs: int
) -> None:
    """The run ends with the validation that uses the patience up, or is better than the threshold."""
    trainer = run(EarlyStoppingHook("acc", **options), *scores)

    assert trainer.epoch == epochs


def test_reason_says_what_happened(make_trainer: Make, scripted: Scripted) -> None:
    """The stop and the end of the run carry it, with every closing event."""
    hook = EarlyStoppingHook("acc", patience=2)
    trainer = make_trainer(batches=1, max_epochs=9, hooks=[hook], **scripted(0.5, 0.4, 0.3))

    with trainer.bus.capture(StopRequested, "after_train", AfterRun) as seen:
        trainer.train()

    expected = "early stopping: acc has not become better in 2 validations (patience=2), the best was 0.5"
    assert [getattr(event, "reason", None) for event in seen] == [expected] * 3


@pytest.mark.representative(1)
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_score_that_is_no_number_ends_the_training(run: Run, score: float) -> None:
    """With `check_finite` at once; without it counts as no improvement, is no best and reaches no threshold."""
    trainer = run(EarlyStoppingHook("acc"), 0.5, score, 0.6)
    assert (trainer.epoch, trainer.stop_reason) == (2, f"early stopping: acc is {score}")

    hook = EarlyStoppingHook("acc", check_finite=False, patience=2, stopping_threshold=0.9)
    trainer = run(hook, score, 0.5, score, 0.75, score, score, 0.8)
    assert (trainer.epoch, hook.best) == (6, 0.75)


def test_last_checkpoint_is_saved(run: Run, files: Callable[..., list[str]]) -> None:
    """A run that is stopped early has its last epoch saved, off the interval too."""
    run(EarlyStoppingHook("acc", patience=1), 0.5, 0.4, 0.9, hooks=[CheckpointHook(interval=5)])

    assert files() == ["epoch_2"]


def test_rule_is_told_from_the_name(run: Run) -> None:
    """A loss is better when it is less."""
    hook = EarlyStoppingHook("val_loss", patience=1)
    trainer = run(hook, {"val_loss": 0.5}, {"val_loss": 0.4}, {"val_loss": 0.45}, {"val_loss": 0.1})

    assert trainer.epoch == 3


@pytest.mark.parametrize(
    ("reported", "message"), [({"vol_acc": 0.5}, "did you mean 'vol_acc'"), ({}, "it returned no metrics")]
)
def test_missing_metric_is_an_error(run: Run, reported: dict[str, float], message: str) -> None:
    """The first validation that lacks it says which metrics there are."""
    with pytest.raises(ValueError, match=f"monitors 'val_acc', .* does not report: {message}"):
        run(EarlyStoppingHook("val_acc"), reported)


def test_missing_metric_is_warned_of_once(run: Run) -> None:
    """Without `strict` such a validation does not count, and one warning says so."""
    hook = EarlyStoppingHook("acc", strict=False, patience=1)

    with pytest.warns(UserWarning, match="monitors 'acc', which the validation does not report") as warned:
        trainer = run(hook, {"acc": 0.5}, {"f1": 0.1}, {"f1": 0.1}, {"acc": 0.6})

    assert (trainer.epoch, len(warned)) == (4, 1)


def test_cut_validation_does_not_count(make_trainer: Make, scripted: Scripted) -> None:
    """Half a validation has no score."""
    hook = EarlyStoppingHook("acc", patience=1)
    options = scripted(0.5, 0.5, 0.1)
    options["val_loader"] *= 2
    trainer = make_trainer(batches=1, max_epochs=3, hooks=[hook], **options)
    second: Callable[[Any], bool] = lambda event: event.epoch == 2
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "before_val_iter", when=second)

    trainer.train()

    assert (trainer.stop_reason, hook.best, hook.wait) == ("enough", 0.5, 0)


def test_validation_outside_a_training_does_not_count(make_trainer: Make, scripted: Scripted) -> None:
    """`trainer.val()` before and after asks the model how it is, and ends nothing."""
    hook = EarlyStoppingHook("acc", patience=1)
    trainer = make_trainer(batches=1, max_epochs=1, hooks=[hook], **scripted(0.9, 0.5, 0.1))

    trainer.val()
    trainer.train()
    trainer.val()

    assert (hook.best, hook.wait) == (0.5, 0)


@pytest.mark.representative(2)
@pytest.mark.parametrize("cut", ["best_acc_epoch_3", "epoch_2", "epoch_1", "epoch_3", "epoch_4"])
def test_resumed_run_stops_where_the_uninterrupted_one_does(
    make_trainer: Make, scripted: Scripted, tmp_path: Path, cut: str
) -> None:
    """From each epoch's checkpoint, whose validation is still to come, and from the best one, taken in a validation."""
    scores = [0.5, 0.4, 0.6, 0.3, 0.2, 0.9]

    def build(folder: str, scores: list[float]) -> tuple[Trainer, EarlyStoppingHook]:
        hook = EarlyStoppingHook("acc", patience=2)
        hooks = [hook, CheckpointHook(interval=1, save_best="acc")]
        work_dir = tmp_path / folder
        return make_trainer(
            batches=1, max_epochs=9, hooks=hooks, work_dir=work_dir, **scripted(*scores)
        ), hook

    whole, counted = build("whole", scores)
    whole.train()
    seen = int(cut[-1]) - (not cut.startswith("best"))
    second, again = build("again", scores[seen:])
    second.resume(tmp_path / "whole" / cut)
    second.train()

    assert (second.epoch, second.stop_reason) == (whole.epoch, whole.stop_reason)
    assert again.state_dict() == counted.state_dict()
    assert whole.epoch == 5


@pytest.fixture
def resumed(run: Run, make_trainer: Make, scripted: Scripted) -> Callable[..., Trainer]:
    """Stop a run in its second epoch of six, and resume it with a hook, and two more scores."""

    def resume(hook: EarlyStoppingHook, *scores: float, first: EarlyStoppingHook | None = None) -> Trainer:
        first = first or EarlyStoppingHook("acc", patience=1)
        stopped = run(first, *(scores or (0.5, 0.4)), max_epochs=6, hooks=[CheckpointHook(interval=9)])
        assert stopped.epoch == 2
        trainer = make_trainer(
            batches=1, max_epochs=6, hooks=[hook, CheckpointHook(interval=9)], **scripted(0.1, 0.1)
        )
        trainer.resume(stopped.work_dir / "epoch_2")
        return trainer

    return resume


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("options", "scores", "reason"),
    [
        ({"patience": 1}, [0.5, 0.4], "acc has not become better"),
        ({}, [0.5, math.nan], "acc is nan"),
        (
            {"stopping_threshold": 0.9, "min_delta": 0.5},
            [0.85, 0.91],
            "acc is 0.91, better than stopping_thre",
        ),
    ],
)
def test_stopped_run_stays_stopped(
    resumed: Callable[..., Trainer], options: dict[str, Any], scores: list[float], reason: str
) -> None:
    """A script that is started again does not train one more epoch each time, whatever stopped it."""
    trainer = resumed(EarlyStoppingHook("acc", **options), *scores, first=EarlyStoppingHook("acc", **options))

    trainer.train()

    assert trainer.epoch == 2
    assert (trainer.stop_reason or "").startswith(f"early stopping, before: {reason}")


def test_no_patience_is_resumed(make_trainer: Make, scripted: Scripted, tmp_path: Path) -> None:
    """A run without patience that was not stopped goes on: it validates what it had not, and trains."""
    folder = tmp_path / "eager"

    def make(max_epochs: int, *scores: float) -> Trainer:
        hooks = [EarlyStoppingHook("acc", patience=0), CheckpointHook(interval=1)]
        return make_trainer(
            batches=1, hooks=hooks, max_epochs=max_epochs, work_dir=folder, **scripted(*scores)
        )

    make(2, 0.4, 0.5).train()
    again = make(5, 0.6, 0.55, 0.9)
    again.resume()
    again.train()

    assert again.epoch == 3


def test_more_patience_goes_on(resumed: Callable[..., Trainer]) -> None:
    """A stopped run that is given more patience uses it."""
    trainer = resumed(EarlyStoppingHook("acc", patience=3))

    trainer.train()

    assert trainer.epoch == 4


def test_scores_of_another_metric_are_not_compared_with(
    resumed: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run that monitors something else starts afresh, and says so."""
    hook = EarlyStoppingHook("loss", patience=1)

    resumed(hook)

    assert (hook.best, hook.wait) == (None, 0)
    assert "early stopping monitored acc (greater is better), this hook monitors loss (less)" in caplog.text


def test_rank_0_decides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks all act on one score, so that none goes on alone."""

    substitute(monkeypatch, "early_stopping.decided_by_rank_0", lambda decide: 0.1)
    hook = EarlyStoppingHook("acc", patience=2)
    two_ranks = CallbackHook(before_train=lambda trainer: setattr(trainer, "world_size", 2))
    trainer = run(hook, 0.5, 0.6, 0.7, 0.8, hooks=[two_ranks])

    assert (trainer.epoch, hook.best) == (3, 0.1)


def test_trainer_that_never_validates_is_refused(make_trainer: Make) -> None:
    """There would be nothing to watch."""
    with pytest.raises(ValueError, match=r"\(monitor='acc'\) needs a validation: .* a val_loader"):
        make_trainer(hooks=[EarlyStoppingHook("acc")])
