"""Receive the commands to a training, and apply them on the training thread.

A command is applied at the end of an iteration, the same one on all ranks, and each rank applies the same
commands in the same order. Rank 0 reads the inbox, and writes the record of commands and the answers.
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
from eventloop.steering.known import KnownCommands
from eventloop.steering.mailbox import Mailbox
from eventloop.steering.protocols import CommandError, GoingBack, Saving, SchedulerStepper, SteeredTrainer
from eventloop.steering.repetition import Repetition, command_of
from eventloop.steering.tunable import set_again
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

PAUSE_SECONDS = 0.2
"""Seconds between two checks of whether a paused run goes on."""


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
        self._saving: list[tuple[str, Answer]] = []
        """The checkpoints that are not durable yet, by path, with the answers that wait for them."""
        self._stop_reason: str | None = None  # of a command that is applied now and stops the run
        self.paused = False
        """True while the training thread waits for the command `go`."""
        self.steppers: list[SchedulerStepper] = []
        """Objects that step schedulers of another engine; each removes the factors of commands meanwhile."""
        self.ends_pause: Callable[[], bool] = lambda: False
        """A function that returns True if another engine, with signal handlers of its own, ends a pause."""
        self._waits = self._trains = False  # whether a pause is under way, and whether a training is
        self._first_iter = 0  # the number of completed iterations at which this training began
        self.going_back: GoingBack | None = None
        """The requested rollback, from the command on until the checkpoint is loaded."""
        self._loads = 0  # the value of `trainer.state.loads` when hooks' attributes were last set again
        self._logged_refusals: set[str] = set()
        trainer.stops.steering = self
        trainer.ownership.each_second.append(self._poll)

    @property
    def recorded(self) -> list[Applied]:
        """The applied commands, followed by the commands of an earlier run that are still to be applied."""
        return [*self._trainer.applied_commands, *self._repetition.left]

    def request(self, name: str, *words: str, source: str = PROGRAM, **arguments: Any) -> None:
        """Request a command at the end of the iteration; a handler may call this on one rank or on all.

        Args:
            name: the name of the command.
            words: its arguments as in `eventloop tell`.
            source: the name of a hook whose commands a repetition of the run must apply again. Other commands
                of the program are not recorded, because its handlers request them again.
            arguments: its arguments by name.

        Raises:
            RuntimeError: no training runs, so no iteration will end.
        """
        if not self._trains:
            raise RuntimeError(
                f"expected a training that runs, got the request {name!r} outside of one: make it in a "
                "handler, or within a loop of your own"
            )
        command_id = "" if source == PROGRAM else new_id()  # by its id a repetition identifies a command
        command = Command(id=command_id, command=name, words=[*words], arguments=arguments, source=source)
        self._trainer.stops.commands.append(command)

    @property
    def repeating(self) -> bool:
        """True while commands of an earlier run are still to be applied again."""
        return bool(self._repetition.left)

    # --- a run ---------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Open the inbox of a training that begins, and check the commands of an earlier run to apply again.

        A `fast_dev_run`, whose directory is temporary, receives no commands.

        Raises:
            ValueError: a command cannot be applied again.
            OSError: the record of commands cannot be written.
        """
        trainer, self._trains, self._first_iter = self._trainer, True, self._trainer.iter
        self._logged_refusals.clear()
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
            # before the first iteration: metrics reported for an earlier run are refused by their iteration
            self._mailbox.poll()

    def begin_training(self) -> None:
        """Apply again the commands that were applied at this iteration after its checkpoint was saved."""
        if due := self._repetition.due(self._trainer.iter):
            self.apply(due)
        self._repetition.begin_training()

    def repeat_due(self) -> None:
        """Queue the commands that an earlier run applied at this boundary between two epochs."""
        if self._repetition.left and self.going_back is None:
            self._trainer.stops.commands.extend(self._repetition.due(self._trainer.iter))

    def end_run(self, failure: BaseException | None = None) -> None:
        """Refuse all commands that were not applied, and write the remaining records and answers.

        Args:
            failure: the error that has ended the run, if any.
        """
        trainer, mailbox, rollback = self._trainer, self._mailbox, self.going_back
        self.paused, self._trains, self._mailbox, self.going_back = False, False, None, None
        reason = trainer.stop_reason or ("" if failure is None else error_text(failure))
        refusal = f"the run has ended: {reason}" if reason else "the run has ended"
        for command in trainer.stops.commands:
            self._log_refusal(command, refusal)
        self._repetition.end_run()
        saving, self._saving = self._saving, []
        if saving:
            trainer.bus.off(self._saved)
        if mailbox is not None:
            if rollback is not None and rollback.answer is not None:
                mailbox.post(_refused(rollback.answer, "the run ended before it had gone back"))
            for path, answer in saving:
                mailbox.post(_refused(answer, f"the run ended before {path} was durable"))
            mailbox.close(lambda command: _answer(command, trainer.iter, refusal), trainer.stops.commands)
        trainer.stops.commands.clear()

    # --- on the background thread --------------------------------------------------------------------------

    def _poll(self) -> None:
        """Read the inbox, and write records and answers; called every second."""
        if (mailbox := self._mailbox) is not None:
            mailbox.poll()

    def _receive(self, command: Command) -> Answer | None:
        """Return the answer to a command that needs no training thread; queue any other command."""
        if command.command == "help":
            return _answer(command, self._trainer.iter, result={"text": self.known.help})
        if command.command == "stacks":
            from eventloop.steering.builtin import stacks

            return _answer(command, self._trainer.iter, result={"text": stacks()})
        if command.command == EVALUATED:
            # refused here, because by the time it is applied the run may have reached the iteration
            from eventloop.steering.evaluated import refuse_future

            try:
                self.known.bind(command)
                refuse_future(self._trainer, command.arguments.get("iter"))
            except CommandError as error:
                return _answer(command, self._trainer.iter, str(error))
        self._trainer.stops.commands.append(command)
        return None

    # --- on the training thread ----------------------------------------------------------------------------

    def claim(self, command: Command) -> bool:
        """Claim a command of the inbox before it is applied; return False if its sender has withdrawn it."""
        return self._mailbox is None or self._mailbox.claim(command)

    def apply(self, commands: Sequence[Command]) -> str | None:
        """Apply commands at the end of an iteration, and wait here while the run is paused.

        After the command `rollback` other commands stay queued: they are for the training that begins at the
        checkpoint.

        Returns:
            The reason to stop, if one of the commands stops the run.
        """
        self._stop_reason, later = None, []
        for command in commands:
            if self.going_back is None or command.command == "rollback":
                self._trainer.copying.join()  # a running save must not include a change by the command
                reason_before = self._stop_reason
                self._apply(command)
                if self._repetition.has(command) and self._trainer.iter == self._first_iter:
                    # the earlier run was stopped here; this run was resumed here in order to go on
                    self._stop_reason = reason_before
            else:
                later.append(command)
        if self._trainer.rank == 0:
            self._trainer.stops.commands.extendleft(reversed(later))
        if self.paused and not self._waits:
            self._wait_while_paused()
        return self._stop_reason

    def stop(self, reason: str) -> None:
        """Stop the run once the current commands are applied; the command `stop` calls this method."""
        self._stop_reason = self._stop_reason or reason

    def go_back(self) -> bool:
        """Load the checkpoint of a rollback for which the training has ended; return False without one.

        The loop calls this after a training, and begins the training again if it returns True.
        """
        rollback = self.going_back
        if rollback is None or not self._trainer.stops.goes_back:
            return False
        from eventloop.steering.rollback import go_back

        go_back(self._trainer, rollback)
        self.going_back = None
        if self._mailbox is not None:
            self._mailbox.post(rollback.answer, rollback.record)
        return True

    def _wait_while_paused(self) -> None:
        """Wait until a command, a stop or a signal ends the pause, on all ranks."""
        trainer, start, self._waits = self._trainer, time.perf_counter(), True
        try:
            with trainer.clock.excluding():
                while self.paused and not self._stop_reason:
                    if trainer.stops.exchange() or self.ends_pause():
                        break
                    trainer.state.finish_saves()  # reports saves that end meanwhile, as an iteration would
                    time.sleep(PAUSE_SECONDS)
        finally:
            self._waits = self.paused = False
            trainer.clock.paused += time.perf_counter() - start

    def _apply(self, command: Command) -> None:
        """Apply one command on all ranks, then record it; refuse it if any rank could not apply it.

        Only the call shows whether a rank can apply it, so other ranks may have applied a command that is
        refused. The refusal then says that they differ.
        """
        trainer, reason, result = self._trainer, "", None
        try:
            bound = self.known.bind(command)  # its arguments include the words, by name
            command = msgspec.structs.replace(command, words=[], arguments=bound.arguments)
            result = bound.call(trainer)
        except CommandError as error:
            reason = str(error)
        except Exception as error:
            logger.warning("the command %s failed", command.command, exc_info=True)
            reason = f"it raised {error_text(error)}"
        if reasons := trainer.stops.texts_of_ranks(reason):  # a collective
            self._refuse(command, _common_reason(reasons, trainer.world_size))
        else:
            self._record(command, result)

    def _refuse(self, command: Command, reason: str) -> None:
        """Emit `command_refused`, answer the command, and log the refusal if no sender gets the answer."""
        trainer = self._trainer
        fields = {"command": command.command, "arguments": command.shown, "source": command.source}
        trainer.announce(CommandRefused, **fields, reason=reason)
        self._log_refusal(command, reason)
        if self._mailbox is not None:
            self._mailbox.post(_answer(command, trainer.iter, reason))

    def _log_refusal(self, command: Command, reason: str) -> None:
        """Log, once for the same reason, the refusal of a command that has no sender to be answered."""
        text = f"{command.command} was refused: {reason}"
        has_no_sender = command.source == PROGRAM or self._repetition.has(command)
        if has_no_sender and text not in self._logged_refusals:
            self._logged_refusals.add(text)
            logger.warning("%s", text)

    def _record(self, command: Command, result: Any) -> None:
        """Emit `command_applied`, record the command, and answer it with its result, perhaps later."""
        trainer = self._trainer
        if isinstance(result, GoingBack):
            command = result.resolved(command)
        plain_result = _as_plain(result)
        fields = {"command": command.command, "arguments": command.shown, "source": command.source}
        trainer.announce(CommandApplied, **fields, result=plain_result)
        record = None
        if command.source != PROGRAM and self.known.is_repeated(command.command):
            trainer.applied_commands.append(_applied(command, trainer.iter, trainer.epoch))
            record = self.recorded
        answer = _answer(command, trainer.iter, result=plain_result)
        if isinstance(result, GoingBack):  # answered when the run has gone back
            self.going_back = result._replace(answer=answer, record=record)
            trainer.stops.go_back()
        elif self._mailbox is None:
            return
        elif isinstance(result, Saving) and not result.durable:  # answered when the checkpoint is durable
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
        """Answer the commands that wait for a checkpoint: it is durable, or could not be saved.

        Args:
            path: the path of the checkpoint.
            error: the error of the save; "" if the checkpoint is durable.
        """
        answers = [answer for awaited, answer in self._saving if awaited == path]
        if not answers:
            return
        self._saving = [(awaited, answer) for awaited, answer in self._saving if awaited != path]
        for answer in answers:
            if error:
                answer = _refused(answer, f"{path} was not saved: {error}")
            if self._mailbox is not None:
                self._mailbox.post(answer)
        if not self._saving:
            self._trainer.bus.off(self._saved)


def _answer(
    command: Command, iteration: int, refusal: str = "", result: Mapping[str, Any] | None = None
) -> Answer:
    """Return the answer to a command: refused with a reason, or applied with a result."""
    return Answer(
        id=command.id,
        command=command.command,
        outcome="refused" if refusal else "applied",
        iteration=iteration,
        reason=refusal,
        result=dict(result or {}),
    )


def _common_reason(reasons: Mapping[int, str], world_size: int) -> str:
    """Return the reason of a refusal, given the reasons of the ranks that have refused, by rank."""
    rank, reason = next(iter(reasons.items()))
    if len(reasons) < world_size:
        return f"rank {rank}: {reason}; other ranks have applied it, and now differ"
    return reason if len({*reasons.values()}) == 1 else f"rank {rank}: {reason}"


def _refused(answer: Answer, reason: str) -> Answer:
    """Return an answer changed to a refusal."""
    return msgspec.structs.replace(answer, outcome="refused", reason=reason)


def _applied(command: Command, iteration: int, epoch: int) -> Applied:
    """Return the entry of an applied command in the record of commands."""
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


def _as_plain(result: Any) -> dict[str, Any]:
    """Return the return value of a command's function as a mapping of values that JSON can hold."""
    if result is None:
        return {}
    if isinstance(result, Saving):
        return {"path": str(result.path)}
    if isinstance(result, GoingBack):
        return result.result
    mapping = result if isinstance(result, Mapping) else {"result": result}
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(mapping))
    except (TypeError, ValueError):
        plain = {"result": str(result)}
    return plain
