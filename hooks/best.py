"""Which of two scores is better."""

from __future__ import annotations

import math
import re
from typing import Literal

Rule = Literal["greater", "less"]

_LESS = {"loss", "error", "err", "mae", "mse", "rmse", "perplexity", "ppl", "wer", "cer", "fid", "nll"}
_GREATER = {
    "acc", "accuracy", "top", "top1", "top5", "ar", "auc", "auroc", "precision", "recall", "f1", "map", "mdice",
    "dice", "miou", "iou", "macc", "aacc", "psnr", "ssim", "bleu", "rouge", "kappa",
}  # fmt: skip


def infer_rule(metric: str) -> Rule:
    """Tell from a metric's name whether more of it is better.

    Whole words of the name decide, and a word for losses wins: `val/loss_acc`, `stop_loss` and `heatmap_loss`
    are losses, which MMEngine's substrings take for accuracies.

    Raises:
        ValueError: the name says neither.
    """
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if words & _LESS:
        return "less"
    if words & _GREATER or any(word.startswith("ar@") for word in metric.lower().split("/")):
        return "greater"
    raise ValueError(
        f"cannot tell from its name whether more {metric!r} is better: say rule='greater' or 'less'"
    )


def is_better(score: float, than: float | None, rule: Rule) -> bool:
    """Strictly better; a score that is NaN or infinite never is, so it cannot become an unbeatable best."""
    if not math.isfinite(score):
        return False
    if than is None:
        return True
    return score > than if rule == "greater" else score < than
