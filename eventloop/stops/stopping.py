"""Stop a run at the end of an iteration, epoch or evaluation; several ranks agree on which one.

Commands to the run are applied at the same places, but never within an epoch of an evaluation.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic
from typing import Literal, Protocol

import msgspec

from eventloop.commands.messages import Command
from eventloop.costs.ranks import Straggler
from eventloop.data.trainer_parts import TrainerParts
from eventloop.events import PreemptionRequested, SlowRank, StopRequested
from eventloop.stops.rank_stop import Agreement, Request
from eventloop.stops.rank_times import TimesExchange

logger = logging.getLogger("eventloop")

ROLLBACK = "rollback"
"""The `reason` of the closing events of an epoch and a training that end because the run goes back."""
Takes = Literal["none", "program", "all"]
"""The commands that a boundary takes: none, those of the training's own program alone, or all of them."""
_ENDLESS = 2**62
UNEQUAL = (
    "rank %d has %d batches in this epoch, and the ranks have from %d to %d: with DistributedDataParallel a "
    "rank with more than %d waits for the gradients of the others forever; give all ranks as many batches, "
    "as DistributedSampler does, or an even share with drop_last=True"
)


class StoppableTrainer(TrainerParts, Protocol):
    """The parts of a trainer that stops, signals and the end of a run read and set."""

    stops: Stopping
    running: bool
    asked_to_stop: bool
    ends_program: bool
    delivering: bool
    stop_reason: str | None
    stop_signal: int | None
    failure: BaseException | None
    where_to_resume: str

    def request_stop(self, reason: str, *, signum: int | None = None) -> None: ...


class Steering(Protocol):
    """What applies the commands to a run."""

    def claim(self, command: Command) -> bool:
        """Claim a command that is about to be applied; return False if its sender has withdrawn it."""

    def apply(self, commands: Sequence[Command]) -> str | None:
        """Apply commands, the same on all ranks; return the reason to stop if one of them stops the run."""


class Stopping:
    """The request to stop of one trainer, which signal handlers and hooks make, and the loops poll.

    `trainer.stop_reason` and `trainer.stop_signal` are set at the boundary where the run stops, on all ranks.
    A rank without a request of its own names the requesting rank in the reason.
    """

    def __init__(self, trainer: StoppableTrainer) -> None:
        self._trainer = trainer
        self._request: Request | None = None
        self._agreement: Agreement | None = None
        self._times: TimesExchange | None = None
        self._warned: set[tuple[int, int]] = set()  # lengths of ranks
        self._owed = False  # whether the ranks met at a place that does not take the commands of one of them
        self.together = False
        """True during a run in which other ranks take part."""
        self.goes_back = False
        """True while a training ends because the run goes back to a checkpoint."""
        self.steering: Steering | None = None
        """What applies the commands; without it no command may be put into `commands`."""
        self.commands: deque[Command] = deque()
        """Commands for the next boundary; any thread, and a signal handler, may append one."""

    def go_back(self) -> None:
        """End the training here, because the run goes back; requests to stop wait until it has."""
        self.goes_back, self._trainer.stop_reason = True, ROLLBACK

    def went_back(self) -> None:
        """Let the training begin again, and end at once if a stop was requested meanwhile."""
        self.goes_back, self._trainer.stop_reason = False, None

    def await_ranks(self) -> None:
        """Wait until all ranks begin their first run, and log a warning if one is late; a collective."""
        if Agreement.needed() and (self._agreement is None or not self._agreement.begin()):
            self._agreement = Agreement()

    def begin_run(self) -> None:
        """Begin a run on ranks that `await_ranks` has waited for."""
        self.together = Agreement.needed()
        trainer = self._trainer
        if self.together and self._agreement is not None:
            self._times = TimesExchange(trainer.clock, trainer.rank, trainer.world_size)
            self._agreement.carry(self._times)
        trainer.stop_reason = trainer.stop_signal = None
        trainer.asked_to_stop = self._request is not None
        trainer.bus.overtime = self._request is None or self._request.signum is None
        trainer.bus.stopped_at = None

    def end_run(self) -> None:
        """End a run, and drop a request that came too late: a signal, or any request on several ranks."""
        if self.together or (self._request is not None and self._request.signum is not None):
            self._request = None
        self._owed = False
        self.together = self.goes_back = False

    def request(self, reason: str, signum: int | None = None) -> None:
        """Request a stop at the next boundary; of several requests only the first counts.

        On one rank the present iteration is then the last, and the logger logs its metrics. Several ranks may
        train one more.

        Args:
            reason: the reason why the run ends, for reports.
            signum: the number of the signal that caused the request; None without a signal.
        """
        if not reason:
            raise ValueError("trainer.stop needs a reason: it is reported as the reason the run ended")
        if signum is not None:  # The scheduler may kill the process soon.
            self._trainer.bus.overtime = False
        self._request = self._request or Request(reason, signum)
        self._trainer.asked_to_stop = True
        if (
            self._trainer.running and not self.together
        ):  # several ranks log alike, and go on for another iteration
            self._trainer.metrics.crowded = True

    def poll(self) -> bool:
        """Return whether the run ends here; on several ranks only after they have agreed."""
        if self._request is not None and not self.together and not self.goes_back:
            request, self._request = self._request, None
            if self._trainer.stop_reason is None:
                self._stop(request)
        return self._trainer.stop_reason is not None

    def boundary(self, *, trained: bool) -> bool:
        """Agree with the other ranks after an iteration that all have, and return whether the run ends.

        Args:
            trained: whether it was an iteration of the training, after which commands are applied.
        """
        return self._agree(edge=False, takes="all" if trained else "none")

    def apply_commands(self) -> None:
        """Apply the waiting commands, in a run without other ranks."""
        self._act(*self._exchange("all"))

    def exchange(self) -> bool:
        """Apply the commands, and act on the requests, of all ranks now; return whether the run ends.

        A paused run calls it again and again, at the same place on all ranks.
        """
        self._act(*self._exchange("all"))
        return self._trainer.stop_reason is not None

    def edge(self, takes: Takes = "none") -> bool:
        """Agree between epochs and evaluations, where ranks may wait, and return whether the run ends.

        Args:
            takes: the commands that are applied here. Those from outside are recorded with the iteration and
                the epoch alone, so a repetition must know the place by these.
        """
        if not self.together and self._has(takes):
            self._act(*self._exchange(takes))
        return self._agree(edge=True, takes=takes)

    def common(self, length: int | None, *, trains: bool) -> int:
        """Return the number of batches that all ranks have in a pass that begins; 0 if a rank's is unknown.

        If the numbers differ in a pass that trains, a warning is logged, once for the same numbers.

        Args:
            length: the number of batches on this rank; None if it is unknown.
            trains: whether the pass trains the model.
        """
        own = 0 if length is None else length
        if not self.together or self._agreement is None:
            return own
        least, most = self._agreement.extremes(own)
        if trains and 0 < least < most and (least, most) not in self._warned:
            self._warned.add((least, most))
            logger.warning(UNEQUAL, self._trainer.rank, own, least, most, least)
        return least

    def texts_of_ranks(self, text: str) -> dict[int, str]:
        """Return the texts that are not empty, by rank; a collective."""
        if not self.together or self._agreement is None:
            return {self._trainer.rank: text} if text else {}
        return {rank: each for rank, each in enumerate(self._agreement.gather(text)) if each}

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks at the end of a run that a signal ended.

        When the first rank has exited, torchrun and srun end all others, at once or within 30 seconds; one
        may still be saving.
        """
        if self.together and self._agreement is not None and self._trainer.stop_signal is not None:
            self._agreement.wait_for_all_ranks()

    def _agree(self, *, edge: bool, takes: Takes) -> bool:
        agreement = self._agreement
        if not self.together or agreement is None or self._trainer.stop_reason is not None:
            return self.poll()
        requested = self._request is not None or (bool(self.commands or self._owed) and self._has(takes))
        if agreement.edge(requested=requested) if edge else agreement.boundary(requested=requested):
            self._act(*self._exchange(takes))
        if self._times is not None and self._times.found is not None:
            found, self._times.found = self._times.found, None
            self._announce_slow_rank(found)
        return self._trainer.stop_reason is not None

    def _has(self, takes: Takes) -> bool:
        """Return whether this rank has commands that the boundary takes, or knows that a rank has some."""
        if self._owed and takes == "all":
            return True
        if not self.commands or takes == "none":
            return False
        return takes == "all" or not all(command.id for command in list(self.commands))

    def _exchange(self, takes: Takes) -> tuple[list[Request | None], list[Command]]:
        """Return the request of each rank, and the commands of all ranks that the boundary takes."""
        commands = self._claimed(takes)
        if not self.together or self._agreement is None:
            return [self._request], commands
        gathered = self._agreement.gather((self._request, commands, bool(self.commands)))
        self._owed = any(left for *_, left in gathered)
        return [request for request, *_ in gathered], merged([own for _, own, _ in gathered])

    def _claimed(self, takes: Takes) -> list[Command]:
        """Remove the commands that the boundary takes, and return those that nobody has withdrawn."""
        if takes == "none" or self.steering is None:
            return []
        waiting = [self.commands.popleft() for _ in range(len(self.commands))]
        stay = [command for command in waiting if command.id and takes == "program"]
        self.commands.extendleft(reversed(stay))
        return [command for command in waiting if command not in stay and self.steering.claim(command)]

    def _act(self, requests: list[Request | None], commands: list[Command]) -> None:
        """Apply commands, then stop if a rank or a command requests it; alike on all ranks."""
        reason = self.steering.apply(commands) if commands and self.steering is not None else None
        if self.goes_back and reason is not None:
            self._request = self._request or Request(reason)
        if self._trainer.stop_reason is None:
            if any(request is not None for request in requests):
                self._stop(self._of_all(requests))
            elif reason is not None:
                self._stop(Request(reason))

    def _announce_slow_rank(self, found: Straggler) -> None:
        """Emit `slow_rank` on all ranks; log a warning on rank 0, which has the log, and on the slow rank."""
        trainer = self._trainer
        if trainer.rank in (0, found.rank):
            logger.warning("%s", found.text)
        trainer.announce(
            SlowRank,
            rank=found.rank,
            phase=found.phase,
            seconds=found.seconds,
            longer=found.longer,
            advice=found.text,
        )

    def _of_all(self, requests: list[Request | None]) -> Request:
        requesting = {rank: request for rank, request in enumerate(requests) if request is not None}
        rank, first = next(iter(requesting.items()))
        signum = next((request.signum for request in requesting.values() if request.signum is not None), None)
        own = self._request
        return Request(
            own.reason if own is not None else f"rank {rank} asked to stop: {first.reason}", signum
        )

    def _stop(self, request: Request) -> None:
        trainer = self._trainer
        trainer.stop_reason, trainer.stop_signal = request
        if request.signum is not None:
            trainer.bus.overtime = False  # another rank may have received it
            trainer.bus.stopped_at = monotonic()
        trainer.asked_to_stop, self._request = True, None
        if request.signum not in (None, signal.SIGINT):
            trainer.announce(PreemptionRequested, reason=request.reason)
        trainer.announce(StopRequested, reason=request.reason)


class Pass:
    """A pass over a loader, which a request to stop may end early.

    Several ranks agree after each batch that all of them have, except after the last batch of a rank;
    creating a pass is then a collective. A rank with more batches trains the rest of them, because the end of
    the pass, such as gathering metrics, needs all ranks.

    Args:
        length: the number of batches of the pass on this rank; None if unknown. If it is unknown on a rank,
            several ranks finish the pass before they stop, unless it is endless.
        endless: whether the loop begins the loader again and again, so that only a stop ends the pass.
        trains: whether the pass trains the model, so that ranks may wait for each other's gradients.
    """

    def __init__(
        self, stopping: Stopping, length: int | None, *, endless: bool = False, trains: bool = False
    ) -> None:
        self._stopping, self._length = stopping, length
        self._common = _ENDLESS
        if stopping.together and not endless:
            self._common = stopping.common(length, trains=trains)

    def stops(self, done: int, *, trained: bool = False) -> bool:
        """Return whether a stop ends the pass after `done` batches; False after its last batch.

        Args:
            trained: whether the last batch was trained on, so that commands may be applied.
        """
        stopping = self._stopping
        if not stopping.together:
            if stopping.commands and trained:
                stopping.apply_commands()
            return stopping.poll() and done != self._length
        return done < self._common and stopping.boundary(trained=trained)

    def end(self, done: int) -> bool:
        """End a pass after `done` batches, and take part in the agreements that other ranks still wait for.

        They wait if this rank's loader gave fewer batches than its length.

        Returns:
            False if the ranks agreed to stop meanwhile, so that the pass of the others was cut short.
        """
        while self._stopping.together and done + 1 < self._common < _ENDLESS:
            done += 1
            if self._stopping.boundary(trained=False):
                return False
        return True


def merged(of_ranks: Sequence[Sequence[Command]]) -> list[Command]:
    """Return the commands of all ranks in order; a command of each rank's program is there once.

    Those of a program have no id, because each rank gives its own; a rank may give the same one twice.
    """
    commands: list[Command] = []
    for own in of_ranks:
        missing = Counter(map(_identity, own)) - Counter(map(_identity, commands))
        for command in own:
            if missing[_identity(command)] > 0:
                missing[_identity(command)] -= 1
                commands.append(command)
    return commands


def _identity(command: Command) -> bytes:
    return msgspec.json.encode(command)
