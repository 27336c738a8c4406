"""Which of two scores is better, and what a metric's name says about it."""

from __future__ import annotations

import math

import pytest

from eventloop.checkpoint.retention.best import Rule, infer_rule, is_better


@pytest.mark.parametrize(
    "metric",
    [
        *("acc", "accuracy", "val/acc", "top1", "top_5", "AR@100", "AUC", "precision", "recall", "f1"),
        *(
            "f1_score",
            "psnr",
            "iou",
            "mIoU",
            "bbox_mAP",
            "bbox/AP50",
            "AP",
            "coco/bbox_mAP_50",
            "mDice",
            "test-aAcc",
            "bleu",
        ),
    ],
)
def test_scores_are_greater(metric: str) -> None:
    """Names of scores, whole words of any case, mean that more is better."""
    assert infer_rule(metric) == "greater"


@pytest.mark.parametrize(
    "metric",
    [
        *("loss", "val_loss", "val/loss_cls", "mae", "RMSE", "perplexity", "top1_error", "wer"),
        *("stop_loss", "heatmap_loss", "val/loss_acc"),
    ],
)
def test_losses_are_less(metric: str) -> None:
    """Names of losses mean that less is better, also where a score's name is hidden in them."""
    assert infer_rule(metric) == "less"


@pytest.mark.parametrize(
    "metric",
    ["mAP50", "acc5", "top3", "precision50", "BalancedAccuracy", "meanIoU", "val_top1acc", "F1Score"],
)
def test_digits_and_changes_of_case_end_a_word(metric: str) -> None:
    """What MMEngine finds as a part of a name is found where it is a word of it."""
    assert infer_rule(metric) == "greater"


@pytest.mark.parametrize(
    "metric", ["loss1", "valLoss", "MSELoss", "top5error", "heatMapLoss", "AccLoss", "l1loss"]
)
def test_losses_win_there_too(metric: str) -> None:
    """A word for losses wins over a score's, wherever words end."""
    assert infer_rule(metric) == "less"


@pytest.mark.parametrize(
    "metric",
    [
        "quality",
        "stop",
        "heatmap",
        "glossy",
        "",
        "auto",
        "stop1",
        "heatmap50",
        "Stopwatch",
        "GlossyImages",
        "f",
        "1",
    ],
)
def test_name_that_says_neither_is_an_error(metric: str) -> None:
    """Half a word does not count; the error asks for the rule."""
    with pytest.raises(
        ValueError, match=f"cannot infer .* whether a greater '{metric}' is better: pass rule='greater'"
    ):
        infer_rule(metric)


def test_misspelled_name_gets_a_suggestion() -> None:
    """A near word is named, besides the rule."""
    with pytest.raises(
        ValueError, match=r"'acuracy' is better: did you mean 'accuracy'\? Otherwise pass rule="
    ):
        infer_rule("acuracy")


@pytest.mark.parametrize(
    ("score", "than", "rule", "better"),
    [
        (0.5, None, "greater", True),
        (0.0, None, "greater", True),
        (0.0, -1.0, "greater", True),
        (0.0, 0.5, "less", True),
        (0.6, 0.5, "greater", True),
        (0.5, 0.5, "greater", False),
        (0.5, 0.5, "less", False),
        (0.4, 0.5, "greater", False),
        (0.4, 0.5, "less", True),
    ],
)
def test_better_is_strict(score: float, than: float | None, rule: Rule, better: bool) -> None:
    """The first finite score is the best so far, 0.0 too; a tie is not better."""
    assert is_better(score, than, rule) is better


@pytest.mark.parametrize("rule", ["greater", "less"])
@pytest.mark.parametrize("than", [None, 0.5])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_no_number_is_never_the_best(score: float, than: float | None, rule: Rule) -> None:
    """NaN and infinities are not better than anything, so none becomes an unbeatable best."""
    assert not is_better(score, than, rule)
