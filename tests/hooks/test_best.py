"""Which of two scores is better, and what a metric's name says about it."""

from __future__ import annotations

import math

import pytest

from eventloop.checkpoint.retention.best import Rule, infer_rule, is_better

GREATER = """
acc accuracy val/acc top1 top_5 AR@100 AUC precision recall f1 f1_score psnr iou mIoU bbox_mAP bbox/AP50 AP
coco/bbox_mAP_50 mDice test-aAcc bleu
"""
NEITHER = "quality stop heatmap glossy auto stop1 heatmap50 Stopwatch GlossyImages f 1"
LESS = "loss val_loss val/loss_cls mae RMSE perplexity top1_error wer stop_loss heatmap_loss val/loss_acc"
WORDS = {
    "greater": "mAP50 acc5 top3 precision50 BalancedAccuracy meanIoU val_top1acc F1Score",
    "less": "loss1 valLoss MSELoss top5error heatMapLoss AccLoss l1loss",
}


@pytest.mark.parametrize("metric", GREATER.split())
def test_scores_are_greater(metric: str) -> None:
    """Names of scores, whole words of any case, mean that more is better."""
    assert infer_rule(metric) == "greater"


@pytest.mark.parametrize("metric", LESS.split())
def test_losses_are_less(metric: str) -> None:
    """Names of losses mean that less is better, also where a score's name is hidden in them."""
    assert infer_rule(metric) == "less"


@pytest.mark.parametrize("rule", WORDS)
def test_digits_and_changes_of_case_end_a_word(rule: str) -> None:
    """What MMEngine finds as a part of a name is found where it is a word of it; a word for losses wins there too."""
    assert {infer_rule(metric) for metric in WORDS[rule].split()} == {rule}


@pytest.mark.parametrize("metric", ["", *NEITHER.split()])
def test_name_that_says_neither_is_an_error(metric: str) -> None:
    """Half a word does not count; the error asks for the rule."""
    with pytest.raises(
        ValueError, match=f"cannot infer .* whether a greater '{metric}' is better: pass rule="
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
