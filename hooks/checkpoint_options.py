"""Checking the options of `CheckpointHook`, and the names in its state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from eventloop.checkpoint.store import SUFFIXES
from eventloop.util.checks import check_bools
from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

WhenBusy = Literal["wait", "skip", "replace"]


def check_options(
    interval: object, save_begin: object, max_keep: object, overlap: object, when_busy: object
) -> None:
    """Refuse what could not be saved by.

    Raises:
        TypeError, ValueError: see the message.
    """
    for name, value in (("interval", interval), ("max_keep_ckpts", max_keep)):
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise ValueError(f"{name} must be -1 or a positive int, got {value!r}")
    if isinstance(save_begin, bool) or not isinstance(save_begin, int) or save_begin < 0:
        raise ValueError(f"save_begin must be an int of at least 0, got {save_begin!r}")
    check_bools(overlap=overlap)
    if when_busy not in get_args(WhenBusy):
        raise ValueError(f"unknown when_busy {when_busy!r}{suggest(str(when_busy), [*get_args(WhenBusy)])}")


def unit_of(trainer: Trainer, by_epoch: bool | None) -> bool:
    """True for epochs; by default that of the run.

    Raises:
        ValueError: epochs, in a run measured in iterations.
    """
    if by_epoch and not trainer.by_epoch:
        raise ValueError(
            "CheckpointHook(by_epoch=True) in a run measured in iterations would never save: "
            "leave by_epoch out, or give the Trainer max_epochs"
        )
    return trainer.by_epoch if by_epoch is None else by_epoch


def folder_template(template: str | None) -> str | None:
    """The template of directories' names that one of MMEngine's files' names stands for.

    Raises:
        ValueError: it has not exactly one place for the number, or is no plain name.
    """
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


def check_names(state: Mapping[str, Any], directory: Path) -> None:
    """Refuse a hook's state that names a checkpoint by a path: pruning would remove what lies there.

    Raises:
        CheckpointError: naming it.
    """
    behind = state.get("bests_behind", {}).values()
    bests = [*state["bests"].values(), *(best for several in behind for best in several)]
    for name in (*state["kept"], *(best[1] for best in bests)):
        if not is_plain_name(name):
            raise CheckpointError(
                f"the checkpoint lists {name!r} among those its CheckpointHook keeps: expected the name of a folder in "
                f"{directory}, not a path"
            )
