"""Reduce the logged values of all ranks, to means or maxima, in the background; `LoggerHook` uses it.

All ranks run the same script and post packets at the same iterations. An exchange reduces the packets that
all ranks have posted. First the ranks compare the last iteration that each has posted, and a hash of the
names and iterations of the values up to the earliest of these iterations. If the hashes are equal, one
`all_reduce` adds the values. Otherwise each rank logs its own values, because a collective over tensors of
different lengths would crash or hang. Values wait for other ranks at most `WAIT_SECONDS`, and less at the end
of a run.
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
"""The most seconds that values wait for other ranks; then a rank logs its own values."""
GROUP_SECONDS = 600.0
"""The timeout of a collective in seconds; after it the ranks no longer reduce.

A process that ends during a collective may wait as long, because gloo cannot cancel a collective.
"""
LAST = (1 << 40) - 1
"""The iteration number for the last packet of a training, larger than that of any other packet."""
_RUN = 1 << 40
"""The factor of the run in the order number of a packet, which is `run * _RUN + iteration`."""


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
    """Reduce tensors over all ranks in a gloo group of its own; the constructor is a collective.

    The group is used for nothing else, so its collectives never mix with those of the training. gloo runs on
    the host, so its collectives do not wait for a device.
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
    """Wrap a packet so that its events have values that are reduced over the ranks.

    It is a `Deferred`, handled in the background.

    Args:
        packet: the packet.
        order: the packet's number in the order of all packets of the process, the same on all ranks.
        reducer: reduces the values.
    """

    def __init__(self, packet: Packet, order: int, reducer: Reducer) -> None:
        self.packet, self.order = packet, order
        self.exchanged = False
        """Whether an exchange with all ranks has included this packet."""
        self._reducer = reducer
        self._reduced_rows: list[Row] | None = None

    def ready(self) -> bool:
        """Return whether the values are on the host, and reduced or no longer waiting for other ranks."""
        return self.packet.ready() and self._reducer.advance(self)

    def events(self) -> list[Event]:
        """Return the events of the packet, with the reduced values if there are any."""
        return self.packet.events_of(self.resolve())

    def resolve(self) -> list[Row]:
        """Read the packet, and return its reduced rows, or its own rows if they are not reduced.

        It waits for the device if necessary, but not for other ranks. The packet keeps its own rows, because
        the histories of a rank have its own values.
        """
        own_rows = self.packet.resolve()
        return own_rows if self._reduced_rows is None else self._reduced_rows

    def store(self, values: list[float], begin: int) -> int:
        """Store the reduced values of this packet.

        Args:
            values: the reduced values of several packets.
            begin: the index of the first value of this packet.

        Returns:
            the index after its last value.
        """
        rows = []
        for row in self.packet.rows:
            if not _is_training(row):
                rows.append(row)
                continue
            end = begin + len(row.name_set.names)
            row_values = values[begin:end] if isinstance(row.values, list) else values[begin]
            rows.append(Row(row.name_set, row_values, row.iteration, row.phase))  # type: ignore[arg-type]
            begin = end
        self._reduced_rows = rows
        return begin


class Reducer:
    """Reduce the logged values in the packets of one trainer over the ranks.

    The background calls `advance`, and the training thread all other public methods.

    Args:
        maxima: the names whose values are reduced to their maximum, and the prefixes before "/" of such
            names. All other values are reduced to their mean.
    """

    def __init__(self, maxima: Sequence[str]) -> None:
        self._maxima = frozenset(maxima)
        self._maxima_prefixes = tuple(f"{name}/" for name in maxima)
        self._ranks: Ranks | None = None  # None if values are not reduced
        self._world: Any = None  # torch's group of all ranks at the last call of `join`
        self._rank = 0
        self._run = 0  # the number of trainings whose last packet was posted
        self._queue: deque[Reduced] = deque()  # the posted packets that wait for an exchange
        self._exchange: Generator[None, None, None] | None = None  # the exchange in progress
        self._one_by_one = False  # whether the next exchange includes only one packet
        self._exchange_began = 0.0  # the `monotonic()` of the begin of the exchange in progress
        self._deadline = inf  # the `monotonic()` after which packets no longer wait
        self._warned: set[str] = set()  # the subjects of the warnings that were logged
        # `advance` may be called on two threads: a bus that closes or is full calls it on another one
        self._advancing = threading.Lock()

    # --- the training thread -------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Prepare to reduce the packets of a run with several ranks; the first call is a collective."""
        self._deadline = inf
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
        """Begin to exchange values with other ranks, as rank number `rank`, and drop waiting packets."""
        self._ranks, self._rank = ranks, rank
        self._exchange, self._one_by_one = None, False
        self._queue.clear()

    @property
    def reduces(self) -> bool:
        """Return whether values are reduced: there are several ranks, and none of them was lost."""
        return self._ranks is not None

    def reduce(self, packet: Packet, iteration: int) -> Packet | Reduced:
        """Wrap a packet so that its values are reduced; with one rank return the packet itself.

        All ranks must call this for the same iterations.

        Args:
            packet: the packet.
            iteration: the iteration at which the packet is logged; `LAST` for the last packet of a training.
        """
        if self._ranks is None:
            return packet
        reduced = Reduced(packet, self._run * _RUN + iteration, self)
        self._queue.append(reduced)
        if iteration == LAST:
            self._run += 1
        return reduced

    def limit_wait(self, seconds: float) -> None:
        """Let packets wait at most `seconds` from now for other ranks; called when the run has ended."""
        self._deadline = monotonic() + seconds

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
        """Advance the exchange without waiting; return whether `reduced` no longer waits for other ranks.

        Args:
            reduced: a packet whose values are on the host.
        """
        if not self._advancing.acquire(blocking=False):
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
            self._advancing.release()

    def _advance(self, reduced: Reduced) -> bool:
        """Advance exchanges until one is in progress or `reduced` is exchanged; return as `advance` does."""
        if self._ranks is None:
            self._queue.clear()
            return True
        while not reduced.exchanged:
            if self._exchange is None:
                self._exchange, self._exchange_began = self._exchange_packets(self._ranks), monotonic()
            try:
                next(self._exchange)
            except StopIteration:
                self._exchange = None
            else:
                return self._is_overdue(reduced)
        return True

    def _exchange_packets(self, ranks: Ranks) -> Generator[None, None, None]:
        """Reduce the packets that all ranks have posted; yields while a collective is in progress.

        Each rank decides only by reduced numbers, so all ranks start the same collectives in the same order.
        If the ranks have put different names, the next exchanges are of one packet, to find the packet that
        differs.
        """
        # the inner list is an atomic copy, because the training thread may append at the same time
        ready = [*takewhile(lambda reduced: reduced.packet.ready(), [*self._queue])]
        if self._one_by_one:
            del ready[1:]
        last_order = max(reduced.order for reduced in ready)
        while True:  # until all ranks have the same last packet
            rows = [row for reduced in ready for row in reduced.packet.resolve() if _is_training(row)]
            orders, digests = yield from _ranges(ranks, last_order, self._digest(rows))
            (first_of_orders, last_of_orders), (least_digest, greatest_digest) = orders, digests
            if first_of_orders == last_of_orders:
                break
            last_order = first_of_orders
            ready = [reduced for reduced in ready if reduced.order <= last_order]
        same_names = least_digest == greatest_digest
        if not same_names and not self._one_by_one:
            self._one_by_one = True
            return
        self._one_by_one = False
        if not same_names:
            self._warn(
                "own",
                f"rank {self._rank} logs its own metrics up to iteration {last_order % _RUN}: not every "
                "rank put the same names in the same iterations",
            )
        elif rows:
            values = yield from _reduce(ranks, *self._values(rows))
            begin = 0
            for reduced in ready:
                begin = reduced.store(values, begin)
        for reduced in ready:
            reduced.exchanged = True
        while self._queue and self._queue[0].exchanged:
            self._queue.popleft()

    def _digest(self, rows: list[Row]) -> int:
        """Return a hash of the names and iterations in rows, and of `maxima`; ranks compare their hashes."""
        names_and_steps = [(row.name_set.names, row.iteration, row.phase.trains) for row in rows]
        text = repr((sorted(self._maxima), names_and_steps)).encode()
        return int.from_bytes(blake2b(text, digest_size=7).digest())

    def _values(self, rows: list[Row]) -> tuple[list[float], list[bool]]:
        """Return all values in order, and for each value whether it is reduced to its maximum."""
        values: list[float] = []
        for row in rows:
            values += row.values if isinstance(row.values, list) else (row.values,)  # type: ignore[arg-type]
        names = (name for row in rows for name in row.name_set.names)
        return values, [name in self._maxima or name.startswith(self._maxima_prefixes) for name in names]

    def _is_overdue(self, reduced: Reduced) -> bool:
        """Return whether the exchange takes too long; `reduced` is then logged with this rank's values."""
        now = monotonic()
        if now < min(self._exchange_began + WAIT_SECONDS, self._deadline):
            return False
        with suppress(ValueError):  # an earlier call may have removed it
            self._queue.remove(reduced)
        self._warn(
            "late",
            f"rank {self._rank} logs its own metrics: it has waited {now - self._exchange_began:.1f} s for "
            "the other ranks, and reduces again once all have answered",
        )
        return True

    def _warn(self, subject: str, text: str) -> None:
        """Log a warning, once for each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("%s", text)


def _ranges(ranks: Ranks, *numbers: int) -> Generator[None, None, list[tuple[int, int]]]:
    """Return the minimum and the maximum of each number over the ranks; yields until they are known."""
    # one `all_reduce` gives both, because the maximum of the negated numbers is the negated minimum
    signed = torch.tensor([[-number, number] for number in numbers], device="cpu")
    yield from _completion(ranks.all_reduce(signed, maximum=True))
    return [(-negated_least, greatest) for negated_least, greatest in signed.tolist()]


def _reduce(ranks: Ranks, values: list[float], maxima: list[bool]) -> Generator[None, None, list[float]]:
    """Return the means or maxima of the values over the ranks; yields while a collective is in progress.

    A result is NaN if the value of any rank is NaN.

    Args:
        ranks: the ranks.
        values: the values of this rank, in the same order on all ranks.
        maxima: for each value, whether its maximum is returned, not its mean.
    """
    own_values = torch.tensor(values, dtype=torch.float64, device="cpu")
    is_maximum = torch.tensor(maxima, device="cpu")
    # a value that is reduced to its maximum enters the sum only if it is NaN, which gloo's maximum may ignore
    total = own_values.masked_fill(is_maximum & ~own_values.isnan(), 0.0)
    largest = own_values[is_maximum].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    works = [ranks.all_reduce(total)]  # replaces the values of `total` by their sums
    if len(largest):
        works.append(ranks.all_reduce(largest, maximum=True))
    yield from _completion(*works)
    mean = total / ranks.size
    # a value that is equal on all ranks stays exact: the sum of three 0.1, divided by 3, is not 0.1
    rounding = torch.finfo(torch.float64).eps * ranks.size
    mean = torch.where((mean - own_values).abs() <= rounding * own_values.abs(), own_values, mean)
    mean[is_maximum] = torch.where(total[is_maximum].isnan(), torch.nan, largest)
    return mean.tolist()


def _completion(*works: Work) -> Generator[None, None, None]:
    """Yield until collectives are complete; then raise the error of one that has failed."""
    while not all(work.is_completed() for work in works):
        yield
    for work in works:
        work.wait()


def _is_training(row: Row) -> bool:
    return row.phase.mode == "train"
