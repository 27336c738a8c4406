"""Apply the commands of an earlier run again, each after the same iteration.

This is a repetition. A run makes one with `Trainer(commands=PATH)`, or if it is resumed from a checkpoint
that was saved before the last commands.
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


class _Plan(NamedTuple):
    """The commands to apply again, and whether the record in the run's directory belongs to this run."""

    commands: list[Applied]
    keeps: bool


class Repetition:
    """Apply the commands of an earlier run again, in their order.

    Args:
        trainer: the trainer.
        path: the record of an earlier run, or None for that in the run's directory.

    Raises:
        TypeError, OSError, ValueError: the record cannot be read.
    """

    def __init__(self, trainer: SteeredTrainer, path: str | Path | None) -> None:
        self._trainer = trainer
        self._source = NAME if path is None else str(path)
        self._given = [] if path is None else _read(path)
        self._left: deque[Applied] = deque()
        self._ids: set[str] = set()  # of all commands of this repetition
        self._subscribed = False

    @property
    def left(self) -> list[Applied]:
        """The commands that are still to be applied again."""
        return [*self._left]

    def has(self, command: Command) -> bool:
        """Return whether a command is one of this repetition; such a command has no sender to be answered."""
        return command.id in self._ids

    def begin_run(self) -> bool:
        """Find the commands to apply again; rank 0 reads the record for all ranks.

        Returns:
            Whether the record in the run's directory belongs to this run; otherwise it is renamed.

        Raises:
            ValueError: a command was applied before the iteration at which this run begins.
        """
        commands, keeps = decided_by_rank_0(self._plan)
        self._left, self._ids = deque(commands), {*_ids(commands)}
        if commands and self._trainer.rank == 0:
            text = "%s: %d of its commands are applied again, the first one, %s, after iteration %d"
            logger.info(text, self._source, len(commands), commands[0].command, commands[0].iter)
        return keeps

    def begin_training(self) -> None:
        """Subscribe a handler that queues due commands after each iteration, if commands are left."""
        if self._left and not self._subscribed:
            self._subscribed = True
            self._trainer.bus.subscribe(self._after_train_iter, AfterTrainIter, priority=Priority.LOWEST)

    def end_run(self) -> None:
        """Cancel the handler that queues due commands."""
        if self._subscribed:
            self._subscribed = False
            self._trainer.bus.off(self._after_train_iter)

    def due(self, iteration: int) -> list[Command]:
        """Remove the commands that are due, and return them.

        Args:
            iteration: the number of completed iterations; the epoch is the trainer's.
        """
        due = []
        now = self._boundary(iteration, self._trainer.epoch)
        while self._left and self._boundary(self._left[0].iter, self._left[0].epoch) <= now:
            due.append(command_of(self._left.popleft()))
            if due[-1].command == "rollback":
                break  # the commands after it belong to the training that begins at the checkpoint
        return due

    def refusal(self, applied: Applied, reason: str) -> str:
        """Return the text of the error for a command that this run cannot apply again."""
        return (
            f"commands={self._source!r}: expected commands that this run can apply again, got "
            f"{applied.command!r} after iteration {applied.iter}: {reason}; add what the earlier run had, "
            "such as a function by @trainer.command, or remove the line from the file"
        )

    def _boundary(self, iteration: int, epoch: int) -> tuple[int, int]:
        """Return the end of an iteration or epoch as a tuple that can be compared with others.

        In a run measured in iterations the epoch does not count.
        """
        return iteration, epoch if self._trainer.by_epoch else 0

    def _after_train_iter(self, trainer: SteeredTrainer, event: AfterTrainIter) -> None:
        """Queue the commands that are due after this iteration."""
        trainer.stops.commands.extend(self.due(event.iter + 1))
        if not self._left:
            self.end_run()

    def _plan(self) -> _Plan:
        """Decide which commands are applied again, and whether the record in the directory is this run's.

        A resumed run continues the run of that record if the record begins with the commands in the
        checkpoint. Then the other commands of the record are applied again. In any other run the commands of
        `Trainer(commands=...)` are applied again, without those that the checkpoint has.
        """
        trainer = self._trainer
        is_resumed = bool(trainer.iter) and trainer.state.went_back_to is None and not trainer.host
        recorded, applied = self._recorded(needed=is_resumed), _ids(trainer.applied_commands)
        left = [command for command in self._given if command.id not in applied]
        ids = _ids(recorded or [])
        # `applied` may have more: the checkpoint of a rollback is saved before the rollback is recorded
        common = len({*ids}.intersection(applied))
        begins_alike = ids[:common] == applied[:common] and (common > 0 or not applied)
        continues = is_resumed and begins_alike
        if continues and recorded is not None:
            left = recorded[common:] or left
        self._refuse_earlier(left)
        expected_ids = [*applied, *_ids(left)]
        keeps = recorded is not None and (continues or expected_ids[: len(ids)] == ids)
        return _Plan(left, keeps=keeps)

    def _recorded(self, *, needed: bool) -> list[Applied] | None:
        """Return the commands in the record of the run's directory; None if it cannot be read.

        Without a record return [].

        Raises:
            ValueError: the record cannot be read, and `needed` says that this run continues its run.
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

    def _refuse_earlier(self, commands: Sequence[Applied]) -> None:
        """Refuse commands to apply again if the first of them belongs before the begin of this run."""
        trainer, first = self._trainer, commands[0] if commands else None
        if first is None:
            return
        if self._boundary(first.iter, first.epoch) < self._boundary(trainer.iter, trainer.epoch):
            raise ValueError(
                f"commands={self._source!r}: expected commands after iteration {trainer.iter}, from which "
                f"this run goes on, got {first.command!r} after iteration {first.iter}: begin at the "
                "first iteration, or resume from a checkpoint that has it"
            )


def _read(path: str | Path) -> list[Applied]:
    """Return the commands in the file of `Trainer(commands=...)`.

    Raises:
        OSError, TypeError, ValueError: the file cannot be read, or its commands are out of order.
    """
    check_path("commands", path)
    try:
        commands = read_record(Path(path))
    except OSError as error:
        raise type(error)(
            error.errno,
            f"commands={str(path)!r}: expected the {NAME} of an earlier run, which cannot be read: "
            f"{error.strerror}",
        ) from None
    for line, (before, command) in enumerate(pairwise(commands), 2):
        if command.iter < before.iter and before.command != "rollback":
            raise ValueError(
                f"commands={str(path)!r}, line {line}: expected an iteration from {before.iter} on, as the "
                f"lines are in the order of the run, got {command.iter}"
            )
    return commands


def _ids(commands: Sequence[Applied]) -> list[str]:
    return [command.id for command in commands]


def command_of(applied: Applied) -> Command:
    """Return the command of an entry in a record."""
    return Command(
        id=applied.id,
        command=applied.command,
        words=applied.words,
        arguments=applied.arguments,
        source=applied.source,
    )
