"""Define the record of a run's costs, the file `costs.json` in the run's directory, which reports read.

With several ranks each rank writes a record: rank 0 `costs.json`, rank 1 `costs.rank1.json`, and so on.

All times are in seconds. Counts are exact. Each call of a handler is measured, except in a tight loop of
events, where some times are `estimated` (see `eventloop.costs.sampling`). Phases are measured in every
iteration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from eventloop.util.append_file import replacing

VERSION = 1
"""The version of the file's format. `read_costs` refuses a later version."""

MOST_RANKS = 1 << 20
"""The largest number of ranks in a valid file.

Reports look for the file of each rank, and a damaged file could name billions of ranks.
"""

FILE = "costs.json"
T = TypeVar("T")

RunsOn = Literal["sync", "loop", "thread", "process"]
"""Where a handler runs.

"sync" is the emitting thread, "loop" the bus's asyncio event loop in the background, "thread" a thread of the
handler's own, and "process" a worker process.
"""


class Times(msgspec.Struct, frozen=True):
    """The distribution of the durations of one kind of call. The percentiles are accurate within 5 %."""

    samples: int = 0
    """The number of measured calls."""
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    p90: float = 0.0


class HandlerCost(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one synchronous handler of one event."""

    name: str
    event: str
    priority: int
    filter: str = ""
    calls: int
    seconds: float
    """The total time of all calls."""
    estimated: bool = False
    """Whether `seconds` contains estimates, because not all calls were measured."""
    share: float
    """The share of the wall time of all iterations, 0..1; 0.0 for events outside of iterations."""
    in_iteration: bool = True
    """Whether the event belongs to a training iteration, so that `Phases` includes the handler's time."""
    includes: list[str] = []
    """The phases that the handler runs, such as "backward"; `seconds` includes their times."""
    times: Times
    """The distribution of the times of single calls."""
    budget: float | None = None
    """The limit for the p99 in seconds; None without a budget."""
    over_budget: bool = False
    """Whether the p99 exceeded the budget, which a `slow_handler` event has reported."""
    built_in: bool = False
    """Whether the handler is part of eventloop, such as a default hook."""
    trend: list[float] = []
    """The seconds of the handler in each group of `HANDLER_POINT` points of the run's trend.

    The list is empty for a handler outside of iterations, and if some calls were not measured.
    """


class SubscriberCost(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one background subscriber.

    The number of events that were emitted for it is `delivered + dropped + failed + queued`.
    """

    name: str
    event: str
    """The name of the event, several names joined by ", ", or "*" for all events."""
    runs_on: str
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak_queued: int
    spilled: int
    calls: int
    """The number of deliveries; a batch counts as one."""
    seconds: float
    """The total time of all deliveries."""
    wait: Times
    """The distribution of the times from an event's emit to its delivery, for a sample of the events.

    With a worker process, the time ends when the event is sent to the process.
    """
    busy: Times
    """The distribution of the times of single deliveries."""
    error: str = ""
    budget: float | None = None
    """The limit for the p99 of deliveries in seconds; None without a budget."""
    over_budget: bool = False
    """Whether the p99 exceeded the budget, which a `slow_handler` event has reported."""
    capacity: int | None = None
    """The largest number of events that the queue may hold; None in a file of an earlier version."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of each phase, summed over some iterations. The phases add up to `wall`."""

    iterations: int = 0
    data: float = 0.0
    """Waiting for the loader, and moving the batch to the device."""
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    """zero_grad, clipping and step."""
    hooks: float = 0.0
    """Handlers of an iteration's events, except the work that counts as backward or optimizer."""
    unaccounted: float = 0.0
    """The code of the loop itself, and interruptions by the operating system."""
    checkpoint: float = 0.0
    """Waiting for a checkpoint. The phase in which the training thread waited does not include this time."""
    background: float = 0.0
    """Waiting for the background subscribers."""
    ranks: float = 0.0
    """Waiting for other ranks, except in collectives of the model, such as those of its backward pass."""

    @property
    def wall(self) -> float:
        """The wall time of the iterations, without evaluations."""
        work = self.data + self.forward + self.backward + self.optimizer + self.hooks + self.unaccounted
        return work + self.checkpoint + self.background + self.ranks


PHASES = ("data", "forward", "backward", "optimizer", "hooks", "unaccounted")
"""The names of the phases in which an iteration works, in their order."""

Cause = Literal["checkpoint", "background", "ranks"]
"""The reason of a wait of the training thread; the phase of such waits has the same name."""
WAITS: tuple[Cause, ...] = ("checkpoint", "background", "ranks")
"""The names of the phases in which an iteration waits."""
WAITING: dict[str, str] = {
    "checkpoint": "waiting for a checkpoint",
    "background": "waiting for the background",
    "ranks": "waiting for other ranks",
}
"""The names of the waits in reports."""
Place = Literal["iterations", "evaluations", "between", "end"]
"""The part of a run in which the training thread waits.

"between" is between two epochs and before the first one, and "end" is after the last one.
"""


def phase_names(*several: Phases) -> tuple[str, ...]:
    """Return the names of all phases, except of waits that are 0 in each given record."""
    return (*PHASES, *(wait for wait in WAITS if any(getattr(phases, wait) for phases in several)))


IN_ITERATION = frozenset(
    {
        "before_train_iter",
        "after_train_iter",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        "optimizer_step_skipped",
    }
)
"""The names of the events of a training iteration. Their handlers run within the phases of the iteration."""


HANDLER_POINT = 4
"""The number of points of the run's trend for each point of a handler's trend.

Handlers have fewer points, to keep the file small.
"""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the run's trend: the phases of the iterations from `first_iter` up to the next point."""

    first_iter: int
    phases: Phases


class DeviceRead(msgspec.Struct, frozen=True):
    """The waits for the device of one function that reads metrics on the training thread in iterations."""

    name: str
    """The function that called `latest` or `history`, named like a handler."""
    line: str
    """The function's file and line, such as "train.py:24"."""
    calls: int = 0
    """The number of waits; one wait may read several values."""
    seconds: float = 0.0


class WaitCost(msgspec.Struct, frozen=True):
    """The waits of the training thread with one cause and name in one part of the run."""

    cause: Cause
    place: Place
    name: str = ""
    """The object of the wait, such as a background subscriber; "" if it has no name."""
    calls: int = 0
    """The number of waits."""
    seconds: float = 0.0
    longest: float = 0.0
    """The seconds of the longest wait."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """The peak memory of PyTorch's allocator on one device, in bytes."""

    name: str
    """The device, such as "cuda:0"."""
    allocated: int
    """The bytes in tensors."""
    reserved: int
    """The bytes that the allocator held, in tensors or free."""


class Memory(msgspec.Struct, frozen=True):
    """The peak memory of the process so far, in bytes."""

    host: int | None = None
    """The physical memory of this process alone, without loader workers, in bytes; None if it is unknown."""
    devices: list[DeviceMemory] = []
    """The CUDA devices that the process used."""


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a run. After a resume in a new process they cover only this process."""

    version: int = VERSION
    seconds: float = 0.0
    """The time of the whole run so far, with evaluations and checkpoints."""
    evaluation: float = 0.0
    """The time of validations and tests, without waits."""
    outcome: str = ""
    """How the run ended: "completed", the reason of a stop, or an error.

    It is "" while the run is under way, or if the run was killed.
    """
    rank: int = 0
    world_size: int = 1
    first_iter: int = 0
    phases: Phases = Phases()
    device: Phases | None = None
    """The times of forward, backward and optimizer on the device, for a sample of the iterations."""
    iteration: Times = Times()
    """The distribution of the times of single iterations, without evaluations."""
    histogram: list[tuple[float, int]] = []
    """The histogram of iteration times: (lower edge in seconds, number of iterations) for each bin.

    Empty bins are left out. A bin's upper edge is 1.05 times its lower edge.
    """
    num_workers: int | None = None
    """The number of the train loader's worker processes; None if it is not a `DataLoader`."""
    trend: list[TrendPoint] = []
    """The phases over the course of the run, as at most 512 points of equally many iterations.

    The last point may have fewer iterations.
    """
    handlers: list[HandlerCost] = []
    subscribers: list[SubscriberCost] = []
    reads: list[DeviceRead] = []
    """The waits for the device to read metrics, the longest first.

    Waits in other functions, such as `Tensor.item`, are not measured.
    """
    waits: list[WaitCost] = []
    """The waits for checkpoints, for the background and for other ranks, the longest first.

    Waits within iterations are contained in `phases` too.
    """
    memory: Memory = Memory()
    complete: bool = False
    """Whether the run has ended, so that the record is final; False if it is under way or was killed."""


def costs_path(directory: Path, rank: int = 0) -> Path:
    """Return the path of a rank's record in the directory of a run."""
    return directory / (f"costs.rank{rank}.json" if rank else FILE)


def write_costs(directory: Path, costs: RunCosts) -> None:
    """Write a rank's record to a run directory; a reader finds either the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    path = costs_path(directory, costs.rank)
    with replacing(path, durable=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


def read_costs(directory: Path, rank: int = 0) -> RunCosts:
    """Read a rank's record from a run directory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, not a cost record, or of a later version.
    """
    path = costs_path(directory, rank)
    data = path.read_bytes()
    version = _decoded(path, data, _Version).version
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version}, newer than this eventloop reads ({VERSION}): update "
            "torch-eventloop"
        )
    costs = _decoded(path, data, RunCosts)
    if impossible := _impossible_count(msgspec.to_builtins(costs)):
        raise ValueError(f"{path} is not a cost record: {impossible} cannot be a count")
    if not costs.rank < costs.world_size <= MOST_RANKS:
        raise ValueError(
            f"{path} is not a cost record: expected rank < world_size <= {MOST_RANKS:,}, got rank "
            f"{costs.rank} of {costs.world_size}"
        )
    return costs


class _Version(msgspec.Struct):
    """The only field of a record that is read before the version is known."""

    version: int


def _decoded(path: Path, data: bytes, record_type: type[T]) -> T:
    """Decode the bytes of a file as a record.

    Raises:
        ValueError: they are not such a record.
    """
    try:
        return msgspec.json.decode(data, type=record_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not a cost record: {error}") from error


def _impossible_count(value: Any, name: str = "") -> str:
    """Return the name and value of the first int that is negative or beyond 63 bits; "" without such an int.

    Args:
        value: a record as nested dicts and lists.
        name: the name of the field with this value.
    """
    if isinstance(value, dict):
        in_items = (_impossible_count(item, key) for key, item in value.items())
    elif isinstance(value, list | tuple):
        in_items = (_impossible_count(item, name) for item in value)
    else:
        is_impossible = isinstance(value, int) and not 0 <= value < 1 << 63
        return f"{name} {value}" if is_impossible else ""
    return next(filter(None, in_items), "")
