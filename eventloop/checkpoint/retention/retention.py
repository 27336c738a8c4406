"""Decide which checkpoints of a `CheckpointHook` are kept, and which ones a new checkpoint replaces.

A hook keeps the newest `max_keep_ckpts` regular checkpoints, and the `keep_best` best ones of each watched
metric. A checkpoint enters the record when its save begins, because the saved state contains the record; it
leaves the record if the save fails. The checkpoints that it replaces are removed once it is durable. A save
that has begun, and has neither become durable nor failed, is called running.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from eventloop.checkpoint.directory import Found, scan
from eventloop.checkpoint.manifest import Label, score
from eventloop.checkpoint.retention.awaited import Awaited
from eventloop.checkpoint.retention.best import Best, BestMetrics
from eventloop.checkpoint.retention.record_state import read_state
from eventloop.util.checks import positive_or

Bests = dict[str, Best]
"""The best checkpoints by name; for each metric best first, those with equal scores newest first."""


class Replaced(NamedTuple):
    """The checkpoints that a save removes once it is durable.

    Attributes:
        names: their names, in the order of removal: oldest first, or worst first among best ones.
        spares: how many of these checkpoints are kept, the last ones that exist. Some may not exist, because
            earlier saves are still running and may fail.
    """

    names: tuple[str, ...] = ()
    spares: int = 0


class _Running(NamedTuple):
    """A running save of a regular checkpoint: its name, its iteration, and the checkpoints it replaces."""

    name: str
    iteration: int
    replaced: Replaced


_Save = TypeVar("_Save", _Running, Best)


class Retention:
    """The record of a hook's checkpoints and of the last validation.

    Several checkpoints may be saved at a time. A score is also compared with those of running best saves. If
    such a save fails, the checkpoints that it would have replaced count again, because nothing is removed
    before its successor is durable.

    Args:
        watched: the metrics and their rules.
        max_keep: the number of newest regular checkpoints to keep; -1 keeps all.
        keep_best: the number of best checkpoints of each metric to keep; -1 keeps all.

    Raises:
        ValueError: `keep_best` is not a positive int or -1, or it is not 1 and no metric is watched.
    """

    def __init__(self, watched: BestMetrics, max_keep: int = -1, keep_best: int = 1) -> None:
        _check(watched, keep_best)
        self._watched, self._max_keep, self._keep_best = watched, max_keep, keep_best
        self.durable: list[str] = []
        """The names of the durable regular checkpoints, oldest first."""
        self._durable_at = -1  # the iteration of the last durable regular checkpoint; -1 before the first
        self.aside: list[str] = []
        """The names of checkpoints that no save replaces, because a loss became NaN or infinite later."""
        self._lost: object | None = None  # the last such loss, as `set_aside_if` has read it
        self._for_good: list[str] | None = None  # the names that were set aside for the first such loss
        self._begun: list[_Running] = []  # running regular saves, oldest first
        self.origin: list[str] = []
        """The name of the checkpoint of this directory from which the run was resumed, if any."""
        self.awaited = Awaited()
        """The checkpoints that wait for their validation, which are not removed yet."""
        self.bests: Bests = {}
        """The best checkpoints by name, running saves included."""
        self._durable_bests: Bests = {}
        self._begun_bests: list[Best] = []  # running best saves, oldest first
        self.sequence = -1
        """The sequence number of the directory's last label; -1 before the directory was scanned."""
        self._metrics: dict[str, float] = {}  # the scores of the last validation
        self._validated_at: int | None = None  # its iteration; None before the first one

    # --- regular checkpoints -------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the names of the durable regular checkpoints, then those of the running saves."""
        names = dict.fromkeys(self.durable)
        for save in self._begun:
            if save.name not in self.aside:
                names.pop(save.name, None)  # one that is saved again is the newest
                names[save.name] = None
        return [*names]

    @property
    def known(self) -> list[str]:
        """Return the names of all checkpoints that are kept, running best saves included."""
        return [*self.aside, *self.durable, *self.bests, *self.origin]

    def set_aside_if(self, read_lost: Callable[[], object | None]) -> None:
        """Set aside the checkpoints that exist or are being saved, if the loss became NaN or infinite again.

        Those that are set aside for the first such loss are kept for good, those for a later one until the
        next such loss. Otherwise a training that diverges again and again would fill the disk.

        Args:
            read_lost: returns the first NaN or infinite loss since the last finite one, or None. It is called
                only if a save may replace a checkpoint.
        """
        if not (self._max_keep > 0 or self.bests) or (lost := read_lost()) is None or lost is self._lost:
            return
        self._lost = lost
        kept = [*self.names, *self.bests]
        if self._for_good is None:
            self._for_good = kept
        kept = [*dict.fromkeys([*self._for_good, *kept])]
        # those set aside for the loss before are regular checkpoints again, so that later saves replace them
        self.aside, self.durable = kept, [name for name in self.aside if name not in kept]

    @property
    def saved_at(self) -> int:
        """Return the iteration of the last durable checkpoint or running save; -1 before the first."""
        return self._begun[-1].iteration if self._begun else self._durable_at

    def begin(self, name: str, iteration: int) -> Replaced:
        """Record that the save of a regular checkpoint begins; return the checkpoints it replaces."""
        older, replaced = [each for each in self.names if each != name], Replaced()
        self.awaited.add(name, iteration)
        if self._max_keep > 0:
            replaced = Replaced(self.awaited.removable(older, self._max_keep - 1), self._max_keep - 1)
        self._begun.append(_Running(name, iteration, replaced))
        return replaced

    def await_again(self, found: Found, directory: Path, known: Collection[int]) -> None:
        """Wait for the validation of a resumed run's checkpoints.

        Args:
            found: a scan of the directory.
            directory: the directory of the checkpoints.
            known: the iterations whose checkpoints were validated, which are left out.
        """
        for name in self.durable:
            if (iteration := found.manifests[directory / name].iter) not in known:
                self.awaited.add(name, iteration)

    def surplus(self) -> list[str]:
        """Drop the checkpoints that were retained only to be validated from the record, and return them.

        The list is empty if the hook awaits no validations or keeps all checkpoints, or while a save runs.
        """
        if not self.awaited.limit or self._max_keep < 0 or self._begun:
            return []
        surplus = self.awaited.removable(self.durable, self._max_keep)[: -self._max_keep]
        self.durable = [name for name in self.durable if name not in surplus]
        return [*surplus]

    def resumed_from(self, iteration: int) -> None:
        """Record that the run was resumed from its newest checkpoint, which is of this iteration."""
        self._durable_at = iteration

    # --- best checkpoints ----------------------------------------------------------------------------------

    def best_of_each(self) -> Bests:
        """Return the best checkpoint of each metric, by the metric."""
        first: Bests = {}
        for best in self.bests.values():  # of each metric the best comes first
            first.setdefault(best.metric, best)
        return first

    def of_first_metric(self) -> Best:
        """Return the best checkpoint of the first watched metric that has one, else of any; else `Best()`."""
        first = self.best_of_each()
        watched = (first[metric] for metric in self._watched.metrics if metric in first)
        return next(watched, next(iter(first.values()), Best()))

    def due(self, metrics: Mapping[str, float], names: Mapping[str, str]) -> tuple[list[str], Bests]:
        """Return the metrics whose score is among the best, and the best checkpoints so far.

        A score must beat the worst of the `keep_best` best ones. If a best checkpoint of the same name
        exists, the score must beat that one as well, because it would be replaced.

        Args:
            metrics: the scores of a validation.
            names: the name that a best checkpoint of each metric would have.
        """
        to_beat = {metric: self._to_beat(metric, name) for metric, name in names.items()}
        return self._watched.better(metrics, to_beat), self.bests

    def begin_best(self, best: Best) -> Replaced:
        """Record that the save of a best checkpoint begins; return the checkpoints it replaces."""
        others = [
            each
            for each in self._newest_bests()
            if each.metric == best.metric and each.name not in (best.name, *self.aside)
        ]
        self._begun_bests.append(best)
        self.bests = self._top(self._newest_bests())
        if self._keep_best < 0:
            return Replaced()
        worst_first = reversed(self._ranked(best.metric, others))
        return Replaced(tuple(each.name for each in worst_first), self._keep_best - 1)

    def follow(self, bests: Bests) -> None:
        """Replace the record of best checkpoints; other ranks adopt that of rank 0, which makes the saves."""
        self._durable_bests, self._begun_bests, self.bests = dict(bests), [], dict(bests)

    def _newest_bests(self) -> list[Best]:
        """Return the best checkpoints that are being saved or durable; of one name only the newest.

        Running saves come first, the newest of them before the others.
        """
        newest: Bests = {}
        for best in (*reversed(self._begun_bests), *self._durable_bests.values()):
            newest.setdefault(best.name, best)
        return [*newest.values()]

    def _top(self, bests: Sequence[Best]) -> Bests:
        """Return by name those checkpoints that are among the `keep_best` best ones of their metric."""
        limit = self._keep_best if self._keep_best > 0 else None
        metrics = dict.fromkeys(best.metric for best in bests)
        ranked = (
            self._ranked(metric, [b for b in bests if b.metric == metric])[:limit] for metric in metrics
        )
        return {best.name: best for each in ranked for best in each}

    def _to_beat(self, metric: str, name: str) -> Best:
        """Return the best checkpoint that a new score must beat; an empty `Best` if any score is enough.

        Args:
            metric: the metric of the score.
            name: the name that the new checkpoint would have.
        """
        ranked = self._ranked(metric, [each for each in self.bests.values() if each.metric == metric])
        others = [each.name for each in ranked if each.name != name]
        last_kept = others[self._keep_best - 1 : self._keep_best] if self._keep_best > 0 else ()
        to_beat = {name, *last_kept}
        return next((each for each in ranked if each.name in to_beat), Best())

    def _ranked(self, metric: str, bests: Sequence[Best]) -> list[Best]:
        """Return checkpoints of one metric, best first; equal scores keep their order."""
        if len(bests) < 2:
            return [*bests]
        greater = self._watched.rule_of(metric) == "greater"
        return sorted(bests, key=lambda best: best.score or 0.0, reverse=greater)

    # --- the end of a save ---------------------------------------------------------------------------------

    def done(self, name: str) -> None:
        """Record that a save is durable, and that the checkpoints it replaces are removed."""
        if (best := _pop(self._begun_bests, name)) is not None:
            others = [each for each in self._durable_bests.values() if each.name != name]
            self._durable_bests = self._top([best, *others])
            self.bests = self._top(self._newest_bests())
        elif (save := _pop(self._begun, name)) is not None:
            self._durable_at = save.iteration
            if name in self.aside:
                return
            kept = [each for each in self.durable if each != name]
            gone = [each for each in kept if each in save.replaced.names]
            for each in gone[: max(0, len(gone) - save.replaced.spares)]:
                kept.remove(each)
            self.durable = [*kept, name]

    def failed(self, name: str) -> None:
        """Record that a save failed or was skipped; the former checkpoint of its name still exists."""
        if _pop(self._begun_bests, name) is not None:
            self.bests = self._top(self._newest_bests())
            return
        _pop(self._begun, name)
        self.awaited.remove(name)

    # --- labels --------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[dict[str, float], int] | None:
        """Return the scores of the last validation, and its iteration; None before the first validation."""
        return None if self._validated_at is None else (self._metrics, self._validated_at)

    def scan_directory(self, directory: Path) -> Found:
        """Scan the directory so that later labels get a larger sequence number, and return the scan."""
        found = scan(directory)
        self.sequence = found.last
        return found

    def drop_missing(self, there: Collection[str], *, bests: bool = False) -> None:
        """Drop those checkpoints from the record that the directory does not contain.

        A loaded state also names saves that were running, which may have failed or been killed.

        Args:
            there: the names of the checkpoints that the directory contains.
            bests: whether to drop best checkpoints, too. It is False if the run was resumed from a checkpoint
                of another directory, because new scores must still beat the scores from there.
        """
        self.durable = [name for name in self.durable if name in there]
        if bests:
            self.follow({name: best for name, best in self.bests.items() if name in there})

    def validated(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record the scores of a completed validation."""
        self._metrics, self._validated_at = dict(metrics), iteration

    def label(self, best: str = "") -> Label:
        """Return the label of the checkpoint that is about to be saved, whose number is `sequence`.

        Args:
            best: the metric for which it is one of the best; "" for a regular checkpoint.
        """
        return Label(
            sequence=self.sequence,
            best={best: self._watched.rule_of(best)} if best else {},
            keep_best=self._keep_best,
            validated_at=self._validated_at,
            metrics={metric: score(float(value)) for metric, value in self._metrics.items()},
        )

    def fields_of_best(self, best: str) -> dict[str, Any]:
        """Return the fields of a label by which a saved checkpoint becomes one of the best, as JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self.label(best))
        del fields["sequence"]  # the best checkpoint has the sequence number of the saved one
        return fields

    # --- state ---------------------------------------------------------------------------------------------

    def saved_as(self, iteration: int) -> str:
        """Return the name of the regular checkpoint of an iteration, if it is the newest one; else ""."""
        return self.names[-1] if self.names and self.saved_at == iteration else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are kept, and the last validation."""
        first = self.best_of_each()
        behind: dict[str, list[list[Any]]] = {}
        for best in self.bests.values():
            if best != first[best.metric]:
                behind.setdefault(best.metric, []).append([*best])
        state = {
            "metrics": dict(self._metrics),
            "validated_at": self._validated_at,
            "kept": self.names,
            "bests": {metric: [*best] for metric, best in first.items()},
        }
        return {**state, "bests_behind": behind} if behind else state

    def load(self, state: Mapping[str, Any], directory: Path) -> list[str] | None:
        """Restore the record from a saved state, and forget running saves, which belong to the former run.

        Scores of unwatched metrics are dropped. The next save removes the checkpoints beyond the limits.

        Args:
            state: the record's part of the hook's state in a checkpoint.
            directory: the directory of the checkpoints, for errors.

        Returns:
            The metrics that the hook watched, if there were several.

        Raises:
            CheckpointError: a field is missing or has another type, or a checkpoint is named by a path. A
                later save would remove such a path.
        """
        saved = read_state(state, directory)
        self.durable, self._durable_at, self._begun = [*saved.kept], -1, []
        self.aside, self._lost, self._for_good = [], None, None
        self._metrics, self._validated_at = dict(saved.metrics), saved.validated_at
        watched = self._watched.metrics if self._watched.metrics != ["auto"] else [*saved.bests]
        bests = [
            Best(*values)
            for metric in watched
            if metric in saved.bests
            for values in (saved.bests[metric], *saved.bests_behind.get(metric, ()))
        ]
        self.follow({best.name: best for best in bests})
        return saved.watched


def _pop(running: list[_Save], name: str) -> _Save | None:
    """Remove the oldest running save called `name`, and return it; return None if there is none."""
    for save in running:
        if save.name == name:
            running.remove(save)
            return save
    return None


def _check(watched: BestMetrics, limit: object) -> None:
    """Check the argument `keep_best`, given as `limit`; without a watched metric it must be 1."""
    positive_or(-1, "keep_best", limit, ", for all,")
    if not watched and limit != 1:
        raise ValueError(
            f'keep_best={limit} needs a metric: save_best="accuracy", or "auto" for the first one of the '
            f"validation; to keep the newest checkpoints, pass max_keep_ckpts={limit}"
        )
