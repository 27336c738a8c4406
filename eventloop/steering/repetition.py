"""Apply the commands of an earlier run again, each after the same iteration.

Two kinds of run do so: a run with `Trainer(commands=PATH)`, and a run resumed from a checkpoint older than
the last commands.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from eventloop.commands.messages import Applied, Command
from eventloop.commands.record import NAME, read_record
from eventloop.events import AfterTrainIter
from eventloop.events.priority import Priority
from eventloop.state.exchange import decided_by_rank_0
from eventloop.steering.protocols import SteeredTrainer
from eventloop.util.checks import check_path

logger = logging.getLogger("eventloop")


class _Found(NamedTuple):
    """The commands to apply again, and whether the record in the run's directory belongs to this run."""

    left: list[Applied]
    keeps: bool


class Repetition:
    """The commands that are still to be applied again, in their order.

    Args:
        trainer: the trainer.
        path: the record of an earlier run, or None.

    Raises:
        TypeError, OSError, ValueError: the record cannot be read.
    """

    def __init__(self, trainer: SteeredTrainer, path: str | Path | None) -> None:
        self._trainer = trainer
        self._source = NAME if path is None else str(path)
        self._given = [] if path is None else _read(path)
        self._left: deque[Applied] = deque()
        self._ids: set[str] = set()
        self._subscribed = False

    @property
    def left(self) -> list[Applied]:
        """The commands that are still to be applied again."""
        return [*self._left]

    def has(self, command: Command) -> bool:
        """Return whether this run repeats the command, so that no sender waits for an answer."""
        return command.id in self._ids

    def begin_run(self) -> bool:
        """Find the commands to apply again; return whether the record in the run's directory is of this run.

        Rank 0 reads the record, for all ranks.

        Raises:
            ValueError: a command belongs before the iteration from which the run goes on.
        """
        left, keeps = decided_by_rank_0(self._find)
        self._left, self._ids = deque(left), {each.id for each in left}
        if left and self._trainer.rank == 0:
            text = "%s: %d of its commands are applied again, the first one, %s, after iteration %d"
            logger.info(text, self._source, len(left), left[0].command, left[0].iter)
        return keeps

    def begin_training(self) -> None:
        """Check after each iteration whether a command is due; if none is left, no handler is subscribed."""
        if self._left and not self._subscribed:
            self._subscribed = True
            self._trainer.bus.subscribe(self._after_train_iter, AfterTrainIter, priority=Priority.LOWEST)

    def end_run(self) -> None:
        """Stop checking after iterations whether a command is due."""
        if self._subscribed:
            self._subscribed = False
            self._trainer.bus.off(self._after_train_iter)

    def due(self, iteration: int) -> list[Command]:
        """Remove and return the commands to apply after so many completed iterations, in this epoch."""
        due = []
        place = self._place(iteration, self._trainer.epoch)
        while self._left and self._place(self._left[0].iter, self._left[0].epoch) <= place:
            due.append(command_of(self._left.popleft()))
            if due[-1].command == "rollback":
                break  # those after it have earlier iterations, and are for the training from there
        return due

    def refusal(self, applied: Applied, why: str) -> str:
        """Return the text of the error for a command that this run cannot apply again."""
        return (
            f"commands={self._source!r}: expected commands that this run can apply again, got "
            f"{applied.command!r} after iteration {applied.iter}: {why}; add what the earlier run had, such "
            "as a function by @trainer.command, or remove the line from the file"
        )

    def _place(self, iteration: int, epoch: int) -> tuple[int, int]:
        """Return the place of a boundary; a run measured in iterations has one epoch, whatever it counts."""
        return iteration, epoch if self._trainer.by_epoch else 0

    def _after_train_iter(self, trainer: SteeredTrainer, event: AfterTrainIter) -> None:
        trainer.stops.commands.extend(self.due(event.iter + 1))
        if not self._left:
            self.end_run()

    def _find(self) -> _Found:
        trainer = self._trainer
        goes_on = bool(trainer.iter) and trainer.state.went_back_to is None and not trainer.host
        recorded, applied = self._recorded(needed=goes_on), _ids(trainer.applied_commands)
        left = [each for each in self._given if each.id not in applied]
        ids = _ids(recorded or [])
        known = len({*ids}.intersection(applied))  # a rollback saves what the record gets a moment later
        goes_on = goes_on and ids[:known] == applied[:known] and (known > 0 or not applied)
        if goes_on and recorded is not None:
            left = recorded[known:] or left
        self._check(left)
        keeps = recorded is not None and (goes_on or [*applied, *_ids(left)][: len(ids)] == ids)
        return _Found(left, keeps=keeps)

    def _recorded(self, *, needed: bool) -> list[Applied] | None:
        """Return the commands in the record of the run's directory; None if it is not of this run.

        Raises:
            ValueError: it cannot be read, and is `needed`, because this run goes on with that one.
        """
        path = self._trainer.work_dir / NAME
        try:
            with suppress(FileNotFoundError):
                return read_record(path)
        except ValueError as error:
            if needed:
                raise ValueError(
                    f"{error}; this run continues the run of that file: restore the file, or rename it "
                    "to go on without the commands after the checkpoint"
                ) from None
            return None
        return []

    def _check(self, left: Sequence[Applied]) -> None:
        trainer, here = self._trainer, self._place(self._trainer.iter, self._trainer.epoch)
        if left and self._place(left[0].iter, left[0].epoch) < here:
            raise ValueError(
                f"commands={self._source!r}: expected commands after iteration {trainer.iter}, from which "
                f"this run goes on, got {left[0].command!r} after iteration {left[0].iter}: begin at the "
                "first iteration, or resume from a checkpoint that has it"
            )


def _read(path: str | Path) -> list[Applied]:
    """Read the commands that `Trainer(commands=...)` is given."""
    check_path("commands", path)
    try:
        commands = read_record(Path(path))
    except OSError as error:
        raise type(error)(
            error.errno,
            f"commands={str(path)!r}: expected the {NAME} of an earlier run, which cannot be read: "
            f"{error.strerror}",
        ) from None
    for number, (one, other) in enumerate(pairwise(commands), 2):
        if other.iter < one.iter and one.command != "rollback":
            raise ValueError(
                f"commands={str(path)!r}, line {number}: expected an iteration from {one.iter} on, as the "
                f"lines are in the order of the run, got {other.iter}"
            )
    return commands


def _ids(commands: Sequence[Applied]) -> list[str]:
    return [each.id for each in commands]


def command_of(applied: Applied) -> Command:
    """Return the command that was applied."""
    return Command(
        id=applied.id,
        command=applied.command,
        words=applied.words,
        arguments=applied.arguments,
        source=applied.source,
    )
