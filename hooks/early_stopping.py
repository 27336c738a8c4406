"""A hook that stops a training when a validation metric no longer improves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eventloop.checkpoint.retention.best import Rule, infer_rule
from eventloop.events import COMPLETED, AfterTrain, AfterValEpoch, BeforeTrain, CheckpointEvaluated
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.migration.names import knowing_others
from eventloop.state.exchange import decided_by_rank_0
from eventloop.state.schema import Count, read_as
from eventloop.util.checks import at_least, check_bools, check_choice, check_metric, number
from eventloop.util.suggest import unreported

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

DeltaMode = Literal["abs", "rel"]


class EarlyStoppingHook(Hook):
    """Stop the training when a validation metric has not improved in `patience` validations.

        EarlyStoppingHook(monitor="accuracy", patience=5)

    A score is better if it exceeds the best score so far by more than `min_delta`, or is lower by more than
    `min_delta` with `rule="less"`. The run ends at the end of the iteration with every closing event, and the
    last checkpoint is saved. Validations outside a training do not count. The hook's counts are saved in
    checkpoints. The hook runs before `CheckpointHook` (priority 90) saves a best checkpoint, so a resumed run
    stops where an uninterrupted run would. A run that this hook has stopped stops again when it is resumed,
    unless it is given more patience. On several ranks rank 0 decides for all of them.

    Args:
        monitor: the name of a validation metric.
        rule: "greater" or "less" is better; by default inferred from the metric's name.
        min_delta: the least improvement that counts, in the metric's unit. MMEngine's default of 0.1 would
            stop a run whose accuracy rises by 0.05 each time.
        strict: True raises an error for a validation without the metric; False warns, and ignores
            the validation.
        check_finite: True stops the run when the score is NaN or infinite; False counts such a score as no
            improvement.
        patience: the number of validations in a row without improvement after which the run stops; 0 acts as
            1.
        stopping_threshold: a score; the run stops at the first better score.
        delta_mode: "abs", or "rel" if `min_delta` is a fraction of the best score, as in `ReduceLROnPlateau`.

    Raises:
        TypeError, ValueError: an option is of the wrong type, unknown or out of range.
    """

    priority = Priority.LOW
    tunable = ("patience", "stopping_threshold", "min_delta")

    @knowing_others
    def __init__(
        self,
        monitor: str,
        rule: Rule | None = None,
        min_delta: float = 0.0,
        strict: bool = True,
        check_finite: bool = True,
        patience: int = 5,
        stopping_threshold: float | None = None,
        *,
        delta_mode: DeltaMode = "abs",
    ) -> None:
        check_metric("monitor", monitor)
        check_bools(strict=strict, check_finite=check_finite)
        if rule is not None:
            check_choice("rule", rule, ("greater", "less"))
        check_choice("delta_mode", delta_mode, ("abs", "rel"))
        self._monitor, self._rule = monitor, rule if rule is not None else infer_rule(monitor)
        self._sign = 1.0 if self._rule == "greater" else -1.0
        """The factor by which a score is multiplied, so that a greater product is better."""
        self._relative = delta_mode == "rel"
        self._strict, self._check_finite = strict, check_finite
        self._best: float | None = None
        self.patience, self.min_delta = patience, min_delta
        self.stopping_threshold = stopping_threshold
        self.wait = 0
        """The number of validations since the best score."""
        self._invalid = ""
        """The NaN or infinite score that stopped the run, as text."""
        self._training = self._warned = False

    @property
    def patience(self) -> int:
        """The number of validations in a row without improvement after which the run stops."""
        return self._patience

    @patience.setter
    def patience(self, patience: int) -> None:
        at_least("patience", patience, 0)
        self._patience = patience

    @property
    def stopping_threshold(self) -> float | None:
        """A score: the run stops at the first better one. None if the run does not stop for a good score."""
        return self._threshold

    @stopping_threshold.setter
    def stopping_threshold(self, threshold: float | None) -> None:
        """Set the threshold, and its product with the sign, which later scores are compared with."""
        if threshold is not None:
            number("stopping_threshold", threshold)
        self._threshold = threshold
        self._signed_threshold = inf if threshold is None else threshold * self._sign

    @property
    def min_delta(self) -> float:
        """The least improvement that counts."""
        return self._min_delta

    @min_delta.setter
    def min_delta(self, min_delta: float) -> None:
        self._min_delta = number("min_delta", min_delta, least=0)
        self.best = self._best  # computes the score to beat with the new min_delta

    @property
    def best(self) -> float | None:
        """The best score so far; None before the first one."""
        return self._best

    @best.setter
    def best(self, score: float | None) -> None:
        """Set the best score, and the bound that a later score must exceed by its delta."""
        self._best = score
        self._signed_to_beat = -inf  # a score is better than the best one if score * sign is above this
        if score is not None:
            delta = self._min_delta * abs(score) if self._relative else self._min_delta
            self._signed_to_beat = score * self._sign + delta

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer that never validates, or whose validation does not report the metric.

        Raises:
            ValueError: the trainer has no `val_loader`, or `strict` is True and the metric is not reported.
        """
        if trainer.val_loader is None and not trainer.host:
            raise ValueError(
                f"EarlyStoppingHook(monitor={self._monitor!r}) needs a validation: give the Trainer a "
                "val_loader"
            )
        if self._strict:
            trainer.monitored.require(self._monitor, f"EarlyStoppingHook(monitor={self._monitor!r})")

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Stop a resumed run that this hook had stopped, unless its new options let it continue."""
        self._training = True
        if self._invalid and self._check_finite:
            trainer.stop(f"early stopping, before: {self._invalid}")
        if self.best is None:
            return
        signed = self.best * self._sign
        if self._patience_used_up or signed > self._signed_threshold:
            trainer.stop(f"early stopping, before: {self._stop_reason(self.best, signed)}")

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Stop counting validations."""
        self._training = False

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Compare the validation's score with the best one, and stop the training if that is due.

        Raises:
            ValueError: `strict` is True, and the validation does not have the metric.
        """
        if self._training and event.reason == COMPLETED:
            self._count(trainer, event.metrics)

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Count the metrics of a checkpoint, which another process has computed, as those of a validation.

        Raises:
            ValueError: `strict` is True, and the metric is missing.
        """
        if self._training:
            self._count(trainer, event.metrics)

    def _count(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare the score among `metrics` with the best one, and stop the training if that is due."""
        score = metrics.get(self._monitor)
        if score is None:
            self._report_missing(metrics)
            return
        if type(score) is not float:
            score = float(score)
        if trainer.world_size > 1:  # a rank that stops alone makes the others wait forever
            own_score = score
            score = decided_by_rank_0(lambda: own_score)
        if not isfinite(score) and self._check_finite:
            self._invalid = f"{self._monitor} is {score}"
            trainer.stop(f"early stopping: {self._invalid}")
            return
        signed = score * self._sign if isfinite(score) else -inf  # -inf is worse than every score
        if signed > self._signed_to_beat:
            self.best, self.wait = score, 0
        else:
            self.wait += 1
        if signed > self._signed_threshold:
            # even if it improves by less than min_delta: `before_train` of a resumed run stops for it again
            self.best = score
        if self._patience_used_up or signed > self._signed_threshold:
            trainer.stop(f"early stopping: {self._stop_reason(score, signed)}")

    @property
    def _patience_used_up(self) -> bool:
        """True after `patience` validations without improvement; 0 acts as 1, as in MMEngine."""
        return self.wait >= max(self._patience, 1)

    def _stop_reason(self, score: float, signed: float) -> str:
        """Return why the run stops at a score; `signed` is the score multiplied by `_sign`."""
        if self._threshold is not None and signed > self._signed_threshold:
            return f"{self._monitor} is {score:g}, better than stopping_threshold={self._threshold:g}"
        best = "none" if self.best is None else f"{self.best:g}"
        return (
            f"{self._monitor} has not become better in {self.wait} validations (patience={self._patience}), "
            f"the best was {best}"
        )

    def _report_missing(self, metrics: Mapping[str, float]) -> None:
        """Report that a validation lacks the metric: raise with `strict`, else warn the first time."""
        text = f"EarlyStoppingHook monitors {self._monitor!r}, {unreported(self._monitor, metrics)}"
        if self._strict:
            raise ValueError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(text, UserWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Return the metric, its rule, the best score, the validations since it, and an invalid score."""
        return {
            "monitor": self._monitor,
            "rule": self._rule,
            "best": self.best,
            "wait": self.wait,
            "invalid": self._invalid,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the counts of a saved state; ignore a state that was saved for another metric or rule.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        saved = read_as(_State, state, "EarlyStoppingHook cannot take its state")
        if (saved.monitor, saved.rule) != (self._monitor, self._rule):
            logger.warning(
                "the checkpoint's early stopping monitored %s (%s is better), this hook monitors %s "
                "(%s): counting begins again",
                saved.monitor,
                saved.rule,
                self._monitor,
                self._rule,
            )
            return
        self.best, self.wait, self._invalid = saved.best, saved.wait, saved.invalid


class _State(msgspec.Struct):
    monitor: str
    rule: str
    best: float | None
    wait: Count
    invalid: str
