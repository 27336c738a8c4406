"""Stop a run at the end of an iteration, epoch or evaluation; several ranks agree on which one."""

from __future__ import annotations

import logging
import signal
from time import monotonic
from typing import Any, Protocol

from eventloop.bus import Bus
from eventloop.costs.ranks import Straggler
from eventloop.costs.step_clock import StepClock
from eventloop.events import Event, PreemptionRequested, SlowRank, StopRequested
from eventloop.metrics import EventStorage
from eventloop.stops.rank_stop import Agreement, Request
from eventloop.stops.rank_times import TimesExchange

logger = logging.getLogger("eventloop")

_ENDLESS = 2**62
UNEQUAL = (
    "rank %d has %d batches in this epoch, and the ranks have from %d to %d: with DistributedDataParallel a "
    "rank with more than %d waits for the gradients of the others forever; give all ranks as many batches, "
    "as DistributedSampler does, or an even share with drop_last=True"
)


class StoppableTrainer(Protocol):
    """The parts of a trainer that a Stopping reads and sets."""

    bus: Bus
    metrics: EventStorage
    clock: StepClock
    rank: int
    world_size: int
    running: bool
    asked_to_stop: bool
    stop_reason: str | None
    stop_signal: int | None

    def announce(self, event_type: type[Event], **fields: Any) -> None:
        """Emit an event with the trainer's counters."""


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
        self.together = False
        """True during a run in which other ranks take part."""

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
        self.together = False

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
        if self._request is not None and not self.together:
            request, self._request = self._request, None
            if self._trainer.stop_reason is None:
                self._stop(request)
        return self._trainer.stop_reason is not None

    def boundary(self) -> bool:
        """Agree with the other ranks after an iteration that all have, and return whether the run ends."""
        return self._agree(edge=False)

    def edge(self) -> bool:
        """Agree between epochs and evaluations, where ranks may wait, and return whether the run ends."""
        return self._agree(edge=True)

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

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks at the end of a run that a signal ended.

        When the first rank has exited, torchrun and srun end all others, at once or within 30 seconds; one
        may still be saving.
        """
        if self.together and self._agreement is not None and self._trainer.stop_signal is not None:
            self._agreement.wait_for_all_ranks()

    def _agree(self, *, edge: bool) -> bool:
        agreement = self._agreement
        if not self.together or agreement is None or self._trainer.stop_reason is not None:
            return self.poll()
        requested = self._request is not None
        if agreement.edge(requested=requested) if edge else agreement.boundary(requested=requested):
            self._stop(self._of_all(agreement.requests(self._request)))
        if self._times is not None and self._times.found is not None:
            found, self._times.found = self._times.found, None
            self._announce_slow_rank(found)
        return self._trainer.stop_reason is not None

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

    def stops(self, done: int) -> bool:
        """Return whether a stop ends the pass after `done` batches; False after its last batch."""
        if not self._stopping.together:
            return self._stopping.poll() and done != self._length
        return done < self._common and self._stopping.boundary()

    def end(self, done: int) -> bool:
        """End a pass after `done` batches, and take part in the agreements that other ranks still wait for.

        They wait if this rank's loader gave fewer batches than its length.

        Returns:
            False if the ranks agreed to stop meanwhile, so that the pass of the others was cut short.
        """
        while self._stopping.together and done + 1 < self._common < _ENDLESS:
            done += 1
            if self._stopping.boundary():
                return False
        return True
