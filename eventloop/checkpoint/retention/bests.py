"""The best checkpoints of each metric: which there are, what a score has to beat to be one, and which it outdoes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eventloop.checkpoint.retention.best import Best, BestMetrics

Values = tuple[float | None, str, str]
"""The fields of a `Best`, as a checkpoint holds them."""
Record = dict[str, Best]
"""By name; of each metric the best first, of equal ones the newest, as `resume("best")` ranks them."""


class Bests:
    """The record of what `keep_best` counts. One that is being saved is in it, for its own file is to say so.

    Args:
        watched: the metrics, and what is better in each.
        limit: so many of each metric stay; -1 all.

    Raises:
        ValueError: the limit is no such number, or there is no metric that they would be the best of.
    """

    def __init__(self, watched: BestMetrics, limit: int = 1) -> None:
        _check(watched, limit)
        self._watched, self._limit = watched, limit
        self.record: Record = {}
        """It is replaced, never changed: a save that fails goes back to the one before."""

    def first(self) -> dict[str, Best]:
        """The best of each metric."""
        found: dict[str, Best] = {}
        for best in self.record.values():
            found.setdefault(best.metric, best)
        return found

    def of_first_metric(self) -> Best:
        """The best of the metric that is watched first."""
        first = self.first()
        watched = (first[metric] for metric in self._watched.metrics if metric in first)
        return next(watched, next(iter(first.values()), Best()))

    def due(self, metrics: Mapping[str, float], names: Mapping[str, str]) -> list[str]:
        """The metrics whose score is one to save, under the names they would have: it is better than the last of so many
        that stay, and than what has that name already."""
        to_beat = {metric: self._to_beat(metric, name) for metric, name in names.items()}
        return self._watched.better(metrics, to_beat)

    def add(self, best: Best) -> None:
        """It is being saved: those that it outdoes are no longer in the record, nor what had its name."""
        others = [each for each in self.record.values() if each.metric != best.metric]
        same = [
            each for each in self.record.values() if each.metric == best.metric and each.name != best.name
        ]
        ranked = self._ranked(best.metric, [best, *same])
        if self._limit > 0:
            ranked = ranked[: self._limit]
        self.record = {each.name: each for each in [*others, *ranked]}

    def outdone(self, former: Iterable[str]) -> list[str]:
        """Of the names of a former record those that are no longer in this one."""
        return [name for name in former if name not in self.record]

    def state_dict(self) -> dict[str, Any]:
        """The best of each metric and, where there are more, those behind it."""
        first = self.first()
        behind: dict[str, list[list[Any]]] = {}
        for best in self.record.values():
            if best != first[best.metric]:
                behind.setdefault(best.metric, []).append([*best])
        own = {"bests": {metric: [*best] for metric, best in first.items()}}
        return {**own, "bests_behind": behind} if behind else own

    def load(self, first: Mapping[str, Values], behind: Mapping[str, Sequence[Values]]) -> None:
        """Take the best checkpoints of a state, for the metrics that are watched. Those beyond the limit are removed with
        the next save."""
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
        """The best first, equal ones as they come."""
        if len(bests) < 2:
            return [*bests]
        greater = self._watched.rule_of(metric) == "greater"
        return sorted(bests, key=lambda best: best.score or 0.0, reverse=greater)


def _check(watched: BestMetrics, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
        raise ValueError(
            "keep_best must be a positive int, how many of the best of each metric stay, or -1 for all, "
            f"got {limit!r}; without save_best there are none"
        )
    if not watched and limit != 1:
        raise ValueError(
            f'keep_best={limit} needs the metric they are the best of: save_best="accuracy", or "auto" for the first '
            f"of the validation; the newest are kept by max_keep_ckpts={limit}"
        )
