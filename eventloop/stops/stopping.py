"""Stop a run at the end of an iteration, an epoch or an evaluation, at the same one on all ranks.

These ends are the boundaries of a run. Commands are applied there too, except within an evaluation.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from eventloop.commands.messages import Command
from eventloop.data.trainer_parts import TrainerParts
from eventloop.events import PreemptionRequested, SlowRank, StopRequested
from eventloop.stops.rank_stop import Agreement, Request

if TYPE_CHECKING:
    from eventloop.costs.ranks import Straggler
    from eventloop.stops.rank_times import TimesExchange

logger = logging.getLogger("eventloop")

ROLLBACK = "rollback"
"""The `reason` of the closing events of an epoch and a training that a rollback ends."""
Takes = Literal["none", "program", "all"]
"""The commands that are applied at a boundary: none, those that the training's own code requests, or all."""
_ENDLESS = 2**62
"""The number of batches of an endless pass: one that no pass reaches."""
UNEQUAL = (
    "rank %d has %d batches in this epoch, and the ranks have from %d to %d: with DistributedDataParallel a "
    "rank with more than %d waits for the gradients of the others forever; give all ranks as many batches, "
    "as DistributedSampler does, or an even share with drop_last=True"
)


class StoppableTrainer(TrainerParts, Protocol):
    """The attributes of a trainer that this package reads and sets."""

    stops: Stopping
    running: bool
    asked_to_stop: bool
    ends_program: bool
    delivering: bool  # True while the end of a run waits for its background subscribers
    stop_reason: str | None
    stop_signal: int | None
    failure: BaseException | None
    where_to_resume: str

    def request_stop(self, reason: str, *, signum: int | None = None) -> None: ...


class Steering(Protocol):
    """An object that applies commands to a run; `eventloop.steering.commands.Commands` is one."""

    def claim(self, command: Command) -> bool:
        """Claim a command before it is applied; return False if its sender has withdrawn it."""

    def apply(self, commands: Sequence[Command]) -> str | None:
        """Apply the same commands on all ranks; return a reason if one of the commands stops the run."""


class Stopping:
    """Stop one trainer at a boundary after a request of a signal handler, a hook or a command.

    `trainer.stop_reason` and `trainer.stop_signal` are set at the boundary where the run stops, on all ranks.
    On a rank without a request of its own the reason names the rank that has made a request.
    """

    def __init__(self, trainer: StoppableTrainer) -> None:
        self._trainer = trainer
        self._request: Request | None = None
        self._agreement: Agreement | None = None
        self._times: TimesExchange | None = None
        self._warned: set[tuple[int, int]] = set()  # least and most batches, of past warnings
        self._commands_left = False
        """Whether any rank had commands at the last exchange that were not applied there."""
        self.together = False
        """True during a run in which other ranks take part."""
        self.goes_back = False
        """True from the start of a rollback, which ends the training, until the checkpoint is loaded."""
        self.steering: Steering | None = None
        """The object that applies commands; while it is None nobody may append to `commands`."""
        self.commands: deque[Command] = deque()
        """Commands for the next boundary; any thread, and a signal handler, may append one."""

    def go_back(self) -> None:
        """End the training here for a rollback; a stop that is requested meanwhile comes after it."""
        self.goes_back, self._trainer.stop_reason = True, ROLLBACK

    def went_back(self) -> None:
        """Let the training begin again after a rollback; it ends at once if a stop was requested."""
        self.goes_back, self._trainer.stop_reason = False, None

    def await_ranks(self) -> None:
        """Wait until all ranks begin their first run, and log a warning if a rank is late; a collective."""
        if Agreement.needed() and (self._agreement is None or not self._agreement.begin()):
            self._agreement = Agreement()

    def begin_run(self) -> None:
        """Reset the state for a run; `await_ranks` must have been called before."""
        self.together = Agreement.needed()
        trainer = self._trainer
        if self.together and self._agreement is not None:
            from eventloop.stops.rank_times import TimesExchange  # which a run on one rank does not need

            self._times = TimesExchange(trainer.clock, trainer.rank, trainer.world_size)
            self._agreement.carry(self._times)
        trainer.stop_reason = trainer.stop_signal = None
        trainer.asked_to_stop = self._request is not None
        trainer.bus.overtime = self._request is None or self._request.signum is None
        trainer.bus.stopped_at = None

    def end_run(self) -> None:
        """End a run, and drop a request to stop that came after the last boundary.

        Only a request of `trainer.stop` in a run on one rank is kept: it stops the next run.
        """
        if self.together or (self._request is not None and self._request.signum is not None):
            self._request = None
        self._commands_left = False
        self.together = self.goes_back = False

    def request(self, reason: str, signum: int | None = None) -> None:
        """Request a stop at the next boundary; if there is a request already, it stays.

        On one rank the current iteration is then the last, and the logger logs its metrics. Several ranks may
        train one more iteration.

        Args:
            reason: the reason why the run ends, for reports.
            signum: the number of the signal that caused the request; None without a signal.

        Raises:
            ValueError: the reason is empty.
        """
        if not reason:
            raise ValueError("trainer.stop needs a reason: it is reported as the reason the run ended")
        if signum is not None:  # the scheduler may kill the process soon
            self._trainer.bus.overtime = False
        self._request = self._request or Request(reason, signum)
        self._trainer.asked_to_stop = True
        # only on one rank: several ranks must log in the same iteration, and may train another one
        if self._trainer.running and not self.together:
            self._trainer.metrics.crowded = True  # so the logger logs in this iteration

    def poll(self) -> bool:
        """Stop here if this is requested, and return whether the run ends; several ranks stop in `_agree`."""
        if self._request is not None and not self.together and not self.goes_back:
            request, self._request = self._request, None
            if self._trainer.stop_reason is None:
                self._stop(request)
        return self._trainer.stop_reason is not None

    def boundary(self, *, trained: bool) -> bool:
        """Agree with the other ranks at the end of an iteration, and return whether the run ends.

        All ranks must make this call after the same iteration.

        Args:
            trained: True for a training iteration, after which commands are applied; False in an evaluation.
        """
        return self._agree(edge=False, takes="all" if trained else "none")

    def apply_commands(self) -> None:
        """Apply the queued commands, in a run without other ranks."""
        self._apply(*self._exchange("all"))

    def exchange(self) -> bool:
        """Apply the commands and requests of all ranks now, and return whether the run ends; a collective.

        A paused run calls it repeatedly.
        """
        self._apply(*self._exchange("all"))
        return self._trainer.stop_reason is not None

    def edge(self, takes: Takes = "none") -> bool:
        """Agree with the other ranks between epochs and evaluations, and return whether the run ends.

        Ranks wait for each other here.

        Args:
            takes: the commands that are applied here. The record of a command from outside the program has
                only its iteration and epoch, so "all" is for boundaries that these two numbers identify.
        """
        if not self.together and self._may_apply(takes):
            self._apply(*self._exchange(takes))
        return self._agree(edge=True, takes=takes)

    def common(self, length: int | None, *, trains: bool) -> int:
        """Return the number of batches that every rank has in the next pass; 0 if a rank's is unknown.

        If the numbers differ in a training pass, a warning is logged, once for the same numbers.

        Args:
            length: the number of batches on this rank; None if it is unknown.
            trains: whether the pass trains the model.
        """
        own_length = 0 if length is None else length
        if not self.together or self._agreement is None:
            return own_length
        least, most = self._agreement.extremes(own_length)
        if trains and 0 < least < most and (least, most) not in self._warned:
            self._warned.add((least, most))
            logger.warning(UNEQUAL, self._trainer.rank, own_length, least, most, least)
        return least

    def texts_of_ranks(self, text: str) -> dict[int, str]:
        """Return the texts of all ranks that are not empty, by the number of the rank; a collective."""
        if not self.together or self._agreement is None:
            return {self._trainer.rank: text} if text else {}
        return {rank: each for rank, each in enumerate(self._agreement.gather(text)) if each}

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks at the end of a run that a signal has ended.

        Otherwise torchrun or srun might kill a rank that still saves: they end all ranks at most 30 seconds
        after the first one has exited.
        """
        if self.together and self._agreement is not None and self._trainer.stop_signal is not None:
            self._agreement.wait_for_all_ranks()

    def _agree(self, *, edge: bool, takes: Takes) -> bool:
        """Agree with the other ranks, if there are any, and return whether the run ends.

        Args:
            edge: True if ranks wait for each other here; else a request may be seen at the next boundary.
            takes: the commands that are applied here.
        """
        agreement = self._agreement
        if not self.together or agreement is None or self._trainer.stop_reason is not None:
            return self.poll()
        has_commands = bool(self.commands or self._commands_left) and self._may_apply(takes)
        requested = self._request is not None or has_commands
        if agreement.edge(requested=requested) if edge else agreement.boundary(requested=requested):
            self._apply(*self._exchange(takes))  # all ranks get here together, as they have agreed
        # all ranks have summed up the same times, so all find the same slow rank at the same boundary
        if self._times is not None and self._times.found is not None:
            slow_rank, self._times.found = self._times.found, None
            self._announce_slow_rank(slow_rank)
        return self._trainer.stop_reason is not None

    def _may_apply(self, takes: Takes) -> bool:
        """Return whether a command may be due: one of this rank, or one left on any rank by an exchange."""
        if self._commands_left and takes == "all":
            return True  # on all ranks, because all took part in the exchange that left commands
        if not self.commands or takes == "none":
            return False
        return takes == "all" or any(_is_of_program(command) for command in list(self.commands))

    def _exchange(self, takes: Takes) -> tuple[list[Request | None], list[Command]]:
        """Return the request of each rank, and the commands of all ranks to be applied here; a collective."""
        commands = self._claimed(takes)
        if not self.together or self._agreement is None:
            return [self._request], commands
        ranks = self._agreement.gather((self._request, commands, bool(self.commands)))
        self._commands_left = any(commands_left for _, _, commands_left in ranks)
        return [request for request, _, _ in ranks], merged([commands for _, commands, _ in ranks])

    def _claimed(self, takes: Takes) -> list[Command]:
        """Remove the commands to apply here from the queue; return those that nobody has withdrawn."""
        if takes == "none" or self.steering is None:
            return []
        commands = [self.commands.popleft() for _ in range(len(self.commands))]
        if takes == "program":
            self.commands.extendleft(each for each in reversed(commands) if not _is_of_program(each))
            commands = [command for command in commands if _is_of_program(command)]
        return [command for command in commands if self.steering.claim(command)]

    def _apply(self, requests: list[Request | None], commands: list[Command]) -> None:
        """Apply commands, then stop if a rank or a command requests it.

        Args:
            requests: the requests of all ranks.
            commands: the commands of all ranks, equal on every rank.
        """
        reason = self.steering.apply(commands) if commands and self.steering is not None else None
        if self.goes_back and reason is not None:  # the stop comes after the rollback
            self._request = self._request or Request(reason)
        if self._trainer.stop_reason is None:
            if any(request is not None for request in requests):
                self._stop(self._combined(requests))
            elif reason is not None:
                self._stop(Request(reason))

    def _announce_slow_rank(self, slow_rank: Straggler) -> None:
        """Emit `slow_rank` on all ranks, and log a warning on rank 0 and on the slow rank."""
        trainer = self._trainer
        if trainer.rank in (0, slow_rank.rank):
            logger.warning("%s", slow_rank.text)
        trainer.announce(
            SlowRank,
            rank=slow_rank.rank,
            phase=slow_rank.phase,
            seconds=slow_rank.seconds,
            longer=slow_rank.longer,
            advice=slow_rank.text,
        )

    def _combined(self, requests: list[Request | None]) -> Request:
        """Return the request that stops this rank: its own reason, else another rank's, and any signal."""
        by_rank = {rank: request for rank, request in enumerate(requests) if request is not None}
        rank, first = next(iter(by_rank.items()))
        signum = next((request.signum for request in by_rank.values() if request.signum is not None), None)
        if self._request is not None:
            return Request(self._request.reason, signum)
        return Request(f"rank {rank} asked to stop: {first.reason}", signum)

    def _stop(self, request: Request) -> None:
        """Stop the run at this boundary: set the trainer's `stop_reason`, and emit `stop_requested`."""
        trainer = self._trainer
        trainer.stop_reason, trainer.stop_signal = request
        if request.signum is not None:
            trainer.bus.overtime = False  # on this rank too, if another rank has received the signal
            trainer.bus.stopped_at = monotonic()
        trainer.asked_to_stop, self._request = True, None
        if request.signum not in (None, signal.SIGINT):
            trainer.announce(PreemptionRequested, reason=request.reason)
        trainer.announce(StopRequested, reason=request.reason)


class Pass:
    """A pass over a loader, which a request to stop may end early.

    With several ranks the constructor is a collective. The ranks agree after each batch that all of them
    have, except after the last one. A rank with more batches completes its pass, because the end of the pass,
    such as gathering metrics, needs all ranks.

    Args:
        length: the number of batches of the pass on this rank; None if unknown. If it is unknown on one of
            several ranks, the ranks finish the pass before they stop, unless it is endless.
        endless: True if the loop starts the loader repeatedly, so that only a stop ends the pass.
        trains: True if the pass trains the model, so that ranks may wait for each other's gradients.
    """

    def __init__(
        self, stopping: Stopping, length: int | None, *, endless: bool = False, trains: bool = False
    ) -> None:
        self._stopping, self._length = stopping, length
        self._common = _ENDLESS  # the number of batches that all ranks have
        if stopping.together and not endless:
            self._common = stopping.common(length, trains=trains)

    def stops(self, done: int, *, trained: bool = False) -> bool:
        """Return whether a stop ends the pass after `done` batches; False after its last batch.

        Args:
            done: the number of batches done.
            trained: True in a training, where commands are applied after a batch.
        """
        stopping = self._stopping
        if not stopping.together:
            if stopping.commands and trained:
                stopping.apply_commands()
            return stopping.poll() and done != self._length
        return done < self._common and stopping.boundary(trained=trained)

    def end(self, done: int) -> bool:
        """End a pass after `done` batches; make the collectives that other ranks still wait for.

        Other ranks wait if this rank's loader has given fewer batches than its length.

        Returns:
            False if the ranks have agreed to stop in one of these collectives, within the other ranks' pass.
        """
        while self._stopping.together and done + 1 < self._common < _ENDLESS:
            done += 1
            if self._stopping.boundary(trained=False):
                return False
        return True


def merged(of_ranks: Sequence[Sequence[Command]]) -> list[Command]:
    """Return the commands of all ranks in order, without repeating equal commands of different ranks.

    If the programs of all ranks request a command, it is applied once. If the program of one rank requests it
    twice, it is applied twice.
    """
    commands: list[Command] = []
    for of_rank in of_ranks:
        additional = Counter(map(_as_bytes, of_rank)) - Counter(map(_as_bytes, commands))
        for command in of_rank:
            if additional[_as_bytes(command)] > 0:
                additional[_as_bytes(command)] -= 1
                commands.append(command)
    return commands


def _is_of_program(command: Command) -> bool:
    """Return whether the training's own program has requested a command; others have an id."""
    return not command.id


def _as_bytes(command: Command) -> bytes:
    return msgspec.json.encode(command)
