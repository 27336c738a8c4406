"""Receive the commands to a training, and apply them on the training thread.

A command is applied at the end of an iteration, after the same one on all ranks, and each rank applies the
same commands in the same order. Rank 0 reads the inbox, and writes records and answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventloop.commands.messages import EVALUATED, PROGRAM, Answer, Applied, Command, new_id
from eventloop.events import CheckpointFailed, CheckpointSaved, CommandApplied, CommandRefused
from eventloop.steering.builtin import stacks
from eventloop.steering.evaluated import refuse_future
from eventloop.steering.known import KnownCommands
from eventloop.steering.mailbox import Mailbox
from eventloop.steering.protocols import CommandError, Saving, SchedulerStepper, SteeredTrainer
from eventloop.steering.repetition import Repetition, command_of
from eventloop.steering.rollback import GoingBack, go_back
from eventloop.steering.tunable import set_again
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

PAUSE_SECONDS = 0.2
"""Seconds between two checks whether a paused run goes on."""


class Commands:
    """Apply commands to one trainer at the ends of iterations, and answer them.

    Args:
        trainer: the trainer.
        repeat: the `commands.jsonl` of an earlier run, whose commands are applied again.

    Raises:
        OSError, ValueError: `repeat` cannot be read.
    """

    def __init__(self, trainer: SteeredTrainer, repeat: str | Path | None = None) -> None:
        self._trainer = trainer
        self.known = KnownCommands()
        """The commands that this run knows."""
        self._repetition = Repetition(trainer, repeat)
        self._mailbox: Mailbox | None = None
        self._saving: list[tuple[str, Answer]] = []  # paths that are not durable yet
        self._reason: str | None = None
        self.paused = False
        """True while the training thread waits for the command `go`."""
        self.steppers: list[SchedulerStepper] = []
        """Who steps schedulers that the trainer does not have, such as a host, and leaves factors out."""
        self.ends_pause: Callable[[], bool] = lambda: False
        """A function that says whether a host, which has its own handlers of signals, ends a pause."""
        self._waits = self._trains = False
        self._first = 0  # completed iterations from which this run goes on
        self.going_back: GoingBack | None = None
        """The rollback for which the training ends, until the run has gone back."""
        self._loads = 0  # `trainer.state.loads` when hooks were last set as before a resume
        self._logged: set[str] = set()
        trainer.stops.steering = self
        trainer.ownership.each_second.append(self._poll)

    @property
    def recorded(self) -> list[Applied]:
        """The commands that were applied, and then those that are still to be applied again."""
        return [*self._trainer.applied_commands, *self._repetition.left]

    def request(self, name: str, *words: str, source: str = PROGRAM, **arguments: Any) -> None:
        """Give a command for the next end of an iteration, as a handler does, on one rank or on all.

        Raises:
            RuntimeError: no training runs, so no iteration will end.
        """
        if not self._trains:
            raise RuntimeError(
                f"expected a training that runs, got the request {name!r} outside of one: make it in a "
                "handler, or within a loop of your own"
            )
        unique = "" if source == PROGRAM else new_id()  # a repetition knows it by that
        command = Command(id=unique, command=name, words=[*words], arguments=arguments, source=source)
        self._trainer.stops.commands.append(command)

    @property
    def repeating(self) -> bool:
        """True while commands of an earlier run are still to be applied again."""
        return bool(self._repetition.left)

    # --- a run ---------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Open the inbox of a training that begins, and find the commands of an earlier run to apply again.

        A `fast_dev_run` has a new temporary directory, and receives none.

        Raises:
            ValueError: a command cannot be applied again.
            OSError: the record of commands cannot be written.
        """
        trainer, self._trains, self._first = self._trainer, True, self._trainer.iter
        self._logged.clear()
        if trainer.fast_dev_run:
            return
        keeps = self._repetition.begin_run()
        if trainer.state.loads != self._loads:
            self._loads = trainer.state.loads
            set_again(trainer)
        for applied in self._repetition.left:
            try:
                self.known.bind(command_of(applied))
            except CommandError as error:
                raise ValueError(self._repetition.refusal(applied, str(error))) from None
        if trainer.rank == 0:
            record = self.recorded
            directory = trainer.work_dir.absolute()
            self._mailbox = Mailbox(directory, record, self._receive, keeps=keeps)
            self._mailbox.poll()  # now, because results of an earlier run are known by their iteration

    def begin_training(self) -> None:
        """Apply those commands again that were applied after the checkpoint, at its iteration."""
        if due := self._repetition.due(self._trainer.iter):
            self.apply(due)
        self._repetition.begin_training()

    def repeat_due(self) -> None:
        """Queue the commands of an earlier run that were applied between these two epochs."""
        if self._repetition.left and self.going_back is None:
            self._trainer.stops.commands.extend(self._repetition.due(self._trainer.iter))

    def end_run(self, failure: BaseException | None = None) -> None:
        """Refuse all commands that were not applied, and write the remaining records and answers.

        Args:
            failure: the error that has ended the run, if any.
        """
        trainer, mailbox, going = self._trainer, self._mailbox, self.going_back
        self.paused, self._trains, self._mailbox, self.going_back = False, False, None, None
        reason = trainer.stop_reason or ("" if failure is None else error_text(failure))
        text = f"the run has ended{f': {reason}' if reason else ''}"
        for command in trainer.stops.commands:
            self._log_refusal(command, text)
        self._repetition.end_run()
        saving, self._saving = self._saving, []
        if saving:
            trainer.bus.off(self._saved)
        if mailbox is not None:
            if going is not None and going.answer is not None:
                mailbox.post(_refused(going.answer, "the run ended before it had gone back"))
            for path, answer in saving:
                mailbox.post(_refused(answer, f"the run ended before {path} was durable"))
            mailbox.close(lambda command: _answer(command, trainer.iter, text), trainer.stops.commands)
        trainer.stops.commands.clear()

    # --- on the background thread --------------------------------------------------------------------------

    def _poll(self) -> None:
        if (mailbox := self._mailbox) is not None:
            mailbox.poll()

    def _receive(self, command: Command) -> Answer | None:
        """Answer a command that needs no training thread; keep any other for the training thread."""
        if command.command == "help":
            return _answer(command, self._trainer.iter, result={"text": self.known.help})
        if command.command == "stacks":
            return _answer(command, self._trainer.iter, result={"text": stacks()})
        if command.command == EVALUATED:  # now: a run that goes on would come to the iteration
            try:
                self.known.bind(command)
                refuse_future(self._trainer, command.arguments.get("iter"))
            except CommandError as error:
                return _answer(command, self._trainer.iter, str(error))
        self._trainer.stops.commands.append(command)
        return None

    # --- on the training thread ----------------------------------------------------------------------------

    def claim(self, command: Command) -> bool:
        """Claim a command of the inbox; return False if its sender has withdrawn it."""
        return self._mailbox is None or self._mailbox.claim(command)

    def apply(self, commands: Sequence[Command]) -> str | None:
        """Apply commands at the end of an iteration, and wait here while the run is paused.

        Returns:
            The reason to stop, if one of them stops the run.
        """
        self._reason, later = None, []
        for command in commands:
            if self.going_back is None or command.command == "rollback":
                self._trainer.copying.join()  # a checkpoint under way must not have what the command changes
                before = self._reason
                self._apply(command)
                if self._repetition.has(command) and self._trainer.iter == self._first:
                    self._reason = before  # the earlier run stopped here, and this one goes on from there
            else:
                later.append(command)  # it is for the training from there
        if self._trainer.rank == 0:
            self._trainer.stops.commands.extendleft(reversed(later))
        if self.paused and not self._waits:
            self._wait_while_paused()
        return self._reason

    def stop(self, reason: str) -> None:
        """Stop the run once the present commands are applied; the command `stop` calls it."""
        self._reason = self._reason or reason

    def go_back(self) -> bool:
        """Go back if the training has ended for that; return whether it begins again."""
        going = self.going_back
        if going is None or not self._trainer.stops.goes_back:
            return False
        go_back(self._trainer, going)
        self.going_back = None
        if self._mailbox is not None:
            self._mailbox.post(going.answer, going.record)
        return True

    def _wait_while_paused(self) -> None:
        """Wait until a command or a signal lets the paused run go on, on all ranks."""
        trainer, began, self._waits = self._trainer, time.perf_counter(), True
        try:
            with trainer.clock.excluding():
                while self.paused and not (self._reason or trainer.stops.exchange() or self.ends_pause()):
                    trainer.state.finish_saves()  # no iteration reports them
                    time.sleep(PAUSE_SECONDS)
        finally:
            self._waits = self.paused = False
            trainer.clock.paused += time.perf_counter() - began

    def _apply(self, command: Command) -> None:
        trainer, reason, result = self._trainer, "", None
        try:
            bound = self.known.bind(command)
            command = msgspec.structs.replace(command, words=[], arguments=bound.arguments)
            result = bound.call(trainer)
        except CommandError as error:
            reason = str(error)
        except Exception as error:
            logger.warning("the command %s failed", command.command, exc_info=True)
            reason = f"it raised {error_text(error)}"
        if reasons := trainer.stops.texts_of_ranks(reason):
            self._refuse(command, _of_ranks(reasons, trainer.world_size))
        else:
            self._record(command, result)

    def _refuse(self, command: Command, reason: str) -> None:
        trainer = self._trainer
        fields = {"command": command.command, "arguments": command.shown, "source": command.source}
        trainer.announce(CommandRefused, **fields, reason=reason)
        self._log_refusal(command, reason)
        if self._mailbox is not None:
            self._mailbox.post(_answer(command, trainer.iter, reason))

    def _log_refusal(self, command: Command, reason: str) -> None:
        """Log, once for the same reason, that a command was refused to which nobody gets an answer."""
        text = f"{command.command} was refused: {reason}"
        if (command.source == PROGRAM or self._repetition.has(command)) and text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)

    def _record(self, command: Command, result: Any) -> None:
        trainer = self._trainer
        if isinstance(result, GoingBack):
            command = result.resolved(command)
        given = _as_result(result)
        fields = {"command": command.command, "arguments": command.shown, "source": command.source}
        trainer.announce(CommandApplied, **fields, result=given)
        record = None
        if command.source != PROGRAM and self.known.is_repeated(command.command):
            trainer.applied_commands.append(_applied(command, trainer.iter, trainer.epoch))
            record = self.recorded
        answer = _answer(command, trainer.iter, result=given)
        if isinstance(result, GoingBack):
            self.going_back = result._replace(answer=answer, record=record)
            trainer.stops.go_back()
        elif self._mailbox is None:
            return
        elif isinstance(result, Saving) and not result.durable:
            self._mailbox.post(None, record)
            self._saving.append((str(result.path), answer))
            if len(self._saving) == 1:
                trainer.bus.subscribe(self._saved, CheckpointSaved, CheckpointFailed)
        else:
            self._mailbox.post(answer, record)

    def _saved(self, trainer: SteeredTrainer, event: CheckpointSaved | CheckpointFailed) -> None:
        """Answer the commands that wait for this checkpoint."""
        self.saved(event.path, event.error if isinstance(event, CheckpointFailed) else "")

    def saved(self, path: str, error: str = "") -> None:
        """Answer the commands that wait for a checkpoint; with an error, it was not saved."""
        done = [answer for place, answer in self._saving if place == path]
        if not done:
            return
        self._saving = [(place, answer) for place, answer in self._saving if place != path]
        for answer in done:
            if error:
                answer = _refused(answer, f"{path} was not saved: {error}")
            if self._mailbox is not None:
                self._mailbox.post(answer)
        if not self._saving:
            self._trainer.bus.off(self._saved)


def _answer(
    command: Command, iteration: int, refusal: str = "", result: Mapping[str, Any] | None = None
) -> Answer:
    return Answer(
        id=command.id,
        command=command.command,
        outcome="refused" if refusal else "applied",
        iteration=iteration,
        reason=refusal,
        result=dict(result or {}),
    )


def _of_ranks(reasons: Mapping[int, str], world_size: int) -> str:
    """Return the reason of all ranks, or that of the first rank that has one, with its number."""
    rank, reason = next(iter(reasons.items()))
    if len(reasons) < world_size:
        return f"rank {rank}: {reason}; other ranks have applied it, and now differ"
    return reason if len({*reasons.values()}) == 1 else f"rank {rank}: {reason}"


def _refused(answer: Answer, reason: str) -> Answer:
    return msgspec.structs.replace(answer, outcome="refused", reason=reason)


def _applied(command: Command, iteration: int, epoch: int) -> Applied:
    return Applied(
        iter=iteration,
        epoch=epoch,
        id=command.id,
        command=command.command,
        words=command.words,
        arguments=command.arguments,
        source=command.source,
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _as_result(result: Any) -> dict[str, Any]:
    """Return what a command returned as a mapping that JSON can hold."""
    if result is None:
        return {}
    if isinstance(result, Saving):
        return {"path": str(result.path)}
    if isinstance(result, GoingBack):
        return result.result
    given = result if isinstance(result, Mapping) else {"result": result}
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given))
    except (TypeError, ValueError):
        plain = {"result": str(result)}
    return plain
