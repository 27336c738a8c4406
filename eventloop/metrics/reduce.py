"""Reduce the logged values of all ranks, as means or maxima, in the background; `LoggerHook` uses it.

All ranks run the same script and post packets at the same iterations. An exchange reduces the packets that
all ranks have posted. First the ranks compare two numbers: the iteration that each has reached, and a hash of
the names and iterations of the values up to the earliest of these iterations. If the hashes are equal, one
`all_reduce` adds the values. Otherwise each rank logs its own, because a collective over tensors of different
lengths would crash or hang. Values wait for another rank at most `WAIT_SECONDS`, and less at the end of a
run.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import takewhile
from math import inf
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist

from eventloop.events import Event
from eventloop.metrics.packet import Packet
from eventloop.metrics.rows import Row
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

WAIT_SECONDS = 30.0
"""Seconds that values wait for other ranks; then a rank logs its own values until all ranks have answered."""
GROUP_SECONDS = 600.0
"""The timeout of a collective, in seconds; after it the ranks no longer reduce.

A process that ends during a collective in which other ranks do not take part waits as long, because gloo
cannot cancel a collective.
"""
LAST = (1 << 40) - 1
"""The iteration number of the last packet of a training, larger than any other."""
_RUN = 1 << 40


class Work(Protocol):
    """A collective in progress, such as `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Return whether the collective has ended, also by an error."""

    def wait(self) -> Any:
        """Wait for the end of the collective, and raise its error if it failed."""


class Ranks(Protocol):
    """The ranks of an exchange."""

    size: int

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> Work:
        """Start to replace each element by its sum, or its maximum, over the ranks."""


class GlooRanks:
    """All ranks, in a separate gloo group; the constructor is a collective.

    The group is used for nothing else, so its collectives never mix with those of the training. gloo runs on
    the host, so they do not wait for a device.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> Work:
        """Start to replace each element by its sum, or its maximum, over the ranks."""
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work: Work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        return work


class Reduced:
    """A packet whose training values are reduced over the ranks; a `Deferred`, handled in the background."""

    def __init__(self, packet: Packet, mark: int, reducer: Reducer) -> None:
        self.packet, self.mark = packet, mark
        self.answered = False
        """Whether all ranks have reached this packet."""
        self._reducer = reducer
        self._rows: list[Row] | None = None

    def ready(self) -> bool:
        """Return whether the values are on the host, and reduced or no longer waiting for other ranks."""
        return self.packet.ready() and self._reducer.advance(self)

    def events(self) -> list[Event]:
        """Return the events of the packet, with the reduced values if there are any."""
        return self.packet.events_of(self.resolve())

    def resolve(self) -> list[Row]:
        """Return the rows to log, after reading them; waits for the device if necessary, never for a rank.

        The packet's own rows are not changed, because histories are per rank.
        """
        own = self.packet.resolve()
        return own if self._rows is None else self._rows

    def store(self, values: list[float], begin: int) -> int:
        """Store this packet's part of the reduced `values`, which begins at index `begin`.

        Returns:
            The index after the last value stored.
        """
        rows = []
        for row in self.packet.rows:
            if not _trains(row):
                rows.append(row)
                continue
            end = begin + len(row.name_set.names)
            own = values[begin:end] if isinstance(row.values, list) else values[begin]
            rows.append(Row(row.name_set, own, row.iteration, row.phase))  # type: ignore[arg-type]
            begin = end
        self._rows = rows
        return begin


class Reducer:
    """Reduce the packets of one trainer over the ranks.

    The background calls `advance`, and the training thread all other public methods.

    Args:
        maxima: names, and groups of names, that are reduced to their maximum; all others to their mean.
    """

    def __init__(self, maxima: Sequence[str]) -> None:
        self._maxima = frozenset(maxima)
        self._groups = tuple(f"{name}/" for name in maxima)
        self._ranks: Ranks | None = None
        self._world: Any = None
        self._rank = 0
        self._run = 0
        self._queue: deque[Reduced] = deque()  # posted packets, neither answered nor overdue
        self._exchange: Generator[None, None, None] | None = None  # the exchange in progress
        self._one_by_one = False  # whether the next exchange is of one packet
        self._began = 0.0
        self._end = inf  # `monotonic()` after which packets wait no more
        self._warned: set[str] = set()
        self._turn = threading.Lock()  # a bus that closes or is full may call `advance` on another thread

    # --- the training thread -------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Prepare to reduce if there are several ranks. The first call is a collective."""
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
                "stopped",
                "metrics are no longer reduced: an earlier run failed or lost a rank, and the "
                "ranks may be at different iterations; start a new process to reduce again",
            )

    def join(self, ranks: Ranks, rank: int) -> None:
        """Use `ranks` for the exchanges from now on, as rank number `rank`, and drop waiting packets."""
        self._ranks, self._rank = ranks, rank
        self._exchange, self._one_by_one = None, False
        self._queue.clear()

    @property
    def reduces(self) -> bool:
        """Return False if there is only one rank, or if the other ranks are gone."""
        return self._ranks is not None

    def reduce(self, packet: Packet, iteration: int) -> Packet | Reduced:
        """Wrap a packet so that its values are reduced; all ranks must call this for the same iterations.

        The packet itself is returned if there is no other rank.

        Args:
            packet: the packet.
            iteration: the iteration at which the packet is logged; `LAST` for the last packet of a training.
        """
        if self._ranks is None:
            return packet
        reduced = Reduced(packet, self._run * _RUN + iteration, self)
        self._queue.append(reduced)
        self._run += iteration == LAST
        return reduced

    def limit_wait(self, seconds: float) -> None:
        """Limit the wait of packets to `seconds` from now; called when the run has ended."""
        self._end = monotonic() + seconds

    def stop(self) -> None:
        """Stop reducing, without a collective; called when the run has failed.

        The other ranks notice when this process ends.
        """
        self._ranks = None

    @property
    def waiting(self) -> int:
        """Return the number of packets that wait for other ranks."""
        return len(self._queue)

    # --- the background ------------------------------------------------------------------------------------

    def advance(self, reduced: Reduced) -> bool:
        """Advance the exchange, and return whether `reduced` no longer waits for other ranks.

        Called only when the values of `reduced` are on the host.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return self._advance(reduced)
        except Exception as error:
            self._ranks = self._exchange = None
            self._queue.clear()
            self._warn(
                "gone",
                f"rank {self._rank} logs its own metrics from here on: the exchange with the other "
                f"ranks failed ({error_text(error)})",
            )
            return True
        finally:
            self._turn.release()

    def _advance(self, reduced: Reduced) -> bool:
        if self._ranks is None:
            self._queue.clear()
            return True
        while not reduced.answered:
            if self._exchange is None:
                self._exchange, self._began = self._make_exchange(self._ranks), monotonic()
            try:
                next(self._exchange)
            except StopIteration:
                self._exchange = None
            else:
                return self._is_overdue(reduced)
        return True

    def _make_exchange(self, ranks: Ranks) -> Generator[None, None, None]:
        """Reduce the packets that all ranks have reached; yields while a collective is in progress.

        Each rank decides only by reduced numbers, so all ranks start the same collectives in the same order.
        """
        # a copy, which is atomic: the training thread may append at the same time
        ready = [*takewhile(lambda reduced: reduced.packet.ready(), [*self._queue])]
        if self._one_by_one:
            del ready[1:]
        mark = max(reduced.mark for reduced in ready)
        while True:
            rows = [row for reduced in ready for row in reduced.packet.resolve() if _trains(row)]
            header = torch.tensor([mark, -mark, digest := self._digest(rows), -digest], device="cpu")
            yield from _arrival(ranks.all_reduce(header, maximum=True))
            most, least, largest, smallest = header.tolist()
            if most == -least:
                break
            mark = -least
            ready = [reduced for reduced in ready if reduced.mark <= mark]
        if largest != -smallest and not self._one_by_one:
            self._one_by_one = True  # again, to find the interval that differs
            return
        self._one_by_one = False
        if largest != -smallest:
            self._warn(
                "own",
                f"rank {self._rank} logs its own metrics up to iteration {mark % _RUN}: not every "
                "rank put the same names in the same iterations",
            )
        elif rows:
            values = yield from _reduce(ranks, *self._values(rows))
            begin = 0
            for reduced in ready:
                begin = reduced.store(values, begin)
        for reduced in ready:
            reduced.answered = True
        while self._queue and self._queue[0].answered:
            self._queue.popleft()

    def _digest(self, rows: list[Row]) -> int:
        """Return a hash of names, iterations and maxima of rows, by which ranks detect different rows."""
        places = [(row.name_set.names, row.iteration, row.phase.trains) for row in rows]
        text = repr((sorted(self._maxima), places)).encode()
        return int.from_bytes(blake2b(text, digest_size=7).digest())

    def _values(self, rows: list[Row]) -> tuple[list[float], list[bool]]:
        """Return all values in order, and for each one whether it is reduced to its maximum."""
        values: list[float] = []
        for row in rows:
            values += row.values if isinstance(row.values, list) else (row.values,)  # type: ignore[arg-type]
        names = (name for row in rows for name in row.name_set.names)
        return values, [name in self._maxima or name.startswith(self._groups) for name in names]

    def _is_overdue(self, reduced: Reduced) -> bool:
        """Return whether the exchange takes too long, so that `reduced` is logged with this rank's values."""
        now = monotonic()
        if now < min(self._began + WAIT_SECONDS, self._end):
            return False
        with suppress(ValueError):  # it may be gone from the queue; no later exchange must contain it
            self._queue.remove(reduced)
        self._warn(
            "late",
            f"rank {self._rank} logs its own metrics: it has waited {now - self._began:.1f} s for "
            "the other ranks, and reduces again once all have answered",
        )
        return True

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, once for each subject."""
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", text)


def _reduce(ranks: Ranks, values: list[float], maxima: list[bool]) -> Generator[None, None, list[float]]:
    """Return the means or maxima of values that all ranks have in this order; NaN if any rank has NaN."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    is_maximum = torch.tensor(maxima, device="cpu")
    # gloo's maximum may leave out a NaN, a sum does not
    total = own.masked_fill(is_maximum & ~own.isnan(), 0.0)
    largest = own[is_maximum].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    works = [ranks.all_reduce(total)]
    if len(largest):
        works.append(ranks.all_reduce(largest, maximum=True))
    yield from _arrival(*works)
    mean = total / ranks.size
    # a value equal on all ranks, such as a learning rate, stays exact: the sum of three 0.1 is not 0.3
    rounding = torch.finfo(torch.float64).eps * ranks.size
    mean = torch.where((mean - own).abs() <= rounding * own.abs(), own, mean)
    mean[is_maximum] = torch.where(total[is_maximum].isnan(), torch.nan, largest)
    return mean.tolist()


def _arrival(*works: Work) -> Generator[None, None, None]:
    while not all(work.is_completed() for work in works):
        yield
    for work in works:
        work.wait()  # it is complete; this raises its error, if it failed


def _trains(row: Row) -> bool:
    return row.phase.mode == "train"
