"""Saves checkpoints: at an interval, at the end, and the best one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.catalogue import suggest
from eventloop.checkpoint import SUFFIX, SUFFIXES, save_checkpoint
from eventloop.events import (
    COMPLETED,
    AfterRun,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    CheckpointFailed,
    CheckpointSaved,
)
from eventloop.hooks.best import Rule, infer_rule, is_better
from eventloop.hooks.hook import Hook
from eventloop.priority import Priority
from eventloop.saver import Saver, Written
from eventloop.scopes import ERROR, LEFT

if TYPE_CHECKING:
    from eventloop.resume import Within
    from eventloop.trainer import Trainer

logger = logging.getLogger("eventloop")


class Best(NamedTuple):
    """The best score so far, the file that has it, and the metric; None, "" and "" before the first."""

    score: float | None = None
    name: str = ""
    metric: str = ""


class _Record(NamedTuple):
    """What the hook says of the files there are; a save that fails puts it back."""

    best: Best
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
    saves of the end of a run are waited for. Nothing older is removed before its successor is durable.

    Args:
        interval: save every so many epochs or iterations; -1 never.
        by_epoch: the unit of `interval`; by default that of the run.
        save_begin: the epoch or iteration from which `interval` is counted.
        save_last: save at the end of the run too, also when it is stopped.
        max_keep_ckpts: keep the newest so many, -1 all. The best one does not count.
        save_best: a metric of the validation, or "auto" for its first; the best is saved beside the others.
        rule: "greater" or "less"; by default told from the metric's name.
        out_dir: another directory.
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
        save_best: str | None = None,
        rule: Rule | None = None,
        out_dir: str | Path | None = None,
        filename_tmpl: str | None = None,
    ) -> None:
        _check_options(interval, save_begin, max_keep_ckpts, save_best, rule, filename_tmpl)
        self._interval, self._by_epoch, self._begin = interval, by_epoch, save_begin
        self._save_last, self._max_keep = save_last, max_keep_ckpts
        self._metric, self._rule = save_best, rule
        self._out_dir = None if out_dir is None else Path(out_dir)
        self._template = filename_tmpl
        if save_best not in (None, "auto") and rule is None:
            self._rule = infer_rule(str(save_best))
        self.directory = Path()
        self.best = Best()
        self._kept: list[str] = []
        self._saved_at = -1
        self._saver: Saver | None = None
        self._saving: _Saving | None = None

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
        if self._metric is not None and trainer.val_loader is None:
            raise ValueError(f"save_best={self._metric!r} needs a validation: give the Trainer a val_loader")

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
        if self._metric is None or event.reason != COMPLETED:
            return
        if self._metric == "auto":
            self._metric = next(iter(event.metrics), "auto")
        if self._metric not in event.metrics:
            known = suggest(self._metric, [*event.metrics]) if event.metrics else ": it returned none"
            raise KeyError(f"save_best={self._metric!r} is no metric of the validation{known}")
        self._rule = self._rule or infer_rule(self._metric)
        if self._saving is not None and self._saving.before.best != self.best:
            self._finish(trainer)  # a best that could not be saved is not one to compare with
        score = event.metrics[self._metric]
        so_far = self.best.score if self.best.metric == self._metric else None
        if is_better(score, so_far, self._rule):
            number = trainer.epoch if trainer.by_epoch else trainer.iter
            name = f"best_{self._metric.replace('/', '_')}_{self._name(number, by_epoch=trainer.by_epoch)}"
            self._save(trainer, name, best=Best(score, name, self._metric))

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Save at the end, unless an error ended it, and wait until everything is durable."""
        self._finish(trainer)  # a save that failed is tried once more
        at_end = self._save_last and event.reason not in (ERROR, LEFT)
        if at_end and trainer.iter != self._saved_at and trainer.iter > 0:
            whole_epochs = bool(self._by_epoch) and trainer.batch_idx == 0
            number = trainer.epoch if whole_epochs else trainer.iter
            self._save(trainer, self._name(number, by_epoch=whole_epochs))
        self._finish(trainer)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Let the writing thread and process go."""
        self._finish(trainer)
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    # --- how -----------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, name: str, *, within: Within = "", best: Best | None = None) -> None:
        if trainer.bus.failing is not None:
            return  # a handler before this one failed: the state is not one to come back to
        self._finish(trainer)
        path, began = self.directory / name, perf_counter()
        before = _Record(self.best, self._kept, self._saved_at)
        if best is not None:
            self.best = best  # the file is to say of itself that it is the best
        else:
            self._saved_at = trainer.iter + (within == "iter")
            self._kept = [*(kept for kept in self._kept if kept != name), name]
        state = trainer.state.gather(str(path), within=within)
        if trainer.rank != 0:
            return
        if self._saver is None:
            self._saver = Saver(lambda copy, path: save_checkpoint(copy, path))
        written = self._saver.save(state, path, replaces=self._surplus(before.best))
        self._saving = _Saving(path, began, written, before)

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the save under way, if any, and report it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        path = str(saving.path)
        try:
            size, durable = saving.written.result()
        except Exception as error:  # a full disk comes as an OSError, or as torch's RuntimeError
            logger.exception("checkpoint %s was not saved; older ones are intact", path)
            self.best, self._kept, self._saved_at = saving.before
            seconds = perf_counter() - saving.began
            trainer.announce(
                CheckpointFailed, path=path, seconds=seconds, error=f"{type(error).__name__}: {error}"
            )
            return
        if self._max_keep > 0:
            self._kept = self._kept[-self._max_keep :]
        trainer.announce(CheckpointSaved, path=path, bytes=size, seconds=durable - saving.began)

    def _surplus(self, former: Best) -> list[Path]:
        """The files that are to go once the one being saved is durable."""
        names = self._kept[: -self._max_keep] if self._max_keep > 0 else []
        if former.name not in ("", self.best.name) and former.metric == self.best.metric:
            names = [*names, former.name]
        return [self.directory / name for name in names]

    def _name(self, number: int, *, by_epoch: bool) -> str:
        template = self._template or (f"epoch_{{}}{SUFFIX}" if by_epoch else f"iter_{{}}{SUFFIX}")
        return template.format(number)

    def state_dict(self) -> dict[str, Any]:
        """The files it keeps and the best one."""
        return {"kept": list(self._kept), "best": self.best._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on pruning and comparing where the saved run was; a score of another metric is not compared with."""
        self._kept = list(state["kept"])
        self.best = Best(**state["best"])


def _check_options(
    interval: object, save_begin: object, max_keep: object, save_best: object, rule: object, template: object
) -> None:
    for name, value in (("interval", interval), ("max_keep_ckpts", max_keep)):
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise ValueError(f"{name} must be -1 or a positive int, got {value!r}")
    if isinstance(save_begin, bool) or not isinstance(save_begin, int) or save_begin < 0:
        raise ValueError(f"save_begin must be an int of at least 0, got {save_begin!r}")
    if save_best is not None and not isinstance(save_best, str):
        raise TypeError(
            f"save_best must be the name of one metric, got {save_best!r}: for several, use several CheckpointHooks"
        )
    if rule not in (None, "greater", "less"):
        raise ValueError(f"unknown rule {rule!r}{suggest(str(rule), ['greater', 'less'])}")
    if template is not None:
        _check_template(str(template))


def _check_template(template: str) -> None:
    try:
        filled = template.format(1)
    except (LookupError, ValueError):
        filled = ""
    if template.count("{}") != 1 or not filled:
        raise ValueError(f"filename_tmpl must have exactly one {{}} for the number, got {template!r}")
    if Path(filled).name != filled or not filled.endswith(SUFFIXES):
        raise ValueError(
            f"filename_tmpl must be a file's name ending in {', '.join(SUFFIXES)}, so that resume finds it; "
            f"got {template!r}"
        )
