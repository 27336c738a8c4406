"""Check the options of `CheckpointHook`, and find the hooks of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from eventloop.checkpoint.directory import SUFFIXES
from eventloop.checkpoint.retention.pending import WhenBusy
from eventloop.checkpoint.weights import unwrap
from eventloop.state.sharded import is_dtensor
from eventloop.util.checks import at_least, check_bools, check_choice, positive_or
from eventloop.util.file_names import is_plain_name

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.session import Session
    from eventloop.training.trainer import Trainer

NO_OPTIMIZER = (
    "the trainer has no optimizer, so checkpoints hold no optimizer's state and a resumed run begins with a "
    "new one: pass optimizer=... also where your own code steps it"
)


def checkpoint_hooks(trainer: Trainer) -> list[Any]:
    """Return the `CheckpointHook`s of a trainer."""
    # not by isinstance, because `hooks.checkpoint` imports this module
    return [hook for hook in trainer.hooks if hasattr(hook, "save_now")]


def usable(trainer: Trainer) -> tuple[list[Path], list[Path]]:
    """Return the paths of the checkpoints that can be resumed from, and the directories they are saved in.

    Both are collected from all hooks whose checkpoints can be resumed from.
    """
    hooks = [hook for hook in checkpoint_hooks(trainer) if hook.can_be_resumed]
    return [path for hook in hooks for path in hook.known()], [hook.directory for hook in hooks]


def check_options(
    interval: object, save_begin: object, max_keep: object, overlap: object, when_busy: object
) -> None:
    """Refuse options of `CheckpointHook` that are of the wrong type or out of range.

    Raises:
        TypeError, ValueError: the message names the option, the expected values and the one given.
    """
    positive_or(-1, "interval", interval)
    positive_or(-1, "max_keep_ckpts", max_keep)
    at_least("save_begin", save_begin, 0)
    check_bools(overlap=overlap)
    check_choice("when_busy", when_busy, get_args(WhenBusy))


def unit_of(trainer: Trainer, by_epoch: bool | None) -> bool:
    """Return whether checkpoints are counted in epochs; by default they are if the run is."""
    if by_epoch and not trainer.by_epoch:
        raise ValueError(
            "CheckpointHook(by_epoch=True) in a run measured in iterations would never save: "
            "leave by_epoch out, or give the Trainer max_epochs"
        )
    return trainer.by_epoch if by_epoch is None else by_epoch


def unused(path: Path) -> Path:
    """Return a path that does not exist: `path`, or `path` with a number from 2 on behind its name."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}_{number}")
    return free


def check_watched(trainer: Trainer, metrics: Sequence[str]) -> None:
    """Refuse metrics of `save_best` that no validation reports.

    Raises:
        ValueError: there is no validation, or it does not report one of the metrics.
    """
    if metrics and trainer.val_loader is None and not trainer.host:
        raise ValueError(
            f"save_best={', '.join(metrics)!r} needs a validation: give the Trainer a val_loader"
        )
    for metric in metrics:
        if metric != "auto":
            trainer.monitored.require(metric, f"CheckpointHook(save_best={metric!r})")


def session_of(trainer: Trainer, directory: Path) -> Session | None:
    """Return the session in which all ranks save a model of DTensors together; None for another model.

    It is a collective for a model of DTensors.

    Raises:
        OSError: the ranks do not share the directory, or it cannot be written.
    """
    model = unwrap(trainer.model)
    if not any(map(is_dtensor, chain(model.parameters(), model.buffers()))):
        return None
    from eventloop.checkpoint.sharded.session import Session  # it imports torch.distributed.checkpoint

    return Session(directory, trainer.rank, trainer.world_size)


def folder_template(template: str | None) -> str | None:
    """Return `filename_tmpl` without a suffix such as `.pth`; None stays None."""
    if template is None:
        return None
    try:
        filled = template.format(1)
    except (LookupError, ValueError):
        filled = ""
    if template.count("{}") != 1 or not filled:
        raise ValueError(f"filename_tmpl must have exactly one {{}} for the number, got {template!r}")
    if not is_plain_name(filled):
        raise ValueError(
            f"filename_tmpl must be a plain name that does not begin with a dot, got {template!r}"
        )
    return template.removesuffix(next((suffix for suffix in SUFFIXES if template.endswith(suffix)), ""))


def refuse_shared_directory(own: Path, others: Sequence[Path]) -> None:
    """Refuse a hook that saves in the directory of another one."""
    if own.resolve() in {other.resolve() for other in others}:
        raise ValueError(
            f"two CheckpointHooks save in {own}, and would remove each other's checkpoints: expected one "
            "hook for each directory; give one of them another out_dir"
        )
