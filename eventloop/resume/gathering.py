"""Gather everything that changes the course of a training, as a checkpoint holds it.

`CheckpointHook` calls `gather`. Every rank draws its own random numbers: for dropout, and in the workers of
its loader for augmentation. So a checkpoint holds the random state and the loader position of every rank.
Rank 0 gathers and writes them; if a rank has ended, the checkpoint is saved with the state of rank 0 alone.
If the model is sharded over ranks, each rank writes its own state, and nothing is gathered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from eventloop.checkpoint.weights import unwrap
from eventloop.data.rng import module_generators, rng_state
from eventloop.data.trainer_parts import Within
from eventloop.events import BeforeSaveCheckpoint
from eventloop.optim.optimizer_states import class_names, optimizer_state
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.option_states import unsaved_tensors
from eventloop.optim.parameter_names import parameter_names
from eventloop.resume.by_name import scheduler_optimizers
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.settings import Settings, frozen_parameters
from eventloop.resume.state import TrainerState
from eventloop.state.exchange import gather_on_rank_0, has_other_ranks
from eventloop.state.keys import SHARDED
from eventloop.state.plain_values import arrays_as_tensors, plain
from eventloop.state.remembered import KEY
from eventloop.state.schema import SCHEMA
from eventloop.state.sharded import is_dtensor
from eventloop.state.tensors import with_tensors

logger = logging.getLogger("eventloop")


def gather(state: TrainerState, path: str, *, within: Within = "", shards: bool = False) -> dict[str, Any]:
    """Return the trainer's state with its live tensors, after the `before_save_checkpoint` handlers.

    Args:
        path: the path at which the checkpoint will be saved.
        within: "iter" or "epoch" in a handler of `after_train_iter` or `after_train_epoch`, where the
            iteration or epoch just ended: it is not counted yet, and its validation is still to come.
        shards: whether each rank saves its own part of the checkpoint. Then `ranks` in it has the state of
            this rank alone, and no rank waits for another.

    Raises:
        TypeError: a part of the state cannot be loaded with `weights_only=True`.
    """
    trainer = state.trainer
    hooks = {hook.name: hook.state_dict() for hook in trainer.hooks if hook.stateful}
    trainer.checkpoint = collect(trainer, state.settings, hooks, within)
    if shards:
        trainer.checkpoint["ranks"] = own_state(trainer.checkpoint, trainer.model)
    elif trainer.world_size > 1 and has_other_ranks():
        add_ranks(trainer.checkpoint, trainer.model)
    try:
        trainer.announce(BeforeSaveCheckpoint, path=path)
        return as_saved(trainer.checkpoint, shards=shards)
    finally:
        trainer.checkpoint = None


def check_saved(state: TrainerState, *, shards: bool) -> None:
    """Raise the error of a later save now, before the first iteration, if a state cannot be saved.

    Args:
        shards: as in `gather`.

    Raises:
        TypeError: a state has a value that cannot be saved; the error names the hook or part, and the key.
    """
    trainer = state.trainer
    as_saved(collect(trainer, state.settings, states_so_far(trainer.hooks)), shards=shards)
    warn_of_unsaved_tensors(trainer.optimizer)


def collect(
    trainer: ResumableTrainer, settings: Settings, hooks: Mapping[str, Any], within: Within = ""
) -> dict[str, Any]:
    """Return the contents of a checkpoint, with the live tensors.

    Args:
        settings: the settings with which the trainer was built.
        hooks: the states of the hooks, by name.
        within: as in `gather`.
    """
    model, optimizer = unwrap(trainer.model), trainer.optimizer
    meta = {
        "schema": SCHEMA,
        "iter": trainer.iter + (within == "iter"),
        "epoch": trainer.epoch + (within == "epoch"),
        "max_iters": trainer.max_iters,
        "max_epochs": trainer.max_epochs,
        "optimizer": class_names(optimizer),
        "parameters": parameter_names(model, trainer.loss_fn, optimizer),
        "param_schedulers": [type(scheduler).__name__ for scheduler in trainer.schedulers],
        "scheduler_optimizers": scheduler_optimizers(trainer),
        "position": trainer.position.state_dict(within),
        "settings": settings.state_dict(),
        "frozen": frozen_parameters(model),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "torch": str(torch.__version__),
        **({"commands": msgspec.to_builtins(commands)} if (commands := trainer.applied_commands) else {}),
    }
    return {
        "meta": meta,
        "state_dict": model.state_dict(),
        "optimizer": optimizer_state(optimizer),
        "param_schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "hooks": hooks,
        "rng": rng_state() | {"modules": module_generators(model)},
        **trainer.remembered.state_dict(),
    }


def as_saved(checkpoint: Mapping[str, Any], *, shards: bool = False) -> dict[str, Any]:
    """Convert a checkpoint to tensors and plain values, with tensors in place of hooks' NumPy arrays.

    The keys that lead to each array are added to `meta`, so that the load makes arrays again.

    Args:
        checkpoint: the checkpoint.
        shards: whether its weights and its optimizers' states may be DTensors.

    Raises:
        TypeError: a value cannot be loaded with `weights_only=True`; the error names its place.
    """
    hooks, arrays = arrays_as_tensors(checkpoint.get("hooks", {}))
    with_tensors_only = {
        **checkpoint,
        **({"hooks": hooks, "meta": checkpoint["meta"] | {"arrays": arrays}} if arrays else {}),
    }
    return {
        key: plain(value, key, shards=shards and key in SHARDED) for key, value in with_tensors_only.items()
    }


def states_so_far(hooks: Iterable[Any]) -> dict[str, Any]:
    """Return the states of the hooks before the first iteration, without those that cannot be read yet."""
    states = {}
    for hook in hooks:
        if hook.stateful:
            try:
                states[hook.name] = hook.state_dict()
            except Exception as error:  # the hook may make its attributes only in `before_run`
                logger.warning(
                    "the state of the hook %s cannot be read before the first iteration, so nobody knows "
                    "whether it can be saved: %r",
                    hook.name,
                    error,
                )
    return states


def warn_of_unsaved_tensors(optimizer: Any) -> None:
    """Log the tensors of optimizers that no checkpoint will have."""
    for name, each in named_optimizers(optimizer).items():
        if attributes := unsaved_tensors(each):
            logger.warning(
                "%s%s holds tensors in %s, which its state_dict() does not have: no checkpoint saves them, "
                "and a resume begins them anew. Keep them in optimizer.state[parameter], or define "
                "state_dict() and load_state_dict()",
                type(each).__name__,
                f" (optimizer {name!r})" if name else "",
                ", ".join(attributes),
            )


def own_state(checkpoint: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Return a rank's own state: random state, loader position, buffers, and what the program remembers."""
    return {
        **({KEY: checkpoint[KEY]} if KEY in checkpoint else {}),
        "rng": checkpoint["rng"],
        "position": checkpoint["meta"]["position"],
        "buffers": _own_buffers(model, checkpoint["state_dict"]),
    }


def add_ranks(checkpoint: dict[str, Any], model: torch.nn.Module) -> None:
    """Add the states of the other ranks to a checkpoint on rank 0; a collective that waits for the GPU.

    Rank 0 finds its own state in the other parts of the checkpoint, so `ranks` begins with None.
    """
    own = own_state(checkpoint, model)
    own |= {key: with_tensors(own[key], torch.Tensor.cpu) for key in ("buffers", KEY) if key in own}
    if (ranks := gather_on_rank_0(own)) is not None:
        checkpoint["ranks"] = [None, *ranks[1:]]


def _own_buffers(model: torch.nn.Module, saved: Container[str]) -> dict[str, torch.Tensor]:
    """Return the live buffers that each rank saves for itself, because the ranks may differ in them.

    They do not differ if rank 0's buffers are broadcast in each forward pass, as DistributedDataParallel does
    by default. FSDP2 and tensor parallelism broadcast none. Buffers that are DTensors are left out, because
    the shards of the checkpoint have them.

    Args:
        model: the model, as the trainer has it.
        saved: the names in the model's `state_dict`; other buffers are not saved.
    """
    model, inner = getattr(model, "_orig_mod", model), unwrap(model)  # inside torch.compile
    ddp = isinstance(model, DistributedDataParallel)
    if model.broadcast_buffers if ddp else not any(map(is_dtensor, inner.parameters())):
        return {}
    buffers = ((name, buffer) for name, buffer in inner.named_buffers() if name in saved)
    return {name: buffer.detach() for name, buffer in buffers if not is_dtensor(buffer)}
