"""Record that a run went back or a new run begins, and name the checkpoint to resume from.

`CheckpointHook` uses it when a training begins and ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from eventloop.checkpoint.commit import Removals
from eventloop.checkpoint.directory import SUFFIXES, Found, begin_new_run, go_back, in_order, scan
from eventloop.checkpoint.manifest import Manifest, read_manifest
from eventloop.checkpoint.retention.retention import Retention
from eventloop.commands.messages import Applied
from eventloop.commands.record import iterations_evaluated
from eventloop.util.errors import CheckpointError

logger = logging.getLogger("eventloop")


class ResumeState(Protocol):
    """The part of a trainer's state that says where its run goes on."""

    resumed_from: Path | None
    went_back_to: Path | None

    @property
    def directories(self) -> list[Path]: ...


def reconcile(
    retention: Retention, directory: Path, iteration: int, state: ResumeState, commands: Sequence[Applied]
) -> None:
    """Make a hook's record agree with its directory when training begins, and record where the run goes on.

    Args:
        retention: the hook's record.
        directory: the directory of the hook's checkpoints.
        iteration: the number of completed iterations.
        state: the part of the trainer's state that says from which checkpoint the run was resumed.
        commands: the commands that were applied to the run, also before it was resumed.
    """
    found = retention.scan_directory(directory)
    resumed_here = state.resumed_from in {path.absolute() for path in found.manifests}
    retention.drop_missing([path.name for path in found.manifests], bests=resumed_here)
    retention.origin = [state.resumed_from.name] if resumed_here and state.resumed_from is not None else []
    retention.await_again(found, directory, iterations_evaluated(commands))
    newest = next(iter(found.newest_first()), None)
    if newest is not None and newest.absolute() == state.resumed_from:
        # so that a resumed run that is already complete does not save again
        retention.resumed_from(found.manifests[newest].iter)
    went_back_to, state.went_back_to = state.went_back_to, None
    if went_back_to is not None:
        record_rewind(state.directories, went_back_to)
    if iteration == 0 and state.resumed_from is None:
        warn_of_other_run(found, directory)


def where_to_resume(paths: Sequence[Path]) -> str:
    """Return a text that names the newest checkpoint of `paths`; "" if none of them can be read."""
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        with suppress(CheckpointError):  # the checkpoint does not exist, or is damaged
            manifests[path] = read_manifest(path)
    if not manifests:
        return ""
    newest = in_order(manifests)[-1]
    return f"the newest checkpoint to resume from is {newest} (iteration {manifests[newest].iter})"


def add_resume_note(
    failure: BaseException | None, paths: Sequence[Path], directories: Sequence[Path]
) -> None:
    """Add a note on where to resume to the error that ended a training.

    Nothing is added if no hook saves checkpoints that can be resumed from.

    Args:
        failure: the error.
        paths: the checkpoints that can be resumed from.
        directories: the directories of the hooks that save such checkpoints.
    """
    names = dict.fromkeys(map(str, directories))
    if failure is None or not names:
        return
    note = where_to_resume(paths) or (
        f"there is no checkpoint to resume from in {' or '.join(names)}: none was saved before this error"
    )
    if note not in getattr(failure, "__notes__", ()):  # another hook may have added it
        failure.add_note(note)


def record_rewind(directories: Sequence[Path], resumed: Path, found: Found | None = None) -> None:
    """Record durably that the run resumed from an earlier checkpoint of its directories.

    Until the run has saved, `resume("auto")` then uses that checkpoint. It is called when training begins.
    Nothing is recorded for the newest checkpoint, or for a checkpoint of another directory. If the record
    cannot be written, a warning is logged.

    Args:
        directories: the directories that the hooks of the run save in.
        resumed: the path of the checkpoint that was resumed from.
        found: a scan of the directories; by default they are scanned now. Its checkpoints that were saved
            after `resumed` become abandoned.
    """
    # MMEngine's name of a checkpoint has a suffix, which the folder does not have
    name = resumed.stem if resumed.suffix in SUFFIXES and not resumed.is_file() else resumed.name
    found = scan(*directories) if found is None else found
    parents = [directory for directory in directories if directory.resolve() == resumed.resolve().parent]
    path = next((parent / name for parent in parents if parent / name in found.manifests), None)
    if path is None:
        return
    try:
        go_back(found, path)
    except OSError as error:
        newest = scan(*directories).paths[-1]
        logger.warning(
            'could not record in %s that the run goes on from %s; until it has saved, resume("auto") would '
            "take %s: %s",
            path.parent,
            path.name,
            found.name_of(newest),
            error,
        )


def warn_of_other_run(found: Found, directory: Path) -> None:
    """Warn that a new run starts in a directory with checkpoints of another run, and record it durably."""
    if not found.paths:
        return
    logger.warning(
        "%s holds checkpoints of another run, the newest is %s: this run starts from the beginning and "
        "will overwrite those of the same names; call trainer.resume() to go on with the other run, or "
        "use another work_dir",
        directory,
        found.paths[-1].name,
    )
    try:
        begin_new_run(found)
    except OSError as error:
        logger.warning(
            'could not record in %s that a new run begins; "best" may be one of the other run: %s',
            directory,
            error,
        )


def remove_surplus(paths: Sequence[Path]) -> None:
    """Remove checkpoints that were retained only to be validated; an error is logged."""
    removals = Removals()
    for warning in [*removals.rename(paths), *removals.finish()]:
        logger.warning("%s", warning)
