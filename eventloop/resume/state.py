"""Gather everything that changes the course of a training into a checkpoint, and restore it.

The trainer and the CheckpointHook use it. A resume first checks everything that can be compared, then loads
every part except the weights. The weights come last, and their loading cannot fail: so an error leaves the
trainer as it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from eventloop.checkpoint import CheckpointError
from eventloop.checkpoint.store import Check, Loaded, Read, read_checkpoint
from eventloop.checkpoint.weights import log_strangers, prepare_model_state, unwrap
from eventloop.commands.messages import Applied
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.data.trainer_parts import Within
from eventloop.events import AfterLoadCheckpoint, BeforeSaveCheckpoint, Event
from eventloop.optim.optimizer_states import load_optimizer_state
from eventloop.resume.apply import Applying
from eventloop.resume.by_name import follow_renamed, names_in
from eventloop.resume.checking import Checked, check_resume, check_same_weights
from eventloop.resume.choice import (
    OlderThan,
    Resumed,
    WasRead,
    find,
    find_on_all_ranks,
    loaded_weights,
)
from eventloop.resume.gathering import (
    add_ranks,
    as_saved,
    collect,
    own_state,
    states_so_far,
    warn_of_unsaved_tensors,
)
from eventloop.resume.loading import (
    change_lines,
    edited,
    freeze,
    load_hooks,
    load_place,
    move_position,
    position_changes,
    present_position,
    warn_of_zero_rates,
)
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import LOADER_SETTINGS, Changed, check_changed, refused_by
from eventloop.resume.settings import Settings
from eventloop.state.exchange import decided_by_rank_0, has_other_ranks, raised_together
from eventloop.state.rollback import Rollback
from eventloop.state.schema import check_usable, refusing
from eventloop.util.anchored_path import Anchored

logger = logging.getLogger("eventloop")

NAMES_OF_ALL = ("auto", "best")  # rank 0 looks these up for all ranks, also in `load_checkpoint`


class TrainerState:
    """Gather and restore everything that changes the course of a training."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self.settings = Settings(trainer)
        self.went_back_to: Path | None = None
        """The checkpoint to which the run went back by name or as the best, until a hook reads it."""
        self.resumed_from: Path | None = None
        """The checkpoint that was resumed from last; None after weights were loaded without a resume."""
        self.loads = 0
        """The number of times that a checkpoint's weights were loaded into the model."""
        self._resumed: Resumed | None = None  # until the training starts
        self._directories: list[Anchored] = []
        self._watched: list[str] = []
        self._finish_saves: list[Callable[[], None]] = []

    def saves_in(
        self, directory: Path, watched: Sequence[str] = (), finish: Callable[[], None] = lambda: None
    ) -> None:
        """Register a directory in which a hook saves checkpoints.

        A resume searches all registered directories; the first one becomes `checkpoint_dir`.

        Args:
            watched: the metrics whose best checkpoints the hook keeps in that directory.
            finish: waits for the hook's running saves, so that a load within a training finds them.
        """
        if not self._directories:
            self._trainer.checkpoint_dir = directory
        self._directories.append(Anchored(directory))
        self._watched += watched
        self._finish_saves.append(finish)

    def finish_saves(self) -> None:
        """Wait for the running saves of all hooks, and report them."""
        for finish in self._finish_saves:
            finish()

    @property
    def directories(self) -> list[Path]:
        """Return the directories with the run's checkpoints, `checkpoint_dir` first."""
        places: dict[Path, Path] = {}
        for directory in (self._trainer.checkpoint_dir, *[each.path for each in self._directories]):
            places.setdefault(directory.resolve(), directory)
        return list(places.values())

    def gather(self, path: str, *, within: Within = "", shards: bool = False) -> dict[str, Any]:
        """Return the trainer's state with its live tensors, after the `before_save_checkpoint` handlers.

        Args:
            path: the path at which the checkpoint will be saved.
            within: "iter" or "epoch" in a handler of `after_train_iter` or `after_train_epoch`, where the
                iteration or epoch just ended: it is not counted yet, and its validation is still to come.
            shards: whether each rank saves its own part; then "ranks" has that, and no rank waits.

        Raises:
            TypeError: a part of the state cannot be loaded with `weights_only=True`.
        """
        trainer = self._trainer
        hooks = {hook.name: hook.state_dict() for hook in trainer.hooks if hook.stateful}
        trainer.checkpoint = collect(trainer, self.settings, hooks, within)
        if shards:
            trainer.checkpoint["ranks"] = own_state(trainer.checkpoint, trainer.model)
        elif trainer.world_size > 1 and has_other_ranks():
            add_ranks(trainer.checkpoint, trainer.model)
        try:
            trainer.announce(BeforeSaveCheckpoint, path=path)
            return as_saved(trainer.checkpoint, shards=shards)
        finally:
            trainer.checkpoint = None

    def check_saved(self, *, shards: bool) -> None:
        """Refuse a state that no checkpoint could hold, before the first iteration, as a save would.

        Raises:
            TypeError: naming the part, such as the hook and the key.
        """
        trainer = self._trainer
        as_saved(collect(trainer, self.settings, states_so_far(trainer.hooks)), shards=shards)
        warn_of_unsaved_tensors(trainer.optimizer)

    def resume(self, path: str | Path, changed: Changed = "refuse") -> Path:
        """Load a checkpoint and continue its run; `Trainer.resume` documents the arguments and errors."""
        return self.load(self.read(path, changed), changed, by_name=str(path) != "auto")

    def read(self, path: str | Path | OlderThan, changed: Changed = "refuse") -> WasRead:
        """Read the checkpoint that a resume would load, the same on all ranks; a collective."""
        trainer = self._trainer
        with raised_together("the resume"):
            check_changed(changed)
            trainer.copying.join()
        decided_by_rank_0(trainer.ownership.await_end)
        found = self._find(path, check_usable, together=True)
        return WasRead(found.path, found.state, found.last)

    def check(self, read: WasRead) -> None:
        """Raise CheckpointError, on all ranks, if `load` would refuse the checkpoint; nothing changes."""
        with raised_together("the check of a checkpoint"):
            check_resume(self._trainer, self.settings, read.path, read.checkpoint, "refuse")

    def load(self, read: WasRead, changed: Changed = "refuse", *, by_name: bool) -> Path:
        """Load a checkpoint that was read; `by_name` if it may not be the newest one. A collective."""
        trainer, (found, checkpoint, newest) = self._trainer, read
        # around the exchanges, so that an error of one rank leaves all as they were
        rollback = Rollback(found)
        with rollback, rollback:
            with raised_together("the resume"):
                checkpoint, announced = self._run_handlers(found, checkpoint)
                checked = check_resume(trainer, self.settings, found, checkpoint, changed)
                steps, lines = self._load(found, checked, rollback)
            check_same_weights(checked.weights, found)
            resumed = Resumed(found, checked.checkpoint["meta"], changed, trainer.loader)
            rollback.commit([*steps, partial(self._record_resumed, resumed, by_name=by_name)])
        self._publish(announced)
        trainer.ownership.resumed_from(found, newest)
        for line in lines:  # after loading
            logger.warning("%s", line)
        warn_of_zero_rates(trainer, found)
        return found

    def _record_resumed(self, resumed: Resumed, *, by_name: bool) -> None:
        self._resumed = resumed
        self.resumed_from = resumed.path.absolute()
        self._trainer.applied_commands = msgspec.convert(resumed.meta.get("commands", []), list[Applied])
        self.went_back_to = resumed.path if by_name else None
        self.loads += 1

    def check_loader(self, loader: Iterable[Any]) -> None:
        """Compare the loader of a pass that begins with that of the checkpoint resumed from.

        A hand-written loop shows its loader only when the pass begins. Between two passes the loader may
        change. Within a pass it must be the same, unless `resume` was given `changed`.

        Raises:
            CheckpointError: the checkpoint was saved within a pass over another loader.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed.loader is loader:
            return
        position = self._trainer.position
        all_changes = self.settings.compare(resumed.meta)
        changes = [each for each in all_changes if each.name in LOADER_SETTINGS]
        changes += position_changes(resumed.meta, loader, all_changes)
        refused = refused_by(resumed.changed, all_changes)
        if position.resuming and any(each in changes for each in refused):
            lines = "\n  ".join(map(str, changes))
            raise CheckpointError(
                f"{resumed.path} is of a pass over another loader than this loop's:\n  {lines}\n"
                'resume(path, changed="apply") continues with this one, after the same part of it; a Trainer '
                "that is given it as train_loader compares before anything is loaded"
            )
        told = [f"{change}; the loop continues with its own" for change in changes]
        for line in filter(None, [*told, move_position(position, loader, all_changes)]):
            logger.warning("%s: %s", resumed.path, line)

    def _load(
        self, found: Path, checked: Checked, rollback: Rollback
    ) -> tuple[list[Callable[[], object]], list[str]]:
        """Load all parts of a checked checkpoint except the weights.

        Returns:
            The functions to call if all went well, which load the weights, note the resume and cannot fail;
            and lines for the log.
        """
        trainer, model, checkpoint = self._trainer, unwrap(self._trainer.model), checked.checkpoint
        meta, rank_state, applies = checkpoint["meta"], checked.rank_state, checked.choice == "apply"
        # a hook's or sampler's code may draw random numbers while its state is loaded
        rollback.on_rollback("the random state", partial(set_rng_state, rng_state()))
        of_hooks = load_hooks(trainer.hooks, checkpoint, rollback)
        converts = any(change.name == "model_dtypes" for change in checked.changes)
        load_optimizer_state(
            trainer.optimizer, checkpoint["optimizer"], rollback, converts=converts, source=found
        )
        lines = [*checked.lines, *trainer.remembered.load(rank_state.remembered, rollback)]
        lines += self._load_schedulers(checked, rollback)
        load_model, _ = prepare_model_state(model, checked.weights, rollback, strict=True, source=str(found))
        rollback.on_rollback("the position", present_position(trainer))
        place = load_place(trainer, meta, rank_state, checked.changes, found)
        lines += filter(None, ["; ".join(filter(None, [rank_state.inexact, place]))])
        steps: list[Callable[[], object]] = [
            load_model,
            partial(rank_state.load_buffers, model),
            partial(freeze, model, meta, edited(checked.changes) if applies else ()),
            *([] if applies else [partial(self.settings.record, meta)]),
        ]
        changes = change_lines(checked.choice, checked.changes, trainer)
        return steps, [*of_hooks, *(f"{found}: {line}" for line in (*changes, *lines))]

    def _load_schedulers(self, checked: Checked, rollback: Rollback) -> list[str]:
        """Load the schedulers' states, once the optimizers' are loaded, and return the lines to log."""
        states: list[Any] = checked.checkpoint["param_schedulers"]
        trainer, applies, new_groups = self._trainer, checked.choice == "apply", checked.new_groups
        applying = None
        if applies or new_groups:
            begun, changes = self.settings.record_begin(), checked.changes if applies else ()
            applying = Applying(trainer, begun, changes)
        if applying is not None and applies:
            applying.write_groups(rollback.source)
            states = applying.scheduler_states(states)
        for number, (scheduler, state) in enumerate(zip(trainer.schedulers, states, strict=True)):
            name = f"schedulers[{number}] {type(scheduler).__name__}"
            rollback.snapshot(name, scheduler)
            with refusing(f"{rollback.source} has a state that {name} refuses"):
                scheduler.load_state_dict(state)
        return [] if applying is None else applying.fast_forward(checked.checkpoint, states, new_groups)

    def _find(self, path: str | Path | OlderThan, check: Check | None, *, together: bool) -> Loaded:
        """Read a checkpoint: the one of rank 0 on all ranks if `together`."""

        def find_one(read: Read) -> Loaded:
            self.finish_saves()  # a checkpoint that is being written counts
            return find(path, self.directories, self._watched, check, read, with_last=together)

        live = unwrap(self._trainer.model).state_dict().get
        if not together:
            return find_one(partial(read_checkpoint, live=live))
        again = isinstance(path, OlderThan) or str(path) in NAMES_OF_ALL
        return find_on_all_ranks(find_one, live, again=again)

    def load_weights(self, path: str | Path, *, strict: bool) -> None:
        """Load the weights of a checkpoint into the model; `Trainer.load_checkpoint` has the arguments."""
        trainer, together = self._trainer, str(path) in NAMES_OF_ALL
        what = f"load_checkpoint({str(path)!r})"
        with raised_together(what) if together else nullcontext():
            trainer.copying.join()
        place, checkpoint, *_ = self._find(path, None, together=together)
        rollback = Rollback(place)
        with rollback, rollback:
            with raised_together(what) if together else nullcontext():
                checkpoint, announced = self._run_handlers(place, checkpoint)
                weights, model = loaded_weights(checkpoint), unwrap(trainer.model)
                load, odd = prepare_model_state(model, weights, rollback, strict=strict, source=str(place))
            if together:
                check_same_weights(weights, place)
            rollback.commit([load])
        self._publish(announced)
        log_strangers(odd, str(place))
        self.resumed_from = None  # the model has other weights now
        self.loads += 1

    def _run_handlers(self, path: Path, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], Event | None]:
        """Run the sync handlers of `after_load_checkpoint`; return the checkpoint and the event, if any."""
        trainer = self._trainer
        if not trainer.bus.wants(AfterLoadCheckpoint):
            return checkpoint, None
        before = names_in(checkpoint)
        counters = {name: getattr(trainer, name) for name in ("iter", "epoch", "max_iters", "max_epochs")}
        event = AfterLoadCheckpoint(path=str(path), **counters)
        trainer.checkpoint = checkpoint
        try:
            trainer.bus.signal(AfterLoadCheckpoint).run_sync(event, trainer)
            follow_renamed(before, trainer.checkpoint)
            return trainer.checkpoint, event
        finally:
            trainer.checkpoint = None

    def _publish(self, loaded: Event | None) -> None:
        """Hand the event of a load to background subscribers, unless writers would write to another run."""
        if loaded is not None and self._trainer.ownership.may_write:
            self._trainer.bus.signal(type(loaded)).hand_over(loaded)
