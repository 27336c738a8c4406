"""A trainer's state as a checkpoint, and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eventloop.checkpoint import CheckpointError, load_best, load_checkpoint, load_newest
from eventloop.checkpoint.resolve_path import place_of, what_else
from eventloop.checkpoint.store import Check
from eventloop.checkpoint.weights import OWN, check_model_state, load_model_state, prepare_model_state, unwrap
from eventloop.data.plain_values import plain
from eventloop.data.position import Within
from eventloop.data.rng import (
    check_module_generators,
    check_rng_state,
    module_generators,
    rng_state,
    set_module_generators,
    set_rng_state,
)
from eventloop.events import AfterLoadCheckpoint, BeforeSaveCheckpoint
from eventloop.optim.optimizers import (
    ParameterOrder,
    check_optimizer_state,
    class_names,
    load_optimizer_state,
    optimizer_state,
)
from eventloop.resume.fast_forward import check_scheduler_state, standing_still, too_short
from eventloop.resume.hook_states import load_hooks, log_mismatches, prepare_hooks
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.ranks import Part, of_all_ranks, own_buffers, part_of, several
from eventloop.resume.setting_changes import Change, Changed, change_lines, check_changed, refusal
from eventloop.resume.settings import Settings
from eventloop.state.rollback import Rollback
from eventloop.state.schema import SCHEMA, check_layout, check_usable, refusing
from eventloop.util.anchored_path import Anchored

__all__ = ["SCHEMA", "TrainerState", "Within"]

logger = logging.getLogger("eventloop")

OF_THE_LOADER = ("batch_size", "loader_length", "dataset_length", "sampler")
STANDS_STILL = (
    "%s: the learning rate %sis 0, and the schedules of the run leave it there: what is left of the run trains nothing. Build "
    'them for the length that it has now, and resume(path, changed="apply"); or resume from before their end'
)


class Resumed(NamedTuple):
    """What was resumed from, with which answer to settings that have changed, and the loader they were compared with."""

    path: Path
    meta: Mapping[str, Any]
    changed: Changed
    loader: Iterable[Any] | None


class TrainerState:
    """Gathers and restores everything that changes the course of a training."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self.settings = Settings(trainer)
        self._order = ParameterOrder()
        self.went_back_to: Path | None = None
        """The checkpoint that was resumed from by name, or as the best, until somebody has noted that."""
        self.resumed_from: Path | None = None
        """The checkpoint that was resumed from last."""
        self.loads = 0
        """How often the model was given the weights of a checkpoint."""
        self._resumed: Resumed | None = None  # until the training begins
        self._directories: list[Anchored] = []
        self._watched: list[str] = []

    def saves_in(self, directory: Path, watched: Sequence[str] = ()) -> None:
        """A hook saves checkpoints there, and the best of the metrics it has `watched`. All such directories are looked
        into; the first one is `checkpoint_dir`."""
        if not self._directories:
            self._trainer.checkpoint_dir = directory
        self._directories.append(Anchored(directory))
        self._watched += watched

    @property
    def directories(self) -> list[Path]:
        """Where the run's checkpoints are, `checkpoint_dir` first; each once, however its path is written."""
        places: dict[Path, Path] = {}
        for directory in (self._trainer.checkpoint_dir, *(each.path for each in self._directories)):
            places.setdefault(directory.resolve(), directory)
        return list(places.values())

    def gather(self, path: str, *, within: Within = "") -> dict[str, Any]:
        """The state as a mapping of live tensors, after `before_save_checkpoint` handlers had their say.

        Args:
            path: where it will be saved.
            within: "iter" or "epoch" when called from a handler of `after_train_iter` or `after_train_epoch`:
                what just ended is not counted yet, but done, and its validation is still to come.

        Raises:
            TypeError: somebody's state could be saved, but not be loaded with `weights_only=True`.
        """
        trainer = self._trainer
        trainer.checkpoint = {
            "meta": self._meta(within),
            "state_dict": unwrap(trainer.model).state_dict(),
            "optimizer": optimizer_state(trainer.optimizer),
            "param_schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
            "hooks": {hook.name: hook.state_dict() for hook in trainer.hooks if hook.stateful},
            "rng": rng_state() | {"modules": module_generators(unwrap(trainer.model))},
        }
        if trainer.world_size > 1 and several():
            self._add_ranks(trainer.checkpoint)
        try:
            trainer.announce(BeforeSaveCheckpoint, path=path)
            return {key: plain(value, key) for key, value in trainer.checkpoint.items()}
        finally:
            trainer.checkpoint = None

    def _add_ranks(self, checkpoint: dict[str, Any]) -> None:
        """Beside rank 0's, which is where it is without others, the random state, the place and the buffers of each rank."""
        own = {
            "rng": checkpoint["rng"], "position": checkpoint["meta"]["position"],
            "buffers": own_buffers(self._trainer.model),
        }  # fmt: skip
        if (ranks := of_all_ranks(own)) is not None:
            checkpoint["ranks"] = [None, *ranks[1:]]

    def _meta(self, within: Within) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "schema": SCHEMA,
            "iter": trainer.iter + (within == "iter"),
            "epoch": trainer.epoch + (within == "epoch"),
            "max_iters": trainer.max_iters,
            "max_epochs": trainer.max_epochs,
            "optimizer": class_names(trainer.optimizer),
            "parameters": self._order.of(unwrap(trainer.model), trainer.optimizer),
            "param_schedulers": [type(scheduler).__name__ for scheduler in trainer.schedulers],
            "position": trainer.position.state_dict(within),
            "settings": self.settings.state_dict(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "torch": str(torch.__version__),
        }

    def resume(self, path: str | Path, changed: Changed = "refuse") -> Path:
        """See `Trainer.resume`."""
        check_changed(changed)
        trainer = self._trainer
        trainer.copying.join()
        found, checkpoint = self._find(path, check_usable)
        with Rollback(found) as rollback:
            with trainer.bus.holding(AfterLoadCheckpoint):  # a refused checkpoint emits nothing
                checkpoint = self._announce(found, checkpoint)
                steps, changes, lines = self._load(found, checkpoint, changed, rollback)
            resumed = Resumed(found, checkpoint["meta"], changed, trainer.loader)
            rollback.commit([*steps, partial(self._note_resumed, resumed, by_name=str(path) != "auto")])
        log_mismatches(trainer.hooks, checkpoint["hooks"], found)
        for line in (*change_lines(changed, changes, trainer), *lines):  # with the values after loading
            logger.warning("%s: %s", found, line)
        self._tell_what_is_left(found)
        return found

    def _note_resumed(self, resumed: Resumed, *, by_name: bool) -> None:
        self._resumed = resumed
        self.resumed_from = resumed.path.absolute()
        self.went_back_to = resumed.path if by_name else None
        self.loads += 1

    def goes_over(self, loader: Iterable[Any]) -> None:
        """The training begins, or goes on, with a pass over `loader`, which a hand-written loop names only now. Between two
        passes it may be another one than before; one that is cut short goes on in the same, or as `resume` was told.

        Raises:
            CheckpointError: its batches or its data set are others than those of the checkpoint's pass.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed.loader is loader:
            return
        position = self._trainer.position
        changes = [each for each in self.settings.compare(resumed.meta) if each.name in OF_THE_LOADER]
        differs = any(change.kind == "given" for change in changes)
        if differs and resumed.changed == "refuse" and position.resuming:
            lines = "\n  ".join(map(str, changes))
            raise CheckpointError(
                f"{resumed.path} is of a pass over another loader than this loop's:\n  {lines}\n"
                'resume(path, changed="apply") goes on with this one, after as large a part of it; a Trainer that is '
                "given it as train_loader compares before anything is loaded"
            )
        for change in changes:
            self._rescale(change)
            logger.warning("%s: %s; the loop goes on with its own", resumed.path, change)

    def _rescale(self, change: Change) -> None:
        """Of a loader that does not say its length no part is known: the pass goes on after as many batches."""
        if change.name == "loader_length" and None not in (change.saved, change.own):
            self._trainer.position.rescale(change.saved, change.own)

    def _load(
        self, found: Path, checkpoint: Mapping[str, Any], changed: Changed, rollback: Rollback
    ) -> tuple[list[Callable[[], object]], list[Change], list[str]]:
        """Check everything, then load the parts that may be refused while they are loaded.

        Return the steps that load the rest and must not raise, the changed settings, and further lines for the log.
        """
        trainer = self._trainer
        weights, changes, part = self._check(found, checkpoint, changed)
        rollback.on_rollback(
            "the random state", partial(set_rng_state, rng_state())
        )  # code of others may draw
        hook_steps = prepare_hooks(trainer.hooks, checkpoint["hooks"], found)
        load_hooks(trainer, checkpoint["hooks"], rollback)
        trainer.position.load_samplers(part.position, rollback)
        converts = any(change.name == "model_dtypes" for change in changes)
        load_optimizer_state(
            trainer.optimizer, checkpoint["optimizer"], rollback, converts=converts, source=found
        )
        lines = self._load_schedulers(checkpoint, changed, changes, rollback)
        lines += [part.inexact] if part.inexact else []
        load_model, _ = prepare_model_state(
            unwrap(trainer.model), weights, rollback, strict=True, source=str(found)
        )
        steps: list[Callable[[], object]] = [
            load_model,
            *hook_steps,
            partial(self._go_to, checkpoint["meta"], part, changes),
            partial(self._restore_random_state, part),
        ]
        return steps, changes, lines

    def _check(
        self, found: Path, checkpoint: Mapping[str, Any], changed: Changed
    ) -> tuple[Mapping[str, Any], list[Change], Part]:
        """Refuse what this trainer cannot go on from, before anything is touched; return the weights, what differs of the
        settings, and what is this rank's."""
        trainer = self._trainer
        check_layout(checkpoint, found)
        self._check_unit(checkpoint["meta"], found)
        weights = checkpoint.get(OWN, checkpoint["state_dict"])
        check_model_state(unwrap(trainer.model), weights, strict=True, source=str(found))
        self._check_parts(checkpoint, found)
        self._check_hooks(checkpoint["meta"], found)
        with refusing(f"{found} has meta.settings that cannot be compared with this trainer's"):
            changes = self.settings.compare(checkpoint["meta"])
        if changed == "refuse" and (message := refusal(found, changes)) is not None:
            raise CheckpointError(message)
        self._check_length(checkpoint, found, changed)
        part = part_of(checkpoint, trainer.rank, trainer.world_size, trainer.loader)
        self._check_random_states(part, found)
        return weights, changes, part

    def _load_schedulers(
        self, checkpoint: Mapping[str, Any], changed: Changed, changes: list[Change], rollback: Rollback
    ) -> list[str]:
        """Load the schedulers, after the optimizers, and return the lines to log."""
        states: list[Any] = checkpoint["param_schedulers"]
        lines: list[str] = []
        rollback.on_rollback("the settings", self.settings.undo())
        self.settings.go_on(changed, changes, checkpoint["meta"])
        if changed == "apply":
            states, lines = self.settings.scheduler_states(states, changes, checkpoint["meta"])
        for number, (scheduler, state) in enumerate(zip(self._trainer.schedulers, states, strict=True)):
            name = f"schedulers[{number}] {type(scheduler).__name__}"
            rollback.snapshot(name, scheduler)
            with refusing(f"{rollback.source} has a state that {name} refuses"):
                scheduler.load_state_dict(state)
        return lines

    def _tell_what_is_left(self, found: Path) -> None:
        for name in standing_still(self._trainer):
            logger.warning(STANDS_STILL, found, f"of {name!r} " if name else "")

    def _check_random_states(self, part: Part, path: Path) -> None:
        with refusing(f"{path} cannot be resumed from, it has a random state that is none"):
            if part.rng is not None:
                check_rng_state(part.rng)
                check_module_generators(unwrap(self._trainer.model), part.rng.get("modules", {}))
            self._trainer.position.check_state(part.position)

    def _restore_random_state(self, part: Part) -> None:
        part.load_buffers(self._trainer.model)
        if part.rng is not None:
            set_rng_state(part.rng)
            set_module_generators(unwrap(self._trainer.model), part.rng.get("modules", {}))

    def _find(self, path: str | Path, check: Check | None) -> tuple[Path, dict[str, Any]]:
        if str(path) == "auto":
            return load_newest(self.directories, check)
        if str(path) == "best":
            return load_best(self.directories, check=check, prefer=self._watched)
        place = place_of(path, self.directories)
        try:
            return place, load_checkpoint(place)
        except CheckpointError as error:
            if not place.is_dir():
                raise
            raise CheckpointError(f"{error}{what_else(place)}") from error

    def _check_hooks(self, meta: Mapping[str, Any], path: Path) -> None:
        """A hook that saves something else than it was, an average for the weights, is needed to make it good."""
        own = {hook.name for hook in self._trainer.hooks}
        missing = [name for name in meta.get("needs_hooks", ()) if name not in own]
        if missing:
            raise CheckpointError(
                f"{path} cannot be resumed from without the hook {', '.join(missing)}, which wrote part of it: "
                "give the Trainer that hook under that name; load_checkpoint takes the weights alone"
            )

    def load_weights(self, path: str | Path, *, strict: bool) -> None:
        """See `Trainer.load_checkpoint`."""
        self._trainer.copying.join()
        place, checkpoint = self._find(path, None)
        with self._trainer.bus.holding(AfterLoadCheckpoint):
            checkpoint = self._announce(place, checkpoint)
            load_model_state(
                unwrap(self._trainer.model), checkpoint["state_dict"], strict=strict, source=str(place)
            )
        self.resumed_from = None  # it has other weights now
        self.loads += 1

    def _announce(self, path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        trainer.checkpoint = checkpoint
        try:
            trainer.announce(AfterLoadCheckpoint, path=str(path))
            return trainer.checkpoint
        finally:
            trainer.checkpoint = None

    def _check_unit(self, meta: Mapping[str, Any], path: Path) -> None:
        by_epoch = meta["max_epochs"] is not None
        if by_epoch != self._trainer.by_epoch:
            units = ("epochs", "iterations") if by_epoch else ("iterations", "epochs")
            raise CheckpointError(
                f"{path} is of a run measured in {units[0]}, this trainer counts {units[1]}: give the Trainer "
                f"{'max_epochs' if by_epoch else 'max_iters'}, or load_checkpoint(path), which takes the weights alone"
            )

    def _check_parts(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        meta, trainer = checkpoint["meta"], self._trainer
        saved, own = meta["param_schedulers"], [type(scheduler).__name__ for scheduler in trainer.schedulers]
        if saved != own or len(checkpoint["param_schedulers"]) != len(own):
            raise CheckpointError(
                f"{path} has the state of the schedulers {saved}, the trainer has {own}: give it the same, in their order, "
                "or load_checkpoint(path), which takes the weights alone"
            )
        for number, (scheduler, state) in enumerate(
            zip(trainer.schedulers, checkpoint["param_schedulers"], strict=True)
        ):
            check_scheduler_state(scheduler, state, f"{path}: param_schedulers[{number}]")
        check_optimizer_state(trainer.optimizer, meta["optimizer"], checkpoint["optimizer"], path)
        self._order.check(unwrap(trainer.model), trainer.optimizer, meta.get("parameters", {}), path)

    def _check_length(self, checkpoint: Mapping[str, Any], path: Path, changed: Changed) -> None:
        """A schedule that raises after its last step ends a run that is longer."""
        for number, state in enumerate(checkpoint["param_schedulers"]):
            if changed == "apply":
                state = self.settings.scheduler_state(number, state)
            if (why := too_short(self._trainer, number, state, checkpoint["meta"])) is not None:
                raise CheckpointError(
                    f"{path} cannot be gone on with so, nothing was loaded: {why}; build it for all of them, and "
                    'resume(path, changed="apply")'
                )

    def _go_to(self, meta: Mapping[str, Any], part: Part, changes: Iterable[Change]) -> None:
        trainer = self._trainer
        trainer.iter = trainer.metrics.iter = int(meta["iter"])
        trainer.epoch = trainer.metrics.epoch = int(meta["epoch"])
        trainer.position.load_state_dict(part.position)
        for change in changes:
            self._rescale(change)
