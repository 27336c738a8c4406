"""Keep the record of the best checkpoints of each metric, limited by `keep_best`.

`CheckpointHook` asks it which score to save, and which checkpoints a new one replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eventloop.checkpoint.retention.best import Best, BestMetrics

Values = tuple[float | None, str, str]
"""The fields of a `Best`, as a checkpoint stores them."""
Record = dict[str, Best]
"""The best checkpoints by name; of each metric the best first, of equal scores the newest first."""


class Bests:
    """The record of the best checkpoints that `keep_best` counts.

    A checkpoint is in the record from the beginning of its save, because the saved state contains the record.

    Args:
        watched: the metrics and their rules.
        limit: the number of best checkpoints of each metric that stay; -1 keeps all.

    Raises:
        ValueError: the limit is not a positive int or -1, or it is not 1 and no metric is watched.
    """

    def __init__(self, watched: BestMetrics, limit: int = 1) -> None:
        _check(watched, limit)
        self._watched, self._limit = watched, limit
        self.record: Record = {}
        """It is replaced, never changed in place, so that a failed save can restore the former record."""

    def first(self) -> dict[str, Best]:
        """Return the best checkpoint of each metric."""
        found: dict[str, Best] = {}
        for best in self.record.values():
            found.setdefault(best.metric, best)
        return found

    def of_first_metric(self) -> Best:
        """Return the best checkpoint of the metric that is watched first."""
        first = self.first()
        watched = (first[metric] for metric in self._watched.metrics if metric in first)
        return next(watched, next(iter(first.values()), Best()))

    def due(self, metrics: Mapping[str, float], names: Mapping[str, str]) -> list[str]:
        """Return the metrics whose score deserves a best checkpoint.

        The score must beat the last of the `limit` best ones, and the checkpoint that has the same name
        already.

        Args:
            metrics: the scores of a validation.
            names: the name that a best checkpoint of each metric would have.
        """
        to_beat = {metric: self._to_beat(metric, name) for metric, name in names.items()}
        return self._watched.better(metrics, to_beat)

    def add(self, best: Best) -> None:
        """Add a checkpoint whose save begins; drop those beyond the limit, and the former one of its name."""
        others = [each for each in self.record.values() if each.metric != best.metric]
        same = [
            each for each in self.record.values() if each.metric == best.metric and each.name != best.name
        ]
        ranked = self._ranked(best.metric, [best, *same])
        if self._limit > 0:
            ranked = ranked[: self._limit]
        self.record = {each.name: each for each in [*others, *ranked]}

    def outdone(self, former: Iterable[str]) -> list[str]:
        """Return the names of a former record that are no longer in this one."""
        return [name for name in former if name not in self.record]

    def state_dict(self) -> dict[str, Any]:
        """Return the best checkpoint of each metric and, if there are more, those ranked after it."""
        first = self.first()
        behind: dict[str, list[list[Any]]] = {}
        for best in self.record.values():
            if best != first[best.metric]:
                behind.setdefault(best.metric, []).append([*best])
        own = {"bests": {metric: [*best] for metric, best in first.items()}}
        return {**own, "bests_behind": behind} if behind else own

    def load(self, first: Mapping[str, Values], behind: Mapping[str, Sequence[Values]]) -> None:
        """Restore the record of the watched metrics from a state.

        The next save removes the checkpoints beyond the limit.

        Args:
            first: the best checkpoint of each metric.
            behind: the checkpoints ranked after it.
        """
        watched = self._watched.metrics if self._watched.metrics != ["auto"] else [*first]
        found = [
            Best(*values)
            for metric in watched
            if metric in first
            for values in (first[metric], *behind.get(metric, ()))
        ]
        self.record = {best.name: best for best in found}

    def _to_beat(self, metric: str, name: str) -> Best:
        ranked = self._ranked(metric, [each for each in self.record.values() if each.metric == metric])
        others = [each.name for each in ranked if each.name != name]
        bars = {name, *(others[self._limit - 1 : self._limit] if self._limit > 0 else ())}
        return next((each for each in ranked if each.name in bars), Best())

    def _ranked(self, metric: str, bests: Sequence[Best]) -> list[Best]:
        """Return checkpoints of one metric, best first; equal scores keep their order."""
        if len(bests) < 2:
            return [*bests]
        greater = self._watched.rule_of(metric) == "greater"
        return sorted(bests, key=lambda best: best.score or 0.0, reverse=greater)


def _check(watched: BestMetrics, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
        raise ValueError(
            "keep_best must be a positive int (the number of best checkpoints of each metric to keep) or -1 "
            f"for all, got {limit!r}; to save no best checkpoints, leave out save_best"
        )
    if not watched and limit != 1:
        raise ValueError(
            f'keep_best={limit} needs a metric: save_best="accuracy", or "auto" for the first one of the '
            f"validation; to keep the newest checkpoints, pass max_keep_ckpts={limit}"
        )
