"""Mark checkpoints as best ones when another process, an evaluator, reports their metrics.

`CheckpointHook` uses it on the training thread, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from eventloop.checkpoint.retention.best import Best, BestMetrics, file_part
from eventloop.checkpoint.retention.pending import Saves
from eventloop.checkpoint.retention.retention import Bests, Retention
from eventloop.checkpoint.saving.mark import Mark
from eventloop.checkpoint.saving.overlapped_copy import SavingTrainer
from eventloop.events import CheckpointEvaluated
from eventloop.state.exchange import decided_by_rank_0

BEST = "best_{}_{}"
"""The name of a best checkpoint, by its metric and the name of the regular checkpoint."""


class Marking:
    """Record the metrics of a hook's checkpoints, and mark those whose scores are among the best.

    Args:
        retention: the hook's record.
        saves: the hook's saves.
        watched: the metrics and their rules.
        directory: the directory of the checkpoints.
        regular_name: returns the name of a regular checkpoint, given its completed epochs and iterations.
    """

    def __init__(
        self,
        retention: Retention,
        saves: Saves,
        watched: BestMetrics,
        directory: Path,
        regular_name: Callable[[int, int], str],
    ) -> None:
        self._retention, self._saves, self._watched = retention, saves, watched
        self._directory, self._regular_name = directory, regular_name

    def record(self, trainer: SavingTrainer, event: CheckpointEvaluated) -> None:
        """Record the metrics of a checkpoint; on several ranks this is a collective operation.

        Raises:
            ValueError: a metric of `save_best` is missing; the message suggests a similar one.
        """
        self._saves.report_done(trainer)  # first, so that a best score whose mark has failed does not count
        self._retention.awaited.validated(event.iter)
        self._retention.validated(event.metrics, event.iter)
        if not self._watched:
            return
        self._watched.check(event.metrics)
        source = Path(event.path).name
        names = {metric: self._name_of(metric, source, event) for metric in self._watched.metrics}
        due, bests = decided_by_rank_0(partial(self._due, source, event.metrics, names))
        if due and trainer.rank > 0:
            self._retention.follow(bests)
        for metric in due:
            self._mark(trainer, source, Best(event.metrics[metric], names[metric], metric), event.iter)

    def _due(
        self, source: str, metrics: Mapping[str, float], names: Mapping[str, str]
    ) -> tuple[list[str], Bests]:
        """Return the metrics for which a checkpoint is marked, and the best checkpoints so far.

        The list is empty if the checkpoint was removed meanwhile.

        Args:
            source: the name of the checkpoint.
            metrics: its scores.
            names: the name of the best checkpoint for each metric.
        """
        if source not in (*self._retention.known, *self._retention.names):
            return [], self._retention.bests
        return self._retention.due(metrics, names)

    def _name_of(self, metric: str, source: str, event: CheckpointEvaluated) -> str:
        """Return the name of the best checkpoint of a metric that is made of the checkpoint `source`."""
        # it is a best checkpoint itself if a run was resumed from one whose regular checkpoint was removed
        if source.startswith(BEST.format("", "")[:5]):
            source = self._regular_name(event.epoch, event.iter)
        return BEST.format(file_part(metric), source)

    def _mark(self, trainer: SavingTrainer, source: str, best: Best, iteration: int) -> None:
        """Record a best checkpoint, and begin to make it of the checkpoint `source`, on rank 0 only."""
        replaced = self._retention.begin_best(best)
        if trainer.rank > 0 or source == best.name:
            self._retention.done(best.name)
        elif trainer.ownership.lost:  # the directory is another run's by now
            self._retention.failed(best.name)
        else:
            directory = self._directory.absolute()
            old = tuple(directory / name for name in replaced.names)
            fields = self._retention.fields_of_best(best.metric)
            mark = Mark(directory / best.name, directory / source, iteration, fields, old, replaced.spares)
            self._saves.mark(trainer, mark, self._retention)
