"""Reduce the logged values of all ranks, as means or maxima, in the background; `LoggerHook` uses it.

All ranks post packets at the same iterations. When the background loop comes to a packet, it takes all
waiting packets into one exchange, so fast steps do not cause more collectives. Values wait for another rank
at most `WAIT_SECONDS`, and less at the end of a run; after that each rank logs its own values.
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
from eventloop.metrics.exchange import MaximumRules, Outcome, Ranks, Steps, Table, Work, exchange
from eventloop.metrics.rows import Packet, Row
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

WAIT_SECONDS = 30.0
"""Seconds that values wait for other ranks; then a rank logs its own values, until all have answered."""
GROUP_SECONDS = 600.0
"""The timeout of a collective, in seconds; after it the ranks no longer reduce.

A process that ends during a collective, while other ranks do not take part, waits as long: gloo cannot cancel
one."""
ROWS_LIMIT = 512
"""At most so many rows are in an exchange, plus the first packet: some 0.5 ms of the interpreter."""
LAST = (1 << 40) - 1
"""The iteration of the last packet of a training, larger than any other."""
_RUN = 1 << 40


class GlooRanks:
    """All ranks, in a gloo group of their own; the constructor is a collective.

    No other collectives come between those of the group, and on the host they wait for no device.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))

    def total(self, tensor: torch.Tensor) -> Work:
        """Start to replace each element by its sum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> Work:
        """Start to replace each element by its maximum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Work]:
        """Start to gather the tensors of all ranks, which have equal lengths; return them in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        work: Work = dist.all_gather(gathered, tensor, group=self._group, async_op=True)
        return gathered, work

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        work: Work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        return work


class Reduced:
    """A packet whose training values are reduced over the ranks; a `Deferred` of the background loop."""

    def __init__(self, packet: Packet, mark: int, reducer: Reducer) -> None:
        self.packet, self.mark = packet, mark
        self._reducer = reducer
        self._rows: list[Row] | None = None

    def ready(self) -> bool:
        """Return whether the values are on the host, and reduced or no longer waiting for other ranks."""
        return self.packet.ready() and self._reducer.settled(self)

    def events(self) -> list[Event]:
        """Return the events of the packet, with the reduced values if there are any."""
        return self.packet.events_of(self.settled())

    def settled(self) -> list[Row]:
        """Return the rows once all are read; waits for the device if necessary, never for a rank."""
        self.packet.settled()
        return self.rows

    @property
    def rows(self) -> list[Row]:
        """Return the rows to log, reduced or not; the packet's own rows stay, as histories are per rank."""
        return self.packet.rows if self._rows is None else self._rows

    @property
    def answered(self) -> bool:
        """Return whether the values are reduced over all ranks."""
        return self._rows is not None

    def take(self, values: list[float], begin: int) -> int:
        """Take this packet's reduced values from `values[begin:]`, and return the index behind them."""
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

    The training thread calls `begin_run` to `waiting`; `settled` is called in the background.

    Args:
        maxima: names, and groups of names, that are reduced by their maximum; all others by their mean.
    """

    def __init__(self, maxima: Sequence[str]) -> None:
        self._rules = MaximumRules(maxima)
        self._ranks: Ranks | None = None
        self._world: Any = None
        self._rank = 0
        self._run = 0
        self._queue: deque[Reduced] = deque()  # posted, and neither reduced nor overdue
        self._exchange: Steps[Outcome] | None = None  # the one in progress
        self._taken: list[Reduced] = []  # the packets in it
        self._began = 0.0
        self._end = inf  # `monotonic()` after which packets wait no more
        self._warned: set[str] = set()
        self._turn = threading.Lock()  # a bus that closes or is full may call `settled` on another thread

    # --- the training thread -------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Prepare to reduce if there are several ranks; the first call is a collective."""
        self._end = inf
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._ranks = self._world = None
        elif not dist.is_gloo_available():
            self._warn(
                "gloo", "metrics are not reduced: this build of PyTorch lacks gloo, the backend for the host"
            )
        elif self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self.join(GlooRanks(), dist.get_rank())
        elif self._ranks is None:
            self._warn(
                "stopped", "metrics are no longer reduced: an earlier run failed or lost a rank, and the "
                "ranks may be at different iterations; start a new process to reduce again",
            )  # fmt: skip

    def join(self, ranks: Ranks, rank: int) -> None:
        """Reduce with `ranks` from now on, as rank number `rank`, and forget waiting packets."""
        self._ranks, self._rank = ranks, rank
        self._exchange = None
        self._queue.clear()

    @property
    def reduces(self) -> bool:
        """Return False if there is only one rank, or if the other ranks are gone."""
        return self._ranks is not None

    def reduce(self, packet: Packet, iteration: int) -> Packet | Reduced:
        """Wrap a packet so that its values are reduced; all ranks must call this for the same iterations.

        A packet for the iteration `LAST` ends a training. If there is nothing to reduce with, the packet is
        returned.
        """
        if self._ranks is None:
            return packet
        reduced = Reduced(packet, self._run * _RUN + iteration, self)
        self._queue.append(reduced)
        self._run += iteration == LAST
        return reduced

    def hurry(self, seconds: float) -> None:
        """Let packets wait at most so many `seconds` from now; called when the run has ended."""
        self._end = monotonic() + seconds

    def stop(self) -> None:
        """Stop reducing, without a collective; called when the run failed.

        The other ranks notice it when this process ends.
        """
        self._ranks = None

    @property
    def waiting(self) -> int:
        """Return the number of packets that wait for other ranks."""
        return len(self._queue)

    # --- the background ------------------------------------------------------------------------------------

    def settled(self, reduced: Reduced) -> bool:
        """Advance the exchange, and return whether `reduced` waits no more; its values are on the host."""
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
            return self._is_overdue(reduced)
        return True

    def _latest(self) -> int:
        """Return the mark of the last ready packet that fits into an exchange; the first one is ready."""
        rows, latest = 0, self._queue[0].mark
        for reduced in [*self._queue]:  # an atomic copy: the training thread may append at the same time
            rows += len(reduced.packet.rows)
            if rows > ROWS_LIMIT or not reduced.packet.ready():
                break
            latest = max(latest, reduced.mark)
        return latest

    def _table(self, mark: int) -> Table:
        self._taken = [*takewhile(lambda reduced: reduced.mark <= mark, [*self._queue])]
        rows = (row for reduced in self._taken for row in reduced.packet.settled() if _trains(row))
        return Table(mark, rows, self._rules)

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
                "own", f"rank {self._rank} logs its own values of {names}: not every rank put them in the "
                "same iterations",
            )  # fmt: skip

    def _is_overdue(self, reduced: Reduced) -> bool:
        """Return whether the exchange has lasted so long that `reduced` is logged with this rank's values."""
        now = monotonic()
        if now < min(self._began + WAIT_SECONDS, self._end):
            return False
        with suppress(ValueError):  # it may be gone from the queue; no later exchange must contain it
            self._queue.remove(reduced)
        self._warn(
            "late", f"rank {self._rank} logs its own metrics: it has waited {now - self._began:.1f} s for "
            "the other ranks, and reduces again once all have answered",
        )  # fmt: skip
        return True

    def _give_up(self, error: Exception) -> None:
        self._ranks = self._exchange = None
        self._queue.clear()
        self._warn(
            "gone", f"rank {self._rank} logs its own metrics from here on: the exchange with the other ranks "
            f"failed ({error_text(error)})",
        )  # fmt: skip

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, once for each subject."""
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", text)


def _trains(row: Row) -> bool:
    return row.phase.mode == "train"
