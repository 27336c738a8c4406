"""Choose the metrics that are watched for best checkpoints, and compare their scores.

`CheckpointHook` and `EarlyStoppingHook` use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple, cast

from eventloop.util.checks import check_choice, strings
from eventloop.util.file_names import safe_name
from eventloop.util.suggest import near, unreported

Rule = Literal["greater", "less"]

_LESS = {"loss", "error", "err", "mae", "mse", "rmse", "perplexity", "ppl", "wer", "cer", "fid", "nll"}
_GREATER = {
    "acc",
    "accuracy",
    "top",
    "top1",
    "top5",
    "ap",
    "ar",
    "auc",
    "auroc",
    "precision",
    "recall",
    "f1",
    "map",
    "mdice",
    "dice",
    "miou",
    "iou",
    "macc",
    "aacc",
    "psnr",
    "ssim",
    "bleu",
    "rouge",
    "kappa",
}
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
"""Matches a part of a name, such as `ROC`, `Accuracy`, `acc` and `50`."""


class Best(NamedTuple):
    """The best score of a metric so far, the name of the checkpoint with this score, and the metric.

    Without a score they have the values None, "" and "".
    """

    score: float | None = None
    name: str = ""
    metric: str = ""


class BestMetrics:
    """The watched metrics, each with the rule that decides which of two scores is better.

    Args:
        save_best: a metric, several, or "auto" for the first metric of the first validation.
        rule: whether a "greater" or a "less" score is better, one rule for all metrics or one for each; None
            infers it from the names.
        greater_keys, less_keys: parts of names for which the rule is "greater" or "less". They decide before
            `infer_rule` does.

    Raises:
        TypeError: an argument is not a string or a list of strings.
        ValueError: a list is empty or names something twice, a rule is unknown or cannot be inferred, the
            numbers of rules and metrics differ, "auto" is not alone, or two metrics would have one file name.
    """

    def __init__(
        self,
        save_best: str | Sequence[str] | None,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Sequence[str] | None = None,
        less_keys: str | Sequence[str] | None = None,
    ) -> None:
        self.metrics = strings("save_best", save_best)
        self._greater, self._less = strings("greater_keys", greater_keys), strings("less_keys", less_keys)
        _refuse_same_files(self.metrics)
        rules = strings("rule", rule, repeated=True)
        for each in rules:
            check_choice("rule", each, ("greater", "less"))
        if "auto" in self.metrics and len(self.metrics) > 1:
            raise ValueError(f"save_best='auto' cannot be combined with other metrics, got {self.metrics}")
        if len(rules) > 1 and len(rules) != len(self.metrics):
            raise ValueError(
                f"rule: expected one, or one for each metric, got {len(rules)} for {self.metrics}"
            )
        if len(rules) == 1:
            rules *= max(1, len(self.metrics))
        self._given: list[str] = rules  # the rules of the argument, in the order of the metrics
        self._rules: dict[str, Rule] = {}  # by metric
        for metric in self.metrics:
            if metric != "auto":
                self.rule_of(metric)

    def __bool__(self) -> bool:
        """Return whether any metric is watched."""
        return bool(self.metrics)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that a validation has the watched metrics; replace "auto" by the first metric of it.

        Raises:
            ValueError: the validation lacks a watched metric.
        """
        if self.metrics == ["auto"] and metrics:
            self.metrics = [next(iter(metrics))]
        for metric in self.metrics:
            if metric not in metrics:
                raise ValueError(f"save_best={metric!r} needs a metric {unreported(metric, metrics)}")

    def better(self, metrics: Mapping[str, float], bests: Mapping[str, Best]) -> list[str]:
        """Return the watched metrics whose score is better than the best so far."""
        return [
            metric
            for metric in self.metrics
            if is_better(metrics[metric], bests.get(metric, Best()).score, self.rule_of(metric))
        ]

    def rule_of(self, metric: str) -> Rule:
        """Return whether a greater or a smaller score of a metric is better.

        Raises:
            ValueError: no rule was given, and none can be inferred from the name.
        """
        if metric not in self._rules:
            given = self._given[self.metrics.index(metric)] if self._given else None
            self._rules[metric] = cast(Rule, given) if given else self._infer(metric)
        return self._rules[metric]

    def _infer(self, metric: str) -> Rule:
        """Infer the rule of a metric from its name, by the given keys first."""
        name = metric.lower()
        for fits in (name.__eq__, name.__contains__):  # a whole name decides before a part of one
            greater = any(fits(key.lower()) for key in self._greater)
            less = any(fits(key.lower()) for key in self._less)
            if greater and less:
                raise ValueError(
                    f"greater_keys and less_keys both match {metric!r}: pass rule='greater' or 'less'"
                )
            if greater or less:
                return "greater" if greater else "less"
        return infer_rule(metric)


def file_part(metric: str) -> str:
    """Return a metric's name in a form that is safe in the name of a file."""
    return safe_name(metric.replace("/", "_"))


def _refuse_same_files(metrics: Sequence[str]) -> None:
    """Raise ValueError if the best checkpoints of two metrics would have the same name."""
    by_file: dict[str, str] = {}
    for metric in metrics:
        other = by_file.setdefault(file_part(metric), metric)
        if other != metric:
            raise ValueError(
                f"save_best={other!r} and {metric!r} would be saved under the same name, "
                f"best_{file_part(metric)}: rename one of the two metrics in the validation"
            )


def infer_rule(metric: str) -> Rule:
    """Infer from a metric's name whether a greater or a smaller score is better.

    Whole words of the name decide, and a word for a loss has precedence. So `val/loss_acc`, `stop_loss` and
    `heatmap_loss` are losses, although MMEngine, which searches for substrings, finds `acc`, `top` and `map`.

    Raises:
        ValueError: no word of the name is known.
    """
    words = _words(metric)
    if words & _LESS:
        return "less"
    if words & _GREATER:
        return "greater"
    guess = near(metric.lower(), [word for word in sorted(_LESS | _GREATER) if len(word) > 5])
    raise ValueError(
        f"cannot infer from its name whether a greater {metric!r} is "
        f"better{f'{guess} Otherwise' if guess else ':'} pass rule='greater' or 'less'"
    )


def _words(metric: str) -> set[str]:
    """Return the words of a name in lower case: "val", "top" and "acc" are among those of `val_top5acc`.

    A word ends at a separator, a digit or a change of case. For names such as `mAP50`, `meanIoU` and `f1`,
    any sequence of words without a separator between them also counts as one word.
    """
    words = set[str]()
    for section in re.split(r"[^A-Za-z0-9]+", metric):
        parts = _PART.findall(section)
        slices = combinations(range(len(parts) + 1), 2)
        words.update("".join(parts[start:end]).lower() for start, end in slices)
    return words


def is_better(score: float, than: float | None, rule: Rule) -> bool:
    """Return whether a score is strictly better than another one; any finite score is better than None.

    NaN and infinite scores are never better, because they could not be beaten afterwards.
    """
    if not math.isfinite(score):
        return False
    if than is None:
        return True
    return score > than if rule == "greater" else score < than
