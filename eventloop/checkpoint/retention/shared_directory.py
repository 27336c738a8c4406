"""Let several checkpoint hooks of one trainer share directories.

`CheckpointHook` uses it for names that do not collide, one sequence of all checkpoints, and one note in an
error on where to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from eventloop.checkpoint.directory import in_order
from eventloop.checkpoint.manifest import Manifest, read_manifest
from eventloop.checkpoint.retention.labels import Labels
from eventloop.checkpoint.retention.pending import Saves
from eventloop.util.errors import CheckpointError


class CheckpointingHook(Protocol):
    """The parts of a checkpoint hook that the other hooks of the trainer use."""

    directory: Path
    labels: Labels
    saves: Saves
    naming: tuple[str | None, bool | None]
    """The template of its names and their unit, which distinguish them from those of another hook."""
    can_be_resumed: bool
    """False if its checkpoints lack something that a resume needs."""

    def known(self) -> list[Path]:
        """Return the checkpoints that it has saved, also in the run that was resumed."""


def refuse_twin(own: CheckpointingHook, hooks: Sequence[CheckpointingHook]) -> None:
    """Refuse a hook that writes the same names as another one.

    Raises:
        ValueError: both hooks have the same directory, and names that can collide.
    """
    for hook in hooks:
        if hook is not own and hook.directory == own.directory and _alike(hook.naming, own.naming):
            raise ValueError(
                f"two CheckpointHooks write the same names in {own.directory}, and would remove each other's "
                "checkpoints: give one of them another filename_tmpl or out_dir"
            )


def _alike(naming: tuple[str | None, bool | None], other: tuple[str | None, bool | None]) -> bool:
    """Return whether two hooks make the same names; without a template the unit is in the name."""
    return naming[0] == other[0] and (naming[0] is not None or naming[1] == other[1])


def has_more(hooks: Sequence[CheckpointingHook], own: CheckpointingHook, path: Path, iteration: int) -> bool:
    """Return whether another hook has just saved a fuller checkpoint under the path that `own` would use.

    Two hooks can save one path: a run that stops within an epoch is saved as `iter_{n}` by hooks that count
    epochs too.
    """
    saved = [hook.saves.newest for hook in hooks if hook is not own and hook.can_be_resumed]
    return not own.can_be_resumed and any(
        newest is not None and (newest.path, newest.iter) == (path, iteration) for newest in saved
    )


def sequences(hooks: Sequence[CheckpointingHook]) -> list[int]:
    """Return the last sequence of each hook; scan the directory of a hook that has not started yet."""
    for hook in hooks:
        if hook.labels.sequence < 0:
            hook.labels.look_around(hook.directory)
    return [hook.labels.sequence for hook in hooks]


def where_to_resume(hooks: Sequence[CheckpointingHook]) -> str:
    """Return a sentence that names the checkpoint for `resume("auto")`.

    "" is returned if the hooks have saved none, neither in this process nor in the run that was resumed.
    """
    known: dict[Path, Manifest] = {}
    for path in (path for hook in hooks if hook.can_be_resumed for path in hook.known()):
        with suppress(CheckpointError):  # it does not exist, or is damaged
            known[path] = read_manifest(path)
    if not known:
        return ""
    newest = in_order(known)[-1]
    return f"the newest checkpoint to resume from is {newest} (iteration {known[newest].iter})"


def note_where_to_resume(failure: BaseException | None, hooks: Sequence[CheckpointingHook]) -> None:
    """Add a note on where to resume to the error that ended a training, once for all hooks.

    Nothing is added if no hook saves checkpoints that can be resumed from.
    """
    places = dict.fromkeys(str(hook.directory) for hook in hooks if hook.can_be_resumed)
    if failure is None or not places:
        return
    note = where_to_resume(hooks) or (
        f"there is no checkpoint to resume from in {' or '.join(places)}: none was saved before this error"
    )
    if note not in getattr(failure, "__notes__", ()):  # another hook may have added it
        failure.add_note(note)
