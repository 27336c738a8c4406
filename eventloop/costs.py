"""What a run cost, as a record: the file `costs.json` in its directory, and what reports are made of.

Seconds everywhere. Times of handlers are estimated from samples (see `meter`), counts are exact, and the phases of
the iterations are measured in every one of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

VERSION = 1
"""Of the file. A reader refuses a greater one."""

FILE = "costs.json"


class Times(msgspec.Struct, frozen=True):
    """How sampled durations are distributed; p50 and p99 within 5 % of the samples' own."""

    samples: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class HandlerCost(msgspec.Struct, frozen=True, kw_only=True):
    """One synchronous handler of one event."""

    name: str
    event: str
    priority: int
    filter: str = ""
    calls: int
    seconds: float
    """Of all calls together, estimated."""
    share: float
    """Of the wall time of all iterations, 0..1."""
    times: Times
    """Of single calls."""
    budget: float | None = None
    """What its p99 should stay under."""


class SubscriberCost(msgspec.Struct, frozen=True, kw_only=True):
    """One background subscriber; `delivered + dropped + failed + queued` is all it was to get, in events."""

    name: str
    event: str
    """The event's name, several joined by ", ", or "*"."""
    runs_on: str
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak_queued: int
    spilled: int
    calls: int
    """Deliveries; a batch is one."""
    seconds: float
    """Spent in all of them."""
    wait: Times
    """From the moment an event is in the subscriber's queue to the begin of its delivery, sampled."""
    busy: Times
    """Of single deliveries."""
    error: str = ""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of some iterations went, summed over them; the parts add up to `wall`."""

    iterations: int = 0
    data: float = 0.0
    """The wait for the loader, and the move to the device."""
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    """zero_grad, clipping and step."""
    hooks: float = 0.0
    """All other handlers of before_train_iter, after_train_iter and the events between."""
    unaccounted: float = 0.0
    """The loop itself, and whatever interrupted it."""

    @property
    def wall(self) -> float:
        """All of it, evaluations left out."""
        return self.data + self.forward + self.backward + self.optimizer + self.hooks + self.unaccounted


PHASES = ("data", "forward", "backward", "optimizer", "hooks", "unaccounted")
"""The parts, in the order of an iteration."""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of the iterations from `first_iter` (0-based) on, up to the next point."""

    first_iter: int
    phases: Phases


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `phases` is this process's part of a run that was resumed."""

    version: int = VERSION
    first_iter: int = 0
    phases: Phases = Phases()
    device: Phases | None = None
    """Times on the device of the iterations that were sampled there; only forward, backward and optimizer."""
    trend: list[TrendPoint] = []
    """At most 512 points, each of equally many iterations but the last."""
    handlers: list[HandlerCost] = []
    subscribers: list[SubscriberCost] = []
    complete: bool = False
    """The run has ended and written this last; else it is under way, or was killed."""


def write_costs(directory: Path, costs: RunCosts) -> None:
    """Replace the file of a run directory, so that a reader finds the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / FILE
    partial = path.with_name(f".{FILE}.{os.getpid()}")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")
    os.replace(partial, path)


def read_costs(directory: Path) -> RunCosts:
    """Read the file of a run directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is torn, or of a newer version.
    """
    path = directory / FILE
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version > VERSION:
            raise ValueError(
                f"{path} has version {version}, newer than this eventloop reads ({VERSION}): update torch-eventloop"
            )
        return msgspec.json.decode(data, type=RunCosts)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is torn or no cost record: {error}") from error


class _Version(msgspec.Struct):
    version: int
