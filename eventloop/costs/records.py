"""Define the record of a run's costs: the file `costs.json` in its directory, which reports read.

Of several ranks, each has a record of its own: rank 0 `costs.json`, rank 1 `costs.rank1.json`, and so on.

All times are in seconds. Counts are exact. Each call of a handler is clocked, except in a tight loop of
events, where times are `estimated` (see `eventloop.costs.sampling`). Phases are measured in every iteration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from eventloop.util.append_file import replacing

VERSION = 1
"""Version of the file. A reader refuses a later version."""

FILE = "costs.json"
T = TypeVar("T")

RunsOn = Literal["sync", "loop", "thread", "process"]
"""Where a handler runs: on the emitting thread, as a task of an event loop, on its own thread or in its own
process.
"""


class Times(msgspec.Struct, frozen=True):
    """The distribution of clocked durations. The percentiles are accurate within 5 %."""

    samples: int = 0
    """Number of clocked calls."""
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    p90: float = 0.0


class HandlerCost(msgspec.Struct, frozen=True, kw_only=True):
    """One synchronous handler of one event."""

    name: str
    event: str
    priority: int
    filter: str = ""
    calls: int
    seconds: float
    """Time of all calls."""
    estimated: bool = False
    """Whether `seconds` contains estimates, because not all calls were clocked."""
    share: float
    """Share of the wall time of all iterations, 0..1; 0.0 for events outside iterations."""
    in_iteration: bool = True
    """Whether its event belongs to a training iteration, so that the phases include its time."""
    includes: list[str] = []
    """Phases that it runs, such as "backward". Its time includes theirs."""
    times: Times
    """Times of single calls."""
    budget: float | None = None
    """Seconds that its p99 should not exceed."""
    over_budget: bool = False
    """Whether p99 exceeded the budget, which `slow_handler` reported."""
    built_in: bool = False
    """Whether it is part of eventloop, such as a default hook."""
    trend: list[float] = []
    """Its seconds in each `HANDLER_POINT` points of the run's trend; empty outside of iterations, and if some
    calls were not clocked.
    """


class SubscriberCost(msgspec.Struct, frozen=True, kw_only=True):
    """One background subscriber. `delivered + dropped + failed + queued` is the number of events for it."""

    name: str
    event: str
    """Name of the event, several names joined by ", ", or "*"."""
    runs_on: str
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak_queued: int
    spilled: int
    calls: int
    """Number of deliveries; a batch counts as one."""
    seconds: float
    """Time of all deliveries."""
    wait: Times
    """Sampled times from the emit of an event to its delivery, or to its sending to a process."""
    busy: Times
    """Times of single deliveries."""
    error: str = ""
    budget: float | None = None
    """Seconds that the p99 of its deliveries should not exceed."""
    over_budget: bool = False
    """Whether p99 exceeded the budget, which `slow_handler` reported."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of some iterations, summed. They add up to `wall`."""

    iterations: int = 0
    data: float = 0.0
    """Waiting for the loader, and moving the batch to the device."""
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    """zero_grad, clipping and step."""
    hooks: float = 0.0
    """All other handlers of before_train_iter, after_train_iter and the events between."""
    unaccounted: float = 0.0
    """The loop itself, and interruptions."""

    @property
    def wall(self) -> float:
        """Wall time of the iterations, without evaluations."""
        return self.data + self.forward + self.backward + self.optimizer + self.hooks + self.unaccounted


PHASES = ("data", "forward", "backward", "optimizer", "hooks", "unaccounted")
"""Names of the phases, in the order of an iteration."""


IN_ITERATION = frozenset(
    {
        "before_train_iter", "after_train_iter", "after_backward", "before_optimizer_step",
        "after_optimizer_step", "optimizer_step_skipped",
    }
)  # fmt: skip
"""Events whose handlers the phases include."""


HANDLER_POINT = 4
"""Points of the run's trend for each point of a handler's, so that the file stays small."""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of the iterations from `first_iter` (from 0) up to the next point."""

    first_iter: int
    phases: Phases


class DeviceRead(msgspec.Struct, frozen=True):
    """The waits for the device in which one function read metrics on the training thread, in iterations."""

    name: str
    """The function that called `latest` or `history`, named as a handler is."""
    line: str
    """Its file and line, such as "train.py:24"."""
    calls: int = 0
    """Number of waits, however many values each read."""
    seconds: float = 0.0


class DeviceMemory(msgspec.Struct, frozen=True):
    """The peak memory of PyTorch's allocator on one device, in bytes."""

    name: str
    """The device, such as "cuda:0"."""
    allocated: int
    """Memory in tensors."""
    reserved: int
    """Memory that the allocator held, in tensors or free."""


class Memory(msgspec.Struct, frozen=True):
    """The peak memory of the process so far, in bytes."""

    host: int | None = None
    """Physical memory, without other processes such as loader workers; None where it is not known."""
    devices: list[DeviceMemory] = []
    """The CUDA devices that the process used."""


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a run. After a resume `phases` covers only this process."""

    version: int = VERSION
    seconds: float = 0.0
    """Time of the whole run so far, with evaluations and checkpoints."""
    evaluation: float = 0.0
    """Time of validations and tests."""
    outcome: str = ""
    """How the run ended: "completed", the reason of a stop, or an error; "" if it runs or was killed."""
    rank: int = 0
    world_size: int = 1
    first_iter: int = 0
    phases: Phases = Phases()
    device: Phases | None = None
    """Sampled times on the device: only forward, backward and optimizer."""
    iteration: Times = Times()
    """Times of single iterations, without evaluations."""
    histogram: list[tuple[float, int]] = []
    """Their histogram: the lower edge of each bin that has iterations, in seconds, and their number.

    A bin's upper edge is 1.05 times its lower edge.
    """
    num_workers: int | None = None
    """Worker processes of the train loader; None if it is not a `DataLoader`."""
    trend: list[TrendPoint] = []
    """At most 512 points of equally many iterations; the last point may have fewer."""
    handlers: list[HandlerCost] = []
    subscribers: list[SubscriberCost] = []
    reads: list[DeviceRead] = []
    """Waits for the device to read metrics, the longest first. Other reads, such as `item`, are not seen."""
    memory: Memory = Memory()
    complete: bool = False
    """Whether the run has ended, after which this record is final; else it runs or was killed."""


def costs_path(directory: Path, rank: int = 0) -> Path:
    """Return the path of a rank's record in a run directory."""
    return directory / (f"costs.rank{rank}.json" if rank else FILE)


def write_costs(directory: Path, costs: RunCosts) -> None:
    """Replace the record of its rank in a run directory. A reader finds the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    path = costs_path(directory, costs.rank)
    with replacing(path, durable=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


def read_costs(directory: Path, rank: int = 0) -> RunCosts:
    """Read the record of a rank in a run directory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, not a cost record, or of a later version.
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
    return costs


class _Version(msgspec.Struct):
    version: int


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not a cost record: {error}") from error


def _impossible_count(value: Any, name: str = "") -> str:
    """Return the name and value of the first int that is negative or beyond 63 bits; "" if there is none."""
    if isinstance(value, dict):
        found = (_impossible_count(item, key) for key, item in value.items())
    elif isinstance(value, list | tuple):
        found = (_impossible_count(item, name) for item in value)
    else:
        wrong = isinstance(value, int) and not 0 <= value < 1 << 63
        return f"{name} {value}" if wrong else ""
    return next(filter(None, found), "")
