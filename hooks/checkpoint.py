"""Saves checkpoints: at an interval, at the end, and the best one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.checkpoint import SUFFIX, find_checkpoints, save_checkpoint
from eventloop.events import (
    COMPLETED,
    AfterRun,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeTrain,
    CheckpointFailed,
    CheckpointSaved,
)
from eventloop.hooks.best import Best, BestMetrics, Rule, is_better
from eventloop.hooks.checkpoint_options import check_options, published
from eventloop.hooks.hook import Hook
from eventloop.hooks.publish import publish
from eventloop.priority import Priority
from eventloop.saver import Saver
from eventloop.saver_thread import Written
from eventloop.scopes import ERROR, LEFT, ends_at_once

if TYPE_CHECKING:
    from eventloop.resume import Within
    from eventloop.trainer import Trainer

logger = logging.getLogger("eventloop")


class _Record(NamedTuple):
    """What the hook says of the files there are; a save that fails puts it back."""

    bests: dict[str, Best]
    kept: list[str]
    saved_at: int


class _Saving(NamedTuple):
    """A checkpoint on its way to the disk; `written` gives its size, and when it was durable."""

    path: Path
    began: float
    written: Future[Written]
    before: _Record


class CheckpointHook(Hook):
    """Saves the whole state of the trainer under `work_dir`; any file it wrote can be resumed from.

        CheckpointHook(interval=1, max_keep_ckpts=3, save_best="accuracy")

    The state is copied at once; a thread writes it, in a longer run a process. `checkpoint_saved` is
    emitted when the bytes are durable, `checkpoint_failed` when they are not, in the first iteration after. The
    saves of the end of a run are waited for; a second Ctrl-C leaves them to the process, or gives them up. Nothing
    older is removed before its successor is durable.

    Args:
        interval: save every so many epochs or iterations; -1 never.
        by_epoch: the unit of `interval`; by default that of the run.
        save_begin: the epoch or iteration from which `interval` is counted.
        save_last: save at the end of the run too, also when it is stopped.
        max_keep_ckpts: keep the newest so many, -1 all. The best one does not count.
        save_best: a metric of the validation, several, or "auto" for its first; the best of each is saved beside
            the others, whole, so it can be resumed from too.
        rule: "greater" or "less", for all of them or one each; by default told from the metric's name.
        greater_keys, less_keys: parts of metrics' names that tell so, before the rules known here.
        published_keys: at the end of the run the last checkpoint and the best ones are written once more with these
            keys alone, as `<name>-<first 8 digits of the SHA-256>.pth`; `published_keys="state_dict"` for weights.
        save_optimizer, save_param_scheduler: False leaves them out; such a file cannot be resumed from.
        out_dir: another directory; the files go to a folder in it named as `work_dir`.
        filename_tmpl: with one `{}` for the number; `epoch_{}.pth` or `iter_{}.pth` by default.

    Raises:
        TypeError, ValueError: see the message.
    """

    priority = Priority.VERY_LOW

    def __init__(
        self,
        interval: int = -1,
        *,
        by_epoch: bool | None = None,
        save_begin: int = 0,
        save_last: bool = True,
        max_keep_ckpts: int = -1,
        save_best: str | Sequence[str] | None = None,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Sequence[str] | None = None,
        less_keys: str | Sequence[str] | None = None,
        published_keys: str | Sequence[str] | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        filename_tmpl: str | None = None,
    ) -> None:
        check_options(interval, save_begin, max_keep_ckpts, filename_tmpl)
        self._interval, self._by_epoch, self._begin = interval, by_epoch, save_begin
        self._save_last, self._max_keep = save_last, max_keep_ckpts
        self._watched = BestMetrics(save_best, rule, greater_keys, less_keys)
        self._published = published(published_keys)
        self._left_out = [
            key
            for key, kept in (("optimizer", save_optimizer), ("param_schedulers", save_param_scheduler))
            if not kept
        ]
        self._out_dir = None if out_dir is None else Path(out_dir)
        self._template = filename_tmpl
        self.directory = Path()
        self.bests: dict[str, Best] = {}
        self._kept: list[str] = []
        self._saved_at = -1
        self._saver: Saver | None = None
        self._saving: _Saving | None = None

    @property
    def best(self) -> Best:
        """The best of the first metric of `save_best`; `bests` has them all, by metric."""
        watched = (self.bests[metric] for metric in self._watched.metrics if metric in self.bests)
        return next(watched, next(iter(self.bests.values()), Best()))

    def check(self, trainer: Trainer) -> None:
        """Settle the unit.

        Raises:
            ValueError: `by_epoch=True` in a run measured in iterations, or `save_best` without a validation.
        """
        if self._by_epoch is None:
            self._by_epoch = trainer.by_epoch
        if self._by_epoch and not trainer.by_epoch:
            raise ValueError(
                "CheckpointHook(by_epoch=True) in a run measured in iterations would never save: "
                "leave by_epoch out, or give the Trainer max_epochs"
            )
        work_dir = trainer.work_dir
        self.directory = work_dir if self._out_dir is None else self._out_dir / work_dir.name
        trainer.checkpoint_dir = self.directory
        self._refuse_twin(trainer)
        if self._watched and trainer.val_loader is None:
            raise ValueError(
                f"save_best={', '.join(self._watched.metrics)!r} needs a validation: give the Trainer a val_loader"
            )

    def _refuse_twin(self, trainer: Trainer) -> None:
        for hook in trainer.hooks:
            if not isinstance(hook, CheckpointHook) or hook is self or hook.directory != self.directory:
                continue
            if hook._template == self._template and hook._by_epoch == self._by_epoch:
                raise ValueError(
                    f"two CheckpointHooks write the same names in {self.directory}, and would remove each other's: "
                    "give one of them another filename_tmpl or out_dir"
                )

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Say so when this run's files will lie among another's."""
        if trainer.iter == 0 and trainer.rank == 0 and (there := find_checkpoints(self.directory)):
            logger.warning(
                "%s holds checkpoints of another run, %s the newest: this one begins anew and will overwrite those "
                "of the same names; trainer.resume() would go on with it, another work_dir keeps them apart",
                self.directory, there[-1].name,
            )  # fmt: skip

    # --- when ----------------------------------------------------------------------------------------------

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Report what has become durable, and save when an iteration is due."""
        if self._saving is not None and self._saving.written.done():
            self._finish(trainer)
        if not self._by_epoch and self.every_n_train_iters(trainer, self._interval, self._begin):
            self._save(trainer, self._name(trainer.iter + 1, by_epoch=False), within="iter")

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Save when an epoch is due; one that was cut short is no epoch."""
        due = self._by_epoch and self.every_n_epochs(trainer, self._interval, self._begin)
        if due and event.reason == COMPLETED:
            self._save(trainer, self._name(trainer.epoch + 1, by_epoch=True), within="epoch")

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Save when the score is the best so far.

        Raises:
            KeyError: the validation has no such metric (with a suggestion).
        """
        if not self._watched or event.reason != COMPLETED:
            return
        self._watched.settle(event.metrics)
        if self._saving is not None and self._saving.before.bests != self.bests:
            self._finish(trainer)  # a best that could not be saved is not one to compare with
        for metric in self._watched.metrics:
            score = event.metrics[metric]
            if is_better(score, self.bests.get(metric, Best()).score, self._watched.rule_of(metric)):
                self._save(trainer, self._best_name(trainer, metric), best=(metric, score))

    def _best_name(self, trainer: Trainer, metric: str) -> str:
        number = trainer.epoch if trainer.by_epoch else trainer.iter
        return f"best_{metric.replace('/', '_')}_{self._name(number, by_epoch=trainer.by_epoch)}"

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Save at the end, unless an error ended it, and wait until everything is durable."""
        if ends_at_once(trainer):
            return
        self._finish(trainer)  # a save that failed is tried once more
        at_end = self._save_last and event.reason not in (ERROR, LEFT)
        if at_end and trainer.iter != self._saved_at and trainer.iter > 0:
            whole_epochs = bool(self._by_epoch) and trainer.batch_idx == 0
            number = trainer.epoch if whole_epochs else trainer.iter
            self._save(trainer, self._name(number, by_epoch=whole_epochs))
        self._finish(trainer)
        if self._published and trainer.rank == 0 and event.reason not in (ERROR, LEFT):
            names = dict.fromkeys([*self._kept[-1:], *(best.name for best in self.bests.values())])
            for name in names:
                logger.info("published %s", publish(self.directory / name, self._published))

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Let the writing thread and process go."""
        try:
            if not ends_at_once(trainer):
                self._finish(trainer)
                if self._saver is not None:
                    self._saver.close()
                    self._saver = None
        finally:  # Ctrl-C, now or before
            if self._saver is not None:
                self._abandon(trainer, self._saver)

    # --- how -----------------------------------------------------------------------------------------------

    def _save(
        self, trainer: Trainer, name: str, *, within: Within = "", best: tuple[str, float] | None = None
    ) -> None:
        if trainer.bus.failing is not None:
            return  # a handler before this one failed: the state is not one to come back to
        self._finish(trainer)
        path, began = self.directory / name, perf_counter()
        before = _Record(self.bests, self._kept, self._saved_at)
        if best is not None:
            metric, score = best
            self.bests = {
                **self.bests,
                metric: Best(score, name, metric),
            }  # the file is to say of itself that it is the best
        else:
            self._saved_at = trainer.iter + (within == "iter")
            self._kept = [*(kept for kept in self._kept if kept != name), name]
        state = trainer.state.gather(str(path), within=within)
        for key in self._left_out:
            del state[key]
        if trainer.rank != 0:
            return
        if self._saver is None:
            self._saver = Saver(lambda copy, path: save_checkpoint(copy, path))
        written = self._saver.save(state, path, replaces=self._surplus(before.bests))
        self._saving = _Saving(path, began, written, before)

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the save under way, if any, and report it."""
        saving = self._saving
        if saving is None:
            return
        path = str(saving.path)
        try:
            size, durable = saving.written.result()
        except Exception as error:  # a full disk comes as an OSError, or as torch's RuntimeError
            logger.exception("checkpoint %s was not saved; older ones are intact", path)
            self._failed(trainer, saving, f"{type(error).__name__}: {error}")
            return
        self._saving = None  # not before: Ctrl-C leaves it as it is
        if self._max_keep > 0:
            self._kept = self._kept[-self._max_keep :]
        trainer.announce(CheckpointSaved, path=path, bytes=size, seconds=durable - saving.began)

    def _failed(self, trainer: Trainer, saving: _Saving, error: str) -> None:
        self._saving = None
        self.bests, self._kept, self._saved_at = saving.before
        seconds = perf_counter() - saving.began
        trainer.announce(CheckpointFailed, path=str(saving.path), seconds=seconds, error=error)

    def _abandon(self, trainer: Trainer, saver: Saver) -> None:
        """Wait for nothing any more, and say what becomes of the save under way."""
        self._saver = None
        left, saving = saver.abandon(), self._saving
        if saving is None:
            return
        if not left:
            self._finish(trainer)
        elif left == "process":
            self._saving = None
            logger.warning("checkpoint %s is still being written, by a process that finishes it", saving.path)
        else:
            logger.warning("checkpoint %s was given up; older ones are intact", saving.path)
            self._failed(trainer, saving, "given up: the run was ended at once")

    def _surplus(self, former: Mapping[str, Best]) -> list[Path]:
        """The files that are to go once the one being saved is durable."""
        names = self._kept[: -self._max_keep] if self._max_keep > 0 else []
        now = {best.name for best in self.bests.values()}
        names = [*names, *(best.name for best in former.values() if best.name not in now)]
        return [self.directory / name for name in names]

    def _name(self, number: int, *, by_epoch: bool) -> str:
        template = self._template or (f"epoch_{{}}{SUFFIX}" if by_epoch else f"iter_{{}}{SUFFIX}")
        return template.format(number)

    def state_dict(self) -> dict[str, Any]:
        """The files it keeps and the best one."""
        return {
            "kept": list(self._kept),
            "bests": {metric: list(best) for metric, best in self.bests.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on pruning and comparing where the saved run was; a metric that is not watched is not compared with."""
        self._kept = list(state["kept"])
        bests = {metric: Best(*values) for metric, values in state["bests"].items()}
        order = self._watched.metrics if self._watched.metrics != ["auto"] else [*bests]
        self.bests = {metric: bests[metric] for metric in order if metric in bests}
