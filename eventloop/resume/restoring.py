"""Load a checkpoint into a trainer: all of its state for a resume, or the weights alone.

A resume first checks everything that can be compared, then loads every part except the weights. The weights
come last, and their loading cannot fail: so an error leaves the trainer as it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from eventloop.checkpoint import CheckpointError
from eventloop.checkpoint.store import Check, Loaded, Read, read_checkpoint
from eventloop.checkpoint.weights import log_strangers, prepare_model_state, unwrap
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.events import AfterLoadCheckpoint, Event
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
from eventloop.resume.state import TrainerState
from eventloop.state.exchange import decided_by_rank_0, raised_together
from eventloop.state.rollback import Rollback
from eventloop.state.schema import check_usable, refusing

logger = logging.getLogger("eventloop")

NAMES_OF_ALL = ("auto", "best")
"""The names for which rank 0 searches for all ranks, also in `load_checkpoint`."""


def resume(state: TrainerState, path: str | Path, changed: Changed = "refuse") -> Path:
    """Load a checkpoint and continue its run; `Trainer.resume` documents the arguments and errors."""
    return load(state, read(state, path, changed), changed, by_name=str(path) != "auto")


def read(state: TrainerState, path: str | Path | OlderThan, changed: Changed = "refuse") -> WasRead:
    """Read the checkpoint that a resume would load, the same on all ranks; a collective."""
    trainer = state.trainer
    with raised_together("the resume"):
        check_changed(changed)
        trainer.copying.join()
    decided_by_rank_0(trainer.ownership.await_end)
    loaded = _find(state, path, check_usable, together=True)
    return WasRead(loaded.path, loaded.state, loaded.last)


def check(state: TrainerState, was_read: WasRead) -> None:
    """Raise CheckpointError, on all ranks, if `load` would refuse the checkpoint; nothing changes."""
    with raised_together("the check of a checkpoint"):
        check_resume(state.trainer, state.settings, was_read.path, was_read.checkpoint, "refuse")


def load(state: TrainerState, was_read: WasRead, changed: Changed = "refuse", *, by_name: bool) -> Path:
    """Load a checkpoint that `read` has returned, and return its path; a collective.

    Args:
        was_read: the checkpoint.
        changed: the argument of `Trainer.resume`.
        by_name: whether the checkpoint may not be the newest one.
    """
    trainer, (path, checkpoint, newest) = state.trainer, was_read
    # the rollback includes the exchanges, so that an error on one rank leaves all ranks as they were
    rollback = Rollback(path)
    with rollback, rollback:
        with raised_together("the resume"):
            checkpoint, announced = _run_handlers(trainer, path, checkpoint)
            checked = check_resume(trainer, state.settings, path, checkpoint, changed)
            steps, lines = _load(state, path, checked, rollback)
        check_same_weights(checked.weights, path)
        resumed = Resumed(path, checked.checkpoint["meta"], changed, trainer.loader)
        rollback.commit([*steps, partial(state.record_resumed, resumed, by_name=by_name)])
    _publish(trainer, announced)
    trainer.ownership.resumed_from(path, newest)
    for line in lines:  # only now: if the resume had failed, they would be untrue
        logger.warning("%s", line)
    warn_of_zero_rates(trainer, path)
    return path


def load_weights(state: TrainerState, path: str | Path, *, strict: bool) -> None:
    """Load the weights of a checkpoint into the model; `Trainer.load_checkpoint` has the arguments."""
    trainer, together = state.trainer, str(path) in NAMES_OF_ALL
    call = f"load_checkpoint({str(path)!r})"
    with raised_together(call) if together else nullcontext():
        trainer.copying.join()
    source, checkpoint, *_ = _find(state, path, None, together=together)
    rollback = Rollback(source)
    with rollback, rollback:
        with raised_together(call) if together else nullcontext():
            checkpoint, announced = _run_handlers(trainer, source, checkpoint)
            weights, model = loaded_weights(checkpoint), unwrap(trainer.model)
            load_model, strangers = prepare_model_state(
                model, weights, rollback, strict=strict, source=str(source)
            )
        if together:
            check_same_weights(weights, source)
        rollback.commit([load_model])
    _publish(trainer, announced)
    log_strangers(strangers, str(source))
    state.record_weights()


def follow_loader(state: TrainerState, resumed: Resumed, loader: Iterable[Any]) -> None:
    """Continue a resumed run with another loader than `resume` has compared, or refuse that.

    Args:
        resumed: the resume, whose `changed` decides.
        loader: the loader of the pass that begins.

    Raises:
        CheckpointError: the checkpoint was saved within a pass over another loader, and `changed` does not
            permit that.
    """
    position = state.trainer.position
    all_changes = state.settings.compare(resumed.meta)
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
    change_texts = [f"{change}; the loop continues with its own" for change in changes]
    for line in filter(None, [*change_texts, move_position(position, loader, all_changes)]):
        logger.warning("%s: %s", resumed.path, line)


def _load(
    state: TrainerState, path: Path, checked: Checked, rollback: Rollback
) -> tuple[list[Callable[[], object]], list[str]]:
    """Load all parts of a checked checkpoint except the weights.

    Args:
        path: the path of the checkpoint.
        checked: its contents.
        rollback: gets functions that restore the loaded parts if the resume fails.

    Returns:
        The functions to call once nothing can fail any more: they load the weights, set which parameters
        train, and record the settings. Then the lines to log.
    """
    trainer, model, checkpoint = state.trainer, unwrap(state.trainer.model), checked.checkpoint
    meta, rank_state, applies = checkpoint["meta"], checked.rank_state, checked.choice == "apply"
    # a hook or a sampler may draw random numbers while its state is loaded
    rollback.on_rollback("the random state", partial(set_rng_state, rng_state()))
    of_hooks = load_hooks(trainer.hooks, checkpoint, rollback)
    converts = any(change.name == "model_dtypes" for change in checked.changes)
    load_optimizer_state(trainer.optimizer, checkpoint["optimizer"], rollback, converts=converts, source=path)
    lines = [*checked.lines, *trainer.remembered.load(rank_state.remembered, rollback)]
    lines += _load_schedulers(state, checked, rollback)
    load_model, _ = prepare_model_state(model, checked.weights, rollback, strict=True, source=str(path))
    rollback.on_rollback("the position", present_position(trainer))
    where = load_place(trainer, meta, rank_state, checked.changes, path)
    lines += filter(None, ["; ".join(filter(None, [rank_state.inexact, where]))])
    steps: list[Callable[[], object]] = [
        load_model,
        partial(rank_state.load_buffers, model),
        partial(freeze, model, meta, edited(checked.changes) if applies else ()),
        *([] if applies else [partial(state.settings.record, meta)]),
    ]
    changes = change_lines(checked.choice, checked.changes, trainer)
    return steps, [*of_hooks, *(f"{path}: {line}" for line in (*changes, *lines))]


def _load_schedulers(state: TrainerState, checked: Checked, rollback: Rollback) -> list[str]:
    """Load the states of the schedulers, and return the lines to log; the optimizers are loaded before."""
    states: list[Any] = checked.checkpoint["param_schedulers"]
    trainer, applies, new_groups = state.trainer, checked.choice == "apply", checked.new_groups
    applying = None
    if applies or new_groups:
        begun, changes = state.settings.record_begin(), checked.changes if applies else ()
        applying = Applying(trainer, begun, changes)
    if applying is not None and applies:
        applying.write_groups(rollback.source)
        states = applying.scheduler_states(states)
    for number, (scheduler, saved) in enumerate(zip(trainer.schedulers, states, strict=True)):
        name = f"schedulers[{number}] {type(scheduler).__name__}"
        rollback.snapshot(name, scheduler)
        with refusing(f"{rollback.source} has a state that {name} refuses"):
            scheduler.load_state_dict(saved)
    return [] if applying is None else applying.fast_forward(checked.checkpoint, states, new_groups)


def _find(
    state: TrainerState, path: str | Path | OlderThan, check: Check | None, *, together: bool
) -> Loaded:
    """Read the checkpoint that a path or a name denotes.

    Args:
        check: an additional check of the checkpoints that "auto" and "best" choose from.
        together: whether this is a collective, in which all ranks read the checkpoint that rank 0 chooses.
    """

    def find_one(read: Read) -> Loaded:
        state.finish_saves()  # so that a checkpoint that is being written is found
        return find(path, state.directories, state.watched, check, read, with_last=together)

    live = unwrap(state.trainer.model).state_dict().get
    if not together:
        return find_one(partial(read_checkpoint, live=live))
    again = isinstance(path, OlderThan) or str(path) in NAMES_OF_ALL
    return find_on_all_ranks(find_one, live, again=again)


def _run_handlers(
    trainer: ResumableTrainer, path: Path, checkpoint: dict[str, Any]
) -> tuple[dict[str, Any], Event | None]:
    """Run the synchronous handlers of `after_load_checkpoint`, which may change the checkpoint.

    Returns:
        The checkpoint, and the event for background subscribers; None without a subscriber.
    """
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


def _publish(trainer: ResumableTrainer, loaded: Event | None) -> None:
    """Hand `after_load_checkpoint` to background subscribers, unless another run owns the directory."""
    if loaded is not None and trainer.ownership.may_write:
        trainer.bus.signal(type(loaded)).hand_over(loaded)
