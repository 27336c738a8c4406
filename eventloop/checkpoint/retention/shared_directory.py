"""Several hooks of one trainer that save: names that do not collide, one order, and one word on which is the newest."""

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


class Beside(Protocol):
    """What each of them knows."""

    directory: Path
    labels: Labels
    saves: Saves
    naming: tuple[str | None, bool | None]
    """What tells its names from those of another in its directory: the template, and the unit."""
    can_be_resumed: bool
    """False where something is left out of what it saves."""

    def known(self) -> list[Path]:
        """What it has saved, in the run that was resumed too."""


def refuse_twin(own: Beside, hooks: Sequence[Beside]) -> None:
    """Refuse two that write the same names.

    Raises:
        ValueError: see the message.
    """
    for hook in hooks:
        if hook is not own and hook.directory == own.directory and _alike(hook.naming, own.naming):
            raise ValueError(
                f"two CheckpointHooks write the same names in {own.directory}, and would remove each other's: "
                "give one of them another filename_tmpl or out_dir"
            )


def _alike(naming: tuple[str | None, bool | None], other: tuple[str | None, bool | None]) -> bool:
    """A template has the numbers of either unit; without one the unit is in the name."""
    return naming[0] == other[0] and (naming[0] is not None or naming[1] == other[1])


def has_more(hooks: Sequence[Beside], own: Beside, path: Path, iteration: int) -> bool:
    """Whether another has saved `path` at this iteration, and what can be resumed from, where what `own` would put in its
    place cannot: a run that stops within an epoch is `iter_{n}` to those that count epochs too."""
    saved = [hook.saves.newest for hook in hooks if hook is not own and hook.can_be_resumed]
    return not own.can_be_resumed and any(
        newest is not None and (newest.path, newest.iter) == (path, iteration) for newest in saved
    )


def sequences(hooks: Sequence[Beside]) -> list[int]:
    """The last of each, looked up where its turn at the beginning is still to come."""
    for hook in hooks:
        if hook.labels.sequence < 0:
            hook.labels.look_around(hook.directory)
    return [hook.labels.sequence for hook in hooks]


def where_to_resume(hooks: Sequence[Beside]) -> str:
    """Name the checkpoint that `resume("auto")` takes, for people; "" where the hooks have saved none, in this process
    or in the run that was resumed."""
    known: dict[Path, Manifest] = {}
    for path in (path for hook in hooks if hook.can_be_resumed for path in hook.known()):
        with suppress(CheckpointError):  # it is not there, or damaged
            known[path] = read_manifest(path)
    if not known:
        return ""
    newest = in_order(known)[-1]
    return f"the newest checkpoint to resume from is {newest} (iteration {known[newest].iter})"


def note_where_to_resume(failure: BaseException | None, hooks: Sequence[Beside]) -> None:
    """Say it with the error that ended a training, once for all hooks; nothing where none of them saves what can be
    resumed from."""
    places = dict.fromkeys(str(hook.directory) for hook in hooks if hook.can_be_resumed)
    if failure is None or not places:
        return
    note = where_to_resume(hooks) or (
        f"there is no checkpoint to resume from in {' or '.join(places)}: none was saved before this error"
    )
    if note not in getattr(failure, "__notes__", ()):  # by the hook before
        failure.add_note(note)
