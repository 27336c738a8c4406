"""Check the options of `CheckpointHook`, and the checkpoint names in its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from eventloop.checkpoint.directory import SUFFIXES
from eventloop.util.checks import at_least, check_bools, check_choice, positive_or
from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

NO_OPTIMIZER = (
    "the trainer has no optimizer, so checkpoints hold no optimizer's state and a resumed run begins with a "
    "new one: pass optimizer=... also where your own code steps it"
)
WhenBusy = Literal["wait", "skip", "replace"]


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
    """Return whether checkpoints are counted in epochs; `by_epoch=None` takes the run's unit."""
    if by_epoch and not trainer.by_epoch:
        raise ValueError(
            "CheckpointHook(by_epoch=True) in a run measured in iterations would never save: "
            "leave by_epoch out, or give the Trainer max_epochs"
        )
    return trainer.by_epoch if by_epoch is None else by_epoch


def folder_template(template: str | None) -> str | None:
    """Return the template of a checkpoint's name without its suffix, such as `.pth`; None for None."""
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


def check_names(state: Mapping[str, Any], directory: Path) -> None:
    """Refuse a hook's state that names a checkpoint by a path, because pruning would remove that path."""
    behind = state.get("bests_behind", {}).values()
    bests = [*state["bests"].values(), *(best for several in behind for best in several)]
    for name in (*state["kept"], *(best[1] for best in bests)):
        if not is_plain_name(name):
            raise CheckpointError(
                f"the checkpoint lists {name!r} among the checkpoints that CheckpointHook keeps: expected "
                f"the name of a folder in {directory}, got a path"
            )
