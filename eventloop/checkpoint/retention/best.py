"""Which scores are watched, and which of two is better."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple, cast

from eventloop.util.file_names import safe_name
from eventloop.util.suggest import near, suggest

Rule = Literal["greater", "less"]

_LESS = {"loss", "error", "err", "mae", "mse", "rmse", "perplexity", "ppl", "wer", "cer", "fid", "nll"}
_GREATER = {
    "acc", "accuracy", "top", "top1", "top5", "ap", "ar", "auc", "auroc", "precision", "recall", "f1", "map", "mdice",
    "dice", "miou", "iou", "macc", "aacc", "psnr", "ssim", "bleu", "rouge", "kappa",
}  # fmt: skip
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
"""`ROC`, `Accuracy`, `acc`, `50`."""


class Best(NamedTuple):
    """The best score so far, the file that has it, and the metric; None, "" and "" before the first."""

    score: float | None = None
    name: str = ""
    metric: str = ""


class BestMetrics:
    """Which metrics are watched, and what is better in each.

    Args:
        save_best: a metric, several, or "auto" for the first of the first validation.
        rule: "greater" or "less", for all of them or one each; by default told from the names.
        greater_keys, less_keys: parts of names, asked before `infer_rule` is.

    Raises:
        TypeError, ValueError: see the message.
    """

    def __init__(
        self,
        save_best: str | Sequence[str] | None,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Sequence[str] | None = None,
        less_keys: str | Sequence[str] | None = None,
    ) -> None:
        self.metrics = _texts("save_best", save_best)
        self._greater, self._less = _texts("greater_keys", greater_keys), _texts("less_keys", less_keys)
        _refuse_same_files(self.metrics)
        rules = _texts("rule", rule)
        for each in rules:
            if each not in ("greater", "less"):
                raise ValueError(f"unknown rule {each!r}{suggest(each, ['greater', 'less'])}")
        if "auto" in self.metrics and len(self.metrics) > 1:
            raise ValueError(f"save_best='auto' stands alone, got {self.metrics}")
        if len(rules) > 1 and len(rules) != len(self.metrics):
            raise ValueError(f"give one rule, or one for each metric: got {len(rules)} for {self.metrics}")
        if len(rules) == 1:
            rules *= max(1, len(self.metrics))
        self._given: list[str] = rules
        self._rules: dict[str, Rule] = {}
        for metric in self.metrics:
            if metric != "auto":
                self.rule_of(metric)

    def __bool__(self) -> bool:
        return bool(self.metrics)

    def settle(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a validation, and settle what "auto" is.

        Raises:
            KeyError: one that is watched is not among them (with a suggestion).
            ValueError: no rule is known for the first of them.
        """
        if self.metrics == ["auto"] and metrics:
            self.metrics = [next(iter(metrics))]
        for metric in self.metrics:
            if metric not in metrics:
                known = suggest(metric, [*metrics]) if metrics else ": it returned none"
                raise KeyError(f"save_best={metric!r} is no metric of the validation{known}")

    def better(self, metrics: Mapping[str, float], bests: Mapping[str, Best]) -> list[str]:
        """Those whose score is better than that of the best so far."""
        return [
            metric
            for metric in self.metrics
            if is_better(metrics[metric], bests.get(metric, Best()).score, self.rule_of(metric))
        ]

    def rule_of(self, metric: str) -> Rule:
        """What is better in a metric.

        Raises:
            ValueError: its name does not say.
        """
        if metric not in self._rules:
            given = self._given[self.metrics.index(metric)] if self._given else None
            self._rules[metric] = cast(Rule, given) if given else self._infer(metric)
        return self._rules[metric]

    def _infer(self, metric: str) -> Rule:
        name = metric.lower()
        for fits in (name.__eq__, name.__contains__):  # a whole name says more than a part of one
            greater = any(fits(key.lower()) for key in self._greater)
            less = any(fits(key.lower()) for key in self._less)
            if greater and less:
                raise ValueError(f"greater_keys and less_keys both fit {metric!r}: say its rule")
            if greater or less:
                return "greater" if greater else "less"
        return infer_rule(metric)


def file_part(metric: str) -> str:
    """How a metric is called in the name of a file."""
    return safe_name(metric.replace("/", "_"))


def _refuse_same_files(metrics: Sequence[str]) -> None:
    of_file: dict[str, str] = {}
    for metric in metrics:
        other = of_file.setdefault(file_part(metric), metric)
        if other != metric:
            raise ValueError(
                f"save_best={other!r} and {metric!r} would be saved under the same name, best_{file_part(metric)}: "
                "let the validation return one of them under another"
            )


def _texts(what: str, value: object) -> list[str]:
    """A text or several, each once."""
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"{what} must be a text or a list of them, got {value!r}")
    if not values or (what != "rule" and len(set(values)) < len(values)):
        raise ValueError(f"{what} must name something, each once, got {value!r}")
    return list(values)


def infer_rule(metric: str) -> Rule:
    """Tell from a metric's name whether more of it is better.

    Whole words of the name decide, and a word for losses wins: `val/loss_acc`, `stop_loss` and `heatmap_loss`
    are losses, which MMEngine's substrings take for accuracies.

    Raises:
        ValueError: the name says neither.
    """
    words = _words(metric)
    if words & _LESS:
        return "less"
    if words & _GREATER:
        return "greater"
    guess = near(metric.lower(), [word for word in sorted(_LESS | _GREATER) if len(word) > 5])
    raise ValueError(
        f"cannot tell from its name whether more {metric!r} is better{f'{guess} Otherwise' if guess else ':'} say "
        "rule='greater' or 'less'"
    )


def _words(metric: str) -> set[str]:
    """The words of a name, which end at separators, digits and changes of case: `val_top5acc`, `BalancedAccuracy`. As
    `mAP50`, `meanIoU` and `f1` have them within a word, neighbours also stand for one together."""
    words = set[str]()
    for chunk in re.split(r"[^A-Za-z0-9]+", metric):
        parts = _PART.findall(chunk)
        words.update("".join(parts[i:j]).lower() for i, j in combinations(range(len(parts) + 1), 2))
    return words


def is_better(score: float, than: float | None, rule: Rule) -> bool:
    """Strictly better; a score that is NaN or infinite never is, so it cannot become an unbeatable best."""
    if not math.isfinite(score):
        return False
    if than is None:
        return True
    return score > than if rule == "greater" else score < than
