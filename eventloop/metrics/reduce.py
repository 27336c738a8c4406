"""What the ranks of a run logged, made one on the background side: means, and maxima.

Each rank posts its packets alike, at the same iterations. Where the background loop comes to one, it takes all that
wait with it into one exchange: how long a step is does not matter to how often the ranks talk. Values wait for a rank for
half a minute at most, at the end of a run for a part of what its close may take: what is logged then is one's own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import takewhile
from math import inf
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from eventloop.events import Event
from eventloop.metrics.exchange import Kinds, Outcome, Ranks, Steps, Table, Work, exchange
from eventloop.metrics.rows import Packet, Row
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

WAIT_SECONDS = 30.0
"""How long values wait for the other ranks. Then they are told as they are, and those that come, until the others
have answered."""
GROUP_SECONDS = 600.0
"""How long a rank may stay away before the others reduce no more. A process that ends in the middle of a collective,
with the others alive and away, takes as long: gloo cannot be told to leave one."""
ROWS_LIMIT = 512
"""Rows of an exchange, at most, but for those of its first packet: some 0.5 ms of the interpreter."""
LAST = (1 << 40) - 1
"""The iteration of the last packet of a training: no rank's comes after it."""
_RUN = 1 << 40


class GlooRanks:
    """All ranks, in a group of its own, so that nothing else comes between; on the host, so that nothing waits for a
    device. Making one is a collective."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))

    def total(self, tensor: torch.Tensor) -> Work:
        """See `Ranks`."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> Work:
        """See `Ranks`."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Work]:
        """See `Ranks`."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        work: Work = dist.all_gather(gathered, tensor, group=self._group, async_op=True)
        return gathered, work

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        work: Work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        return work


class Reduced:
    """A packet whose values of the training become those of all ranks; a `Deferred` of the background loop."""

    def __init__(self, packet: Packet, mark: int, reducer: Reducer) -> None:
        self.packet, self.mark = packet, mark
        self._reducer = reducer
        self._rows: list[Row] | None = None

    def ready(self) -> bool:
        """True when the values are on the host, and those of all ranks, or of this one for want of them."""
        return self.packet.ready() and self._reducer.settled(self)

    def events(self) -> list[Event]:
        """Those of the packet, with these values."""
        return self.packet.events_of(self.settled())

    def settled(self) -> list[Row]:
        """The rows, once all of them are read; waits for the device if need be, and for no rank."""
        self.packet.settled()
        return self.rows

    @property
    def rows(self) -> list[Row]:
        """What is told; the packet's own are left alone, for the histories of a rank are its own."""
        return self.packet.rows if self._rows is None else self._rows

    @property
    def answered(self) -> bool:
        """True when the values are those of all ranks."""
        return self._rows is not None

    def take(self, values: list[float], begin: int) -> int:
        """Take its own of the values of an exchange, which begin there; returns where they end."""
        self._rows = []
        for row in self.packet.rows:
            if not _trains(row):
                self._rows.append(row)
                continue
            end = begin + len(row.shape.names)
            own = values[begin:end] if isinstance(row.values, list) else values[begin]
            self._rows.append(Row(row.shape, own, row.iteration, row.phase))  # type: ignore[arg-type]
            begin = end
        return begin


class Reducer:
    """Reduces the packets of one trainer over the ranks.

    Args:
        maxima: names, and groups of names, of which the maximum is taken.
    """

    def __init__(self, maxima: Sequence[str]) -> None:
        self._kinds = Kinds(maxima)
        self._ranks: Ranks | None = None
        self._world: Any = None
        self._rank = 0
        self._run = 0
        self._queue: deque[Reduced] = deque()  # posted, and not told
        self._exchange: Steps[Outcome] | None = None
        self._taken: list[Reduced] = []  # what it is of
        self._began = 0.0
        self._end = inf  # when nobody waits any more
        self._told: set[str] = set()
        self._turn = threading.Lock()  # a bus that closes, or has no room, may ask from another thread

    # --- the training thread -------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Where there are several ranks, all of them begin here: the first time it is a collective."""
        self._end = inf
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._ranks = self._world = None
        elif not dist.is_gloo_available():
            self._warn(
                "gloo", "metrics are not reduced: this build of PyTorch has no gloo, the backend for the host"
            )
        elif self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self.join(GlooRanks(), dist.get_rank())
        elif self._ranks is None:
            self._warn(
                "stopped", "metrics are not reduced any more: a former run failed, or lost a rank, and the ranks may be at "
                "different places; a new process reduces again",
            )  # fmt: skip

    def join(self, ranks: Ranks, rank: int) -> None:
        """Reduce with these ranks from now on, as the one of that number."""
        self._ranks, self._rank = ranks, rank
        self._exchange = None
        self._queue.clear()

    @property
    def reduces(self) -> bool:
        """False where there is one rank alone, and where the others are gone."""
        return self._ranks is not None

    def reduce(self, packet: Packet, iteration: int) -> Packet | Reduced:
        """The packet to be posted now; all ranks have one for this iteration. That for `LAST` ends a training."""
        if self._ranks is None:
            return packet
        reduced = Reduced(packet, self._run * _RUN + iteration, self)
        self._queue.append(reduced)
        self._run += iteration == LAST
        return reduced

    def hurry(self, seconds: float) -> None:
        """The run has ended: wait for nobody any longer than this."""
        self._end = monotonic() + seconds

    def stop(self) -> None:
        """The run has failed: wait for nobody. The other ranks find out when this process ends."""
        self._ranks = None

    @property
    def waiting(self) -> int:
        """How many packets were posted, and not told."""
        return len(self._queue)

    # --- the background ------------------------------------------------------------------------------------

    def settled(self, reduced: Reduced) -> bool:
        """True when nothing is waited for; its values are on the host."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return self._settle(reduced)
        except Exception as error:
            self._give_up(error)
            return True
        finally:
            self._turn.release()

    def _settle(self, reduced: Reduced) -> bool:
        ranks = self._ranks
        if ranks is None:
            self._queue.clear()
            return True
        while not reduced.answered:
            if self._exchange is None:
                self._exchange = exchange(ranks, self._latest(), self._table)
                self._began = monotonic()
            try:
                next(self._exchange)
            except StopIteration as end:
                self._exchange = None
                self._answer(end.value)
                continue
            return self._overtakes(reduced)
        return True

    def _latest(self) -> int:
        """The mark of the last packet that an exchange has room for; the first is there."""
        rows, latest = 0, self._queue[0].mark
        for reduced in [*self._queue]:  # one C call: the training thread may append meanwhile
            rows += len(reduced.packet.rows)
            if rows > ROWS_LIMIT or not reduced.packet.ready():
                break
            latest = max(latest, reduced.mark)
        return latest

    def _table(self, mark: int) -> Table:
        self._taken = [*takewhile(lambda reduced: reduced.mark <= mark, [*self._queue])]
        rows = (row for reduced in self._taken for row in reduced.packet.settled() if _trains(row))
        return Table(mark, rows, self._kinds)

    def _answer(self, outcome: Outcome) -> None:
        begin = 0
        for reduced in self._taken:
            begin = reduced.take(outcome.values, begin)
        while self._queue and self._queue[0].answered:
            self._queue.popleft()
        self._taken = []
        if outcome.own:
            names = ", ".join(outcome.own[:5]) + (", …" if len(outcome.own) > 5 else "")
            self._warn(
                "own", f"rank {self._rank} logs values of {names} that are its own: not every rank put them in these "
                "iterations",
            )  # fmt: skip

    def _overtakes(self, reduced: Reduced) -> bool:
        """True when it has waited for long enough, or those before it have: it is told as it is."""
        now = monotonic()
        if now < min(self._began + WAIT_SECONDS, self._end):
            return False
        with suppress(ValueError):  # it is in the exchange under way, or not, and in no other
            self._queue.remove(reduced)
        self._warn(
            "late", f"rank {self._rank} logs metrics that are its own: it has waited {now - self._began:.1f} s for those "
            "of the other ranks, and goes on reducing them once all have answered",
        )  # fmt: skip
        return True

    def _give_up(self, error: Exception) -> None:
        self._ranks = self._exchange = None
        self._queue.clear()
        self._warn(
            "gone", f"rank {self._rank} logs metrics that are its own from here on: those of the other ranks cannot be "
            f"had ({error_text(error)})",
        )  # fmt: skip

    def _warn(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning("%s", text)


def _trains(row: Row) -> bool:
    return row.phase.mode == "train"
