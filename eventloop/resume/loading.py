"""Load a checkpoint's states of hooks, its position in the loader, and its random states.

`restoring` calls these functions. Each rank continues from its own part of the checkpoint, as each has its
own random state and its own position in the loader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DistributedSampler

from eventloop.checkpoint.weights import unwrap
from eventloop.data.loader_info import is_stream
from eventloop.data.loader_state import has_own_state, random_state, samplers_of
from eventloop.data.position import LoaderPosition
from eventloop.data.rng import module_generators, rng_state, set_module_generators, set_rng_state
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import own_schedulers
from eventloop.resume.apply import scheduled_now
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import FROZEN, OF_RANKS, POSITION, Change, Choice
from eventloop.state.plain_values import with_arrays
from eventloop.state.remembered import KEY, annotate_errors
from eventloop.state.rollback import Rollback
from eventloop.state.schema import refusing

logger = logging.getLogger("eventloop")


RATE_STAYS_ZERO = (
    "%s: the learning rate %sis 0: unless its schedules raise it again, the rest of the run trains nothing. "
    'Build them for the present length of the run, and call resume(path, changed="apply"); or resume from '
    "before their end"
)


def load_hooks(hooks: Collection[Any], checkpoint: Mapping[str, Any], rollback: Rollback) -> list[str]:
    """Load the states of the hooks; return a line for each hook without a state, and state without a hook.

    Args:
        hooks: the trainer's hooks.
        checkpoint: the contents of the checkpoint: the states of hooks by name are at `hooks`, and
            `meta.arrays` lists the tensors in them that were NumPy arrays.
        rollback: restores the hooks that are already loaded if a later part of the resume fails.
    """
    states, source = checkpoint["hooks"], rollback.source
    if places := checkpoint["meta"].get("arrays"):
        states = with_arrays(states, places)
    lines, is_stateful = [], {hook.name: hook.stateful for hook in hooks}
    for hook in hooks:
        if is_stateful[hook.name] and hook.name in states:
            note = (
                f"raised by the hook {hook.name}, which was given its state of {source}. A run without that "
                "hook, or with it under another name, ignores the state"
            )
            with annotate_errors(note):
                rollback.snapshot(f"the hook {hook.name}", hook)
                hook.load_state_dict(states[hook.name])
        elif is_stateful[hook.name]:
            lines.append(f"{source} has no state of the hook {hook.name}, which starts afresh")
    for name in states:
        if name not in is_stateful:
            lines.append(f"{source} has a state of {name}, but this trainer has no such hook")
        elif not is_stateful[name]:
            lines.append(
                f"{source} has a state of the hook {name}, which is not stateful here; the state is ignored"
            )
    return lines


def present_position(trainer: ResumableTrainer) -> Callable[[], None]:
    """Return a function that restores the present counters, loader position and random generators."""
    model = unwrap(trainer.model)
    counters = trainer.iter, trainer.epoch, trainer.metrics.iter, trainer.metrics.epoch
    position, generators = trainer.position.snapshot(), module_generators(model)

    def restore() -> None:
        trainer.iter, trainer.epoch, trainer.metrics.iter, trainer.metrics.epoch = counters
        position()
        set_module_generators(model, generators)

    return restore


def freeze(model: torch.nn.Module, meta: Mapping[str, Any], kept: Collection[str]) -> None:
    """Set `requires_grad` of the parameters as it was when a checkpoint was saved; this cannot fail.

    Args:
        model: the model.
        meta: the `meta` of the checkpoint, which lists the frozen parameters.
        kept: the names of the parameters that stay as they are.
    """
    if (frozen := meta.get("frozen")) is None:  # saved by an earlier version of eventloop
        return
    for name, parameter in model.named_parameters():
        if name not in kept and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(name not in frozen)


def edited(changes: Iterable[Change]) -> set[str]:
    """Return the names of the parameters that were frozen at the begin of only one of the two runs."""
    frozen_changes = [change for change in changes if change.name == FROZEN]
    return {name for change in frozen_changes for name in (*change.saved, *change.own)}


def change_lines(changed: Choice, changes: list[Change], trainer: ResumableTrainer) -> Iterator[str]:
    """Yield a log line for each changed setting, with the value with which the run continues."""
    for change in changes:
        is_kept = change.kind == "loaded" and changed == "keep"
        why = ': changed="keep" cannot change that' if changed == "keep" and change.kind == "given" else ""
        now = "" if change.group is None else scheduled_now(trainer, *change.group)
        yield f"{change}; the run continues with {change.saved if is_kept else change.own!r}{why}{now}"


def warn_of_zero_rates(trainer: ResumableTrainer, source: Path) -> None:
    """Warn of each optimizer whose scheduled rate is 0 after a resume, unless the run is complete.

    Most schedules end at 0. As they multiply the rate, it would stay 0 in a longer run.
    """
    ends = ((trainer.iter, trainer.max_iters), (trainer.epoch, trainer.max_epochs))
    if any(end is not None and done >= end for done, end in ends):
        return
    for name, optimizer in named_optimizers(trainer.optimizer).items():
        if own_schedulers(trainer.schedulers, optimizer) and any(map(_has_stopped, optimizer.param_groups)):
            logger.warning(RATE_STAYS_ZERO, source, f"of {name!r} " if name else "")


def _has_stopped(group: Mapping[str, Any]) -> bool:
    """Return whether a param group has a scheduled rate, which is 0 now and was not 0 at the begin."""
    return float(group.get("lr", 1)) == 0 and float(group.get("initial_lr", 0)) != 0


class RankState(NamedTuple):
    """The part of a checkpoint from which one rank resumes.

    Args:
        rng: the rank's random state; None to keep the current one.
        position: the rank's position in the loader.
        inexact: the reason why the resume is not exact, for the log; "" if it is exact.
        buffers: the buffers of the model in which the ranks differ, by name.
        remembered: the states that `Trainer.remember` was given functions for, by name.
    """

    rng: Mapping[str, Any] | None
    position: Mapping[str, Any]
    inexact: str = ""
    buffers: Mapping[str, torch.Tensor] = {}
    remembered: Mapping[str, Any] = {}

    def load_buffers(self, model: torch.nn.Module) -> None:
        """Copy this rank's saved buffers into the model's buffers of the same names and shapes."""
        own = dict(model.named_buffers())
        for name, buffer in self.buffers.items():
            if name in own and own[name].shape == buffer.shape:
                own[name].copy_(buffer)


def state_of_rank(
    checkpoint: Mapping[str, Any], rank: int, world_size: int, loader: Iterable[Any] | None
) -> RankState:
    """Return the part of a checkpoint from which a rank resumes: that of the rank with the same number.

    If this run has more ranks than the run that saved the checkpoint, the additional ranks keep their random
    state, and have the position of rank 0. A checkpoint with the state of rank 0 alone is for all ranks.

    Args:
        checkpoint: the contents of the checkpoint.
        rank, world_size: the number of this rank, and the number of ranks of this run.
        loader: the loader of this run, whose random state an additional rank keeps.
    """
    meta, others = checkpoint["meta"], checkpoint.get("ranks")
    first = RankState(checkpoint["rng"], meta["position"], remembered=checkpoint.get(KEY, {}))
    saved = len(others) if isinstance(others, list) else meta["settings"]["run"].get("world_size")
    parts = dict(enumerate(others)) if isinstance(others, list) else others or {}
    if others is None and saved != 1 and world_size > 1:
        also = f", and the remembered states {_quoted(first.remembered)}," if first.remembered else ""
        of_rank_0 = f"the random state and the loader position{also} of rank 0 alone"
        return first._replace(inexact=f"it has {of_rank_0}: every rank continues with them")
    inexact = (
        f"it was saved by {saved} ranks, and this run has {world_size}: random numbers differ from here on"
        if saved not in (None, world_size)
        else ""
    )
    if rank == 0:
        own_part = others.get(0) if isinstance(others, Mapping) else None  # of ranks that save together
        inexact += _left_out({rank: part for rank, part in parts.items() if rank >= world_size})
        return first._replace(inexact=inexact, buffers={} if own_part is None else own_part["buffers"])
    if (part := parts.get(rank)) is not None:
        return RankState(part["rng"], part["position"], inexact, part["buffers"], part.get(KEY, {}))
    own = {"opened_with": random_state(loader), "generators": {}, "loader": {}}
    return RankState(
        None, {**meta["position"], **own}, f"{inexact}; rank {rank} continues with its own random state"
    )


def _left_out(parts: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Return the end of a text that names the remembered states of ranks that this run does not have.

    Args:
        parts: the parts of the checkpoint of these ranks, by their numbers.
    """
    states = [
        f"{_quoted(part[KEY])} of rank {rank}" for rank, part in parts.items() if part and part.get(KEY)
    ]
    return f"; no rank gets the remembered states {', '.join(states)}" if states else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def position_changes(
    meta: Mapping[str, Any], loader: Iterable[Any] | None, changes: Iterable[Change]
) -> list[Change]:
    """Return a list with the change of a position that is lost with another number of ranks; else [].

    If the number of ranks changes, each rank reads other data. A position in an IterableDataset, or of a
    loader with a state of its own, cannot be converted to a position in these other data.

    Args:
        meta: the `meta` of the checkpoint.
        loader: the loader of this run.
        changes: the changed settings.
    """
    batch_idx = meta["position"]["batch_idx"]
    if not (batch_idx and _has_other_ranks(changes) and _is_of_one_rank(loader)):
        return []
    was = f"batch {batch_idx} of a pass over one rank's part of a {type(loader).__name__}"
    return [Change(POSITION, was, "the beginning of the pass", "given")]


def load_place(
    trainer: ResumableTrainer,
    meta: Mapping[str, Any],
    rank_state: RankState,
    changes: Iterable[Change],
    path: Path,
) -> str:
    """Load the counters, the position in the loader and the random state.

    Args:
        meta: the `meta` of the checkpoint.
        rank_state: the part of the checkpoint from which this rank continues.
        changes: the changed settings.
        path: the path of the checkpoint, for errors.

    Returns:
        A text for the log on where the pass over the loader continues; "" if the loader is as before.
    """
    trainer.iter = trainer.metrics.iter = int(meta["iter"])
    trainer.epoch = trainer.metrics.epoch = int(meta["epoch"])
    rng = rng_state() if rank_state.rng is None else rank_state.rng
    with refusing(f"{path} cannot be resumed from, its random state is invalid"):
        trainer.position.load_state_dict(rank_state.position)
        set_rng_state(rng)
        if rank_state.rng is not None:
            set_module_generators(unwrap(trainer.model), rank_state.rng.get("modules", {}))
    return move_position(trainer.position, trainer.loader, changes)


def move_position(position: LoaderPosition, loader: Iterable[Any] | None, changes: Iterable[Change]) -> str:
    """Convert a loaded position to one in this run's loader, which may have other lengths or ranks.

    Returns:
        A text for the log on where the pass continues; "" if the loader is as before.
    """
    by_name = {change.name: change for change in changes}
    other_ranks = _has_other_ranks(by_name.values())
    if loader is None:
        return ""
    if other_ranks:
        position.drop_states_of_ranks(begins_again=_is_of_one_rank(loader))
    length = by_name.get("loader_length")
    lengths = None if length is None or None in (length.saved, length.own) else (length.saved, length.own)
    text = position.move_to(loader, lengths, same_data="dataset_length" not in by_name)
    if not other_ranks:
        return text if "batch_size" in by_name or lengths is not None else ""
    samplers = {} if "sampler" in by_name else samplers_of(loader)
    divides_one_order = any(isinstance(each, DistributedSampler) for each in samplers.values())
    return text and f"{text}{'' if divides_one_order else _IF_DIVIDED}"


_IF_DIVIDED = ", if the ranks divide one order of the samples, as with a DistributedSampler"


def _has_other_ranks(changes: Iterable[Change]) -> bool:
    """Return whether the number of processes, or of those with data of their own, has changed."""
    return not {change.name for change in changes}.isdisjoint(OF_RANKS)


def _is_of_one_rank(loader: Iterable[Any] | None) -> bool:
    """Return whether a position in the loader is valid for the data of one rank only."""
    return loader is not None and (is_stream(loader) or has_own_state(loader))
