"""A hook that saves checkpoints: at an interval, at the end, and for the best scores."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.retention.best import Best, BestMetrics, Rule, file_part
from eventloop.checkpoint.retention.marking import BEST, Marking
from eventloop.checkpoint.retention.pending import Saves, WhenBusy, all_failed
from eventloop.checkpoint.retention.retention import Retention
from eventloop.checkpoint.retention.run_directory import (
    add_resume_note,
    reconcile,
    remove_surplus,
    where_to_resume,
)
from eventloop.checkpoint.saving.publish import PublishedFormat, Publisher
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.weights import unwrap
from eventloop.events import (
    COMPLETED,
    AfterRun,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeTrain,
    CheckpointEvaluated,
)
from eventloop.events.priority import Priority
from eventloop.hooks.checkpoint_options import (
    NO_OPTIMIZER,
    check_options,
    check_watched,
    checkpoint_hooks,
    folder_template,
    refuse_shared_directory,
    session_of,
    unit_of,
    unused,
    usable,
)
from eventloop.hooks.hook import Hook, on
from eventloop.hooks.order_check import warn_of_late_hooks
from eventloop.migration.names import knowing_others
from eventloop.resume.gathering import check_saved, gather
from eventloop.state.exchange import decided_by_rank_0
from eventloop.state.sharded import NO_CHECKPOINT, refuse_old_shards
from eventloop.steering.protocols import Saving
from eventloop.steering.tunable import TunableInterval
from eventloop.stops.ending import ERROR, LEFT, ends_at_once
from eventloop.util.anchored_path import AnchoredPath
from eventloop.util.checks import check_bools, check_optional_bools
from eventloop.util.errors import CheckpointError

logger = logging.getLogger("eventloop")

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.session import Session
    from eventloop.data.trainer_parts import Within
    from eventloop.training.trainer import Trainer


class CheckpointHook(TunableInterval, Hook):
    """Save the whole state of the trainer under `work_dir`; a run can resume from each checkpoint.

        CheckpointHook(interval=1, max_keep_ckpts=3, save_best="accuracy")

    A checkpoint is a directory with `state.pth`, which plain `torch.load(weights_only=True)` reads, and
    `manifest.json`; see `eventloop.checkpoint`. State that only an optimizer's step changes is copied during
    the next forward and backward pass; all other state is copied at once. A process writes the copy.
    `checkpoint_saved` is emitted in the first iteration after the bytes are durable, `checkpoint_failed`
    after a failed save. The training thread waits for room in the queue of saves, and at the end of a run for
    all of them; `trainer.resume` and `trainer.load_checkpoint` wait for the running ones. After a second
    Ctrl-C the saving process finishes alone, or the save is given up. Checkpoints are removed only after
    their successor is durable. If every save of a training fails, the training ends with an error.

    Several such hooks, each with its own `out_dir`, save one after the other, and `resume` searches the
    directories of all of them. Of a model of DTensors (FSDP2, tensor parallelism) each rank writes its own
    part without waiting for the others, with `when_busy="wait"`, and any number of ranks can resume from it.

    Args:
        interval: epochs or iterations between two checkpoints; -1 saves none at an interval.
        by_epoch: the unit of `interval` and of the names; by default the run's unit.
        save_begin: the epoch or iteration from which `interval` is counted.
        save_last: also save at the end of the run, including a stopped run.
        max_keep_ckpts: number of newest checkpoints to keep; -1 keeps all. Best checkpoints do not count, nor
            those that a run left behind when it went back, or had when its loss became NaN or infinite.
        save_best: a metric of the validation, several, or "auto" for its first one. The best checkpoint of
            each metric is saved in addition, with the whole state, so a run can resume from it;
            `resume("best")` uses the first metric. Validations within a training count, also those that a
            handler or a hand-written loop starts. `trainer.val()` before or after the training saves and
            removes nothing.
        keep_best: number of best checkpoints to keep of each metric; -1 keeps every checkpoint that has a
            score. When that many exist, a score must beat the worst of them. The beaten checkpoint is removed
            when its successor is durable. Validations of one epoch share a name, and the best of them stays;
            with `by_epoch=False` each iteration has its own name.
        rule: "greater" or "less", one for all metrics or one each; by default inferred from the metric's
            name.
        greater_keys, less_keys: parts of metrics' names that decide the rule, before the built-in ones.
        published_keys: at the end of the run write the last and the best checkpoints again with only these
            keys, as `<name>-<first 8 digits of the SHA-256>.pth`; `published_keys="state_dict"` publishes the
            weights.
        published_format: "pth", or "safetensors" to write the tensors of one key in that format (extra
            `safetensors`). Tied weights are written once. The metadata has iter, epoch and the version.
        save_optimizer, save_param_scheduler: False leaves them out; such a checkpoint cannot be resumed from.
        out_dir: another directory; the checkpoints go to a folder in it named as `work_dir`.
        filename_tmpl: a name with one `{}` for the number; `epoch_{}` or `iter_{}` by default. A suffix
            `.pth` is dropped, because a checkpoint is a directory.
        overlap: False copies everything at once. Needed when handlers change parameters themselves and can
            neither run before this hook nor call `trainer.copying.join()`. Another change makes the save fail
            if it is detected, which those through `.data` and by a replayed CUDA graph of the step are not.
        when_busy: what to do when a checkpoint of the interval is due while earlier ones are being written
            and there is no room for another: "wait", "skip" the new one, or "replace" the waiting ones, which
            takes the memory of a second copy. There is room for 64 MB, and always for one checkpoint.
            `checkpoint_failed` reports each skipped or replaced checkpoint. Best and last checkpoints are
            never skipped or replaced.

    Raises:
        TypeError, ValueError: an option is of the wrong type, out of range, or contradicts another one.
    """

    priority = Priority.VERY_LOW
    directory = AnchoredPath()
    """The directory of the checkpoints; it stays the same if the working directory changes."""

    @knowing_others
    def __init__(
        self,
        interval: int = -1,
        *,
        by_epoch: bool | None = None,
        save_begin: int = 0,
        save_last: bool = True,
        max_keep_ckpts: int = -1,
        save_best: str | Sequence[str] | None = None,
        keep_best: int = 1,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Sequence[str] | None = None,
        less_keys: str | Sequence[str] | None = None,
        published_keys: str | Sequence[str] | None = None,
        published_format: PublishedFormat = "pth",
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        filename_tmpl: str | None = None,
        overlap: bool = True,
        when_busy: WhenBusy = "wait",
    ) -> None:
        check_options(interval, save_begin, max_keep_ckpts, overlap, when_busy)
        check_optional_bools(by_epoch=by_epoch)
        check_bools(
            save_last=save_last, save_optimizer=save_optimizer, save_param_scheduler=save_param_scheduler
        )
        self._interval, self._by_epoch, self._begin = interval, by_epoch, save_begin
        self.best_metrics = self._watched = BestMetrics(save_best, rule, greater_keys, less_keys)
        self.retention = Retention(self._watched, max_keep_ckpts, keep_best)
        self._publisher = Publisher(published_keys, published_format)
        kept = {"optimizer": save_optimizer, "param_schedulers": save_param_scheduler}
        self._omitted = [key for key, is_kept in kept.items() if not is_kept]
        self._out_dir = None if out_dir is None else Path(out_dir)
        self._save_last, self._template = save_last, folder_template(filename_tmpl)
        self._overlap, self._when_busy = overlap, when_busy
        self.directory = Path()
        self.can_be_resumed = not self._omitted
        self._training = self._records_evaluations = self._publishes = False
        self._session: Session | None = None
        self._same_metrics = False  # whether the loaded state watched the same metrics
        self._validated: list[tuple[Mapping[str, float], int]] = []  # to record: metrics, iteration
        self._passed_iter = self._passed_epoch = -1  # the last ones whose end this hook has handled
        self.saves = Saves()

    @property
    def bests(self) -> dict[str, Best]:
        """The best score of each metric."""
        return self.retention.best_of_each()

    @property
    def best(self) -> Best:
        """The best score of the first metric of `save_best`."""
        return self.retention.of_first_metric()

    def check(self, trainer: Trainer) -> None:
        """Choose the unit and the directory, and refuse a trainer whose state the hook cannot save.

        Raises:
            ValueError: `by_epoch=True` in a run measured in iterations, or `save_best` without a validation
                or of a metric that the validation does not report.
            TypeError: the model is sharded over ranks by FSDP1 or as a ShardedTensor.
        """
        refuse_old_shards("CheckpointHook", unwrap(trainer.model), NO_CHECKPOINT)
        self._by_epoch = unit_of(trainer, self._by_epoch)
        self.directory = self.directory_for(trainer.work_dir)
        trainer.state.saves_in(self.directory, self._watched.metrics, partial(self.saves.finish, trainer))
        others = [hook.directory for hook in checkpoint_hooks(trainer) if hook is not self]
        refuse_shared_directory(self.directory, others)
        self._publisher.check(trainer.model)
        check_watched(trainer, self._watched.metrics)
        if self._interval > 0:
            unit = "after_train_epoch" if self._by_epoch else "after_train_iter"
            warn_of_late_hooks(self, unit, trainer.hooks)

    def directory_for(self, work_dir: Path) -> Path:
        """Return the directory in which a run with this `work_dir` saves its checkpoints."""
        return work_dir if self._out_dir is None else self._out_dir / work_dir.name

    @on(priority=Priority.LOWEST)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Discard validations from before this run, whose scores do not count.

        Raises:
            TypeError: the model was sharded by FSDP1 since the trainer was built.
        """
        refuse_old_shards("CheckpointHook", unwrap(trainer.model), NO_CHECKPOINT)
        self._training = self._records_evaluations = self._publishes = False
        self._validated.clear()

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Check the directory and the state; save best checkpoints that an earlier validation left due.

        Raises:
            TypeError, OSError: a part of the state cannot be saved; ranks do not share the directory.
        """
        self._passed_iter = self._passed_epoch = -1
        self._training = self._records_evaluations = True
        self.saves.begin_training()
        self._session = session_of(trainer, self.directory)
        if self._interval > 0 or self._save_last or self._watched:
            check_saved(trainer.state, shards=self._session is not None)
        if trainer.optimizer is None:
            logger.warning(NO_OPTIMIZER)
        if self._overlap and (self._interval > 0 or self._watched):  # it will save within the training
            trainer.copying.watch()
        state, commands = trainer.state, trainer.commands.recorded
        decided_by_rank_0(lambda: reconcile(self.retention, self.directory, trainer.iter, state, commands))
        last = self.retention.last  # the metrics of the last validation, and its iteration
        if self._same_metrics and last is not None and last[1] == trainer.iter:
            # after a kill, some best checkpoints of one validation may be missing
            self._validated.insert(0, last)
        self._same_metrics = False
        self._save_validated(trainer)

    # --- when ----------------------------------------------------------------------------------------------

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Report saves that became durable, and save when this iteration is due."""
        if self.saves.under_way:
            self.saves.report_done(trainer)
        self._passed_iter = event.iter
        if self._validated:
            self._save_validated(trainer)
        if not self._by_epoch and self.every_n_train_iters(trainer, self._interval, self._begin):
            self._save(trainer, self._name(trainer.iter + 1, by_epoch=False), within="iter")

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Save when this epoch is due; an epoch that was cut short does not count."""
        self._passed_epoch = event.epoch
        if self._validated:
            self._save_validated(trainer)
        due = self._by_epoch and self.every_n_epochs(trainer, self._interval, self._begin)
        if due and event.reason == COMPLETED:
            self._save(trainer, self._name(trainer.epoch + 1, by_epoch=True), within="epoch")

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Record the scores for the manifests, and save when one is the best so far.

        If the validation ran within an iteration or at the end of an epoch, the weights are saved when this
        hook's own turn comes, because other hooks, such as a scheduler's, must act first. Outside of a
        training nothing is saved, because other weights may have been loaded for a comparison.

        Raises:
            ValueError: the validation does not have the metric (the message suggests one).
        """
        if event.reason != COMPLETED:
            return
        self._validated.append((event.metrics, trainer.iter + (trainer.within == "iter")))
        may_save = {
            "": self._training,
            "iter": self._passed_iter == trainer.iter,
            "epoch": self._passed_epoch == trainer.epoch,
        }
        if may_save[trainer.within]:
            self._save_validated(trainer)

    def _save_validated(self, trainer: Trainer) -> None:
        """Record the validations that are not recorded yet; save the weights for a score among the best."""
        self.saves.report_done(trainer)  # first, so that a best score whose save has failed no longer counts
        validated, self._validated = self._validated, []
        for metrics, iteration in validated:
            self.retention.validated(metrics, iteration)
            if not self._watched:
                continue
            self._watched.check(metrics)
            names = {metric: self._best_name(trainer, metric) for metric in self._watched.metrics}
            due, bests = decided_by_rank_0(partial(self.retention.due, metrics, names))
            if due and trainer.rank > 0:
                self.retention.follow(bests)
            for metric in due:
                self._save(trainer, names[metric], within=trainer.within, best=metric, score=metrics[metric])

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Record the scores of a checkpoint, and mark it if they are among the best; nothing is saved again.

        Raises:
            ValueError: the metrics do not have one of `save_best` (the message suggests one).
        """
        if self._records_evaluations and trainer.bus.failing is None:
            watched, directory = self._watched, self.directory
            Marking(self.retention, self.saves, watched, directory, self._regular_name).record(trainer, event)

    def _best_name(self, trainer: Trainer, metric: str) -> str:
        completed = trainer.epoch + (trainer.within == "epoch"), trainer.iter + (trainer.within == "iter")
        return BEST.format(file_part(metric), self._regular_name(*completed))

    def _regular_name(self, epochs: int, iterations: int) -> str:
        by_epoch = bool(self._by_epoch)
        return self._name(epochs if by_epoch else iterations, by_epoch=by_epoch)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Save at the end, unless an error ended the training, and wait until every save is durable.

        Raises:
            CheckpointError: every save of this training failed.
        """
        self._training = False
        if ends_at_once(trainer):
            return
        closes = event.reason not in (ERROR, LEFT) and not trainer.stops.goes_back
        at_end = self._save_last and closes and trainer.iter > 0
        for hook in checkpoint_hooks(trainer):  # the newest checkpoint is known when all saves are done
            hook.saves.finish(trainer, failed=event.reason == ERROR)  # a failed save is retried once
        if event.reason == ERROR and trainer.rank == 0:
            add_resume_note(trainer.failure, *usable(trainer))
        if at_end and decided_by_rank_0(lambda: trainer.iter != self.retention.saved_at):
            self._save(trainer, self._name_now(trainer))
        self.saves.finish(trainer)
        if event.reason != ERROR and self.can_be_resumed:
            where = where_to_resume(usable(trainer)[0]) if self.saves.newest else trainer.where_to_resume
            trainer.where_to_resume = where if event.reason == LEFT else decided_by_rank_0(lambda: where)
        if not closes:  # an error is perhaps on this rank alone, so that no rank may be waited for
            return
        hooks = checkpoint_hooks(trainer)
        if self is hooks[-1] and (why := decided_by_rank_0(lambda: all_failed([h.saves for h in hooks]))):
            raise CheckpointError(f"expected a checkpoint of this training, got none: {why}")
        self._publishes = bool(self._publisher) and trainer.rank == 0

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Wait for the running saves, publish, and end the thread and the process that write checkpoints."""
        self._records_evaluations = False
        try:
            trainer.copying.end()
            if not ends_at_once(trainer):
                self.saves.finish(trainer)
                if self._publishes:
                    bests = [best.name for best in self.bests.values()]
                    names = [*dict.fromkeys([*self.retention.names[-1:], *bests])]
                    self._publisher.publish_all(self._paths(names), trainer.model)
                if trainer.rank == 0 and not trainer.ownership.lost:
                    remove_surplus(self._paths(self.retention.surplus()))
                self.saves.close(trainer)
        finally:  # Ctrl-C, now or before
            self.saves.abandon(trainer)

    # --- how -----------------------------------------------------------------------------------------------

    def _save(
        self, trainer: Trainer, name: str, *, within: Within = "", best: str = "", score: float = 0.0
    ) -> None:
        """Begin to save a checkpoint; `best` is the metric of which its `score` is one of the best."""
        if trainer.bus.failing is not None:
            return  # an earlier handler of this event failed, so the state must not be resumed from
        path, began = self.directory / name, perf_counter()
        trainer.copying.join()  # a hook's state_dict may change parameters, so end running copies
        is_last = self.is_last_train_iter if within == "iter" else self.is_last_train_epoch
        ends = not within or (self._save_last and is_last(trainer))  # the last save of the run
        must = bool(best) or ends or self._session is not None
        skips = not self.saves.make_room(trainer, "wait" if must else self._when_busy)
        if skips and trainer.world_size == 1:
            self.saves.skip(trainer, path)
            return
        self.retention.set_aside_if(trainer.metrics.check_losses)
        if best:  # the checkpoint's own state must list it as one of the best
            replaced = self.retention.begin_best(Best(score, name, best))
        else:
            replaced = self.retention.begin(name, trainer.iter + (within == "iter"))
        try:
            state = gather(trainer.state, str(path), within=within, shards=self._session is not None)
        except BaseException:
            self.retention.failed(name)
            raise
        for key in self._omitted:
            state.pop(key, None)
        if skips:  # only now: the other ranks do not know this, and wait for this rank in `gather`
            self.retention.failed(name)
            self.saves.skip(trainer, path)
        elif trainer.rank == 0 and trainer.ownership.lost:  # the directory is another run's by now
            self.retention.failed(name)
        elif trainer.rank == 0 or self._session is not None:
            job = Job(path, must=bool(best) or ends, last=ends)
            if trainer.rank == 0:
                hooks = checkpoint_hooks(trainer)  # whose checkpoints share one order
                self.retention.sequence = 1 + max(hook.sequence() for hook in hooks)
                label, old = self.retention.label(best), self._paths(replaced.names)
                job = job._replace(label=label, replaces=old, spares=replaced.spares)
            self.saves.begin(
                trainer,
                state,
                job,
                self._session,
                record=self.retention,
                best=bool(best),
                overlap=self._overlap,
                began=began,
            )
        if trainer.rank > 0:
            self.retention.done(name)  # only rank 0 learns whether the save succeeds

    def save_now(self, trainer: Trainer, suffix: str = "") -> Saving:
        """Save between two iterations; without a suffix for the name only if this iteration is not saved."""
        if not suffix and (saved := decided_by_rank_0(lambda: self.retention.saved_as(trainer.iter))):
            path = self.directory / saved
            return Saving(path, durable=all(saving.path != path for saving in self.saves.under_way))
        path = self.directory / (self._name_now(trainer) + suffix)
        path = decided_by_rank_0(lambda: unused(path)) if suffix else path  # rank 0 sees what exists
        self._save(trainer, path.name)
        return Saving(path)

    def sequence(self) -> int:
        """Return the last sequence number in the hook's directory; scan the directory first if necessary."""
        if self.retention.sequence < 0:
            self.retention.scan_directory(self.directory)
        return self.retention.sequence

    def known(self) -> list[Path]:
        """Return the paths of the checkpoints that are kept, including those of the run that was resumed."""
        return [*self._paths(self.retention.known)]

    def _paths(self, names: Sequence[str]) -> tuple[Path, ...]:
        return tuple(map(self.directory.joinpath, names))

    def _name_now(self, trainer: Trainer) -> str:
        """Return the name of a checkpoint between two iterations; within an epoch it has the iteration."""
        whole_epochs = bool(self._by_epoch) and trainer.position.batches == 0
        return self._name(trainer.epoch if whole_epochs else trainer.iter, by_epoch=whole_epochs)

    def _name(self, number: int, *, by_epoch: bool) -> str:
        return (self._template or ("epoch_{}" if by_epoch else "iter_{}")).format(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the kept and the best checkpoints, and the scores of the last validation."""
        several = {"watched": list(self._watched.metrics)} if len(self._watched.metrics) > 1 else {}
        return {**several, **self.retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved list of checkpoints and scores; scores of unwatched metrics are dropped.

        Raises:
            CheckpointError: the state is invalid, or names a checkpoint by a path.
        """
        self.retention = copy(self.retention)  # a refused resume restores the former object
        self._same_metrics = self.retention.load(state, self.directory) == self._watched.metrics
