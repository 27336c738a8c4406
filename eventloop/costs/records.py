"""What a run cost, as a record: the file `costs.json` in its directory, and what reports are made of.

Seconds everywhere. Times of handlers are estimated from samples (see `meter`), counts are exact, and the phases of
the iterations are measured in every one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from eventloop.util.append_file import replacing

VERSION = 1
"""Of the file. A reader refuses a greater one."""

FILE = "costs.json"
T = TypeVar("T")

RunsOn = Literal["sync", "loop", "thread", "process"]
"""Where it runs: on the emitting thread, as a task of the background loop or of the caller's, on a thread or in a process of
its own."""


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
    """Of the wall time of all iterations, 0..1; 0.0 where the event is none of an iteration's."""
    in_iteration: bool = True
    """Its event is one of a training iteration, so that its time is in the phases."""
    includes: list[str] = []
    """The phases that it runs, such as "backward": their time is in its own."""
    times: Times
    """Of single calls. p50 and p99 leave the first one out, which pays for set-up; max is the longest sampled."""
    budget: float | None = None
    """What its p99 should stay under."""
    over_budget: bool = False
    """It did not, and that was told (`slow_handler`)."""


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
    """From the emit of an event to the begin of its delivery, or until it is sent to a process; sampled."""
    busy: Times
    """Of single deliveries."""
    error: str = ""
    budget: float | None = None
    """What the p99 of its deliveries should stay under."""
    over_budget: bool = False
    """It did not, and that was told (`slow_handler`)."""


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


IN_ITERATION = frozenset(
    {
        "before_train_iter", "after_train_iter", "after_backward", "before_optimizer_step", "after_optimizer_step",
        "optimizer_step_skipped",
    }
)  # fmt: skip
"""Events whose handlers' time is in the phases."""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of the iterations from `first_iter` (0-based) on, up to the next point."""

    first_iter: int
    phases: Phases


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `phases` is this process's part of a run that was resumed."""

    version: int = VERSION
    seconds: float = 0.0
    """The whole run so far: its iterations, evaluations, checkpoints and all."""
    evaluation: float = 0.0
    """Of it, validation and test."""
    outcome: str = ""
    """How the run ended: "completed", why it was stopped, or its error; "" while it is under way, or where it was killed."""
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
    with replacing(path, durable=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


def read_costs(directory: Path) -> RunCosts:
    """Read the file of a run directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is torn, no cost record, or of a newer version.
    """
    path = directory / FILE
    data = path.read_bytes()
    version = _decoded(path, data, _Version).version
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version}, newer than this eventloop reads ({VERSION}): update torch-eventloop"
        )
    costs = _decoded(path, data, RunCosts)
    if impossible := _impossible_count(msgspec.to_builtins(costs)):
        raise ValueError(f"{path} is no cost record: {impossible} cannot be a count")
    return costs


class _Version(msgspec.Struct):
    version: int


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is torn or no cost record: {error}") from error


def _impossible_count(value: Any, name: str = "") -> str:
    """The first integer that is negative or beyond 63 bits, with its name; "" where there is none."""
    if isinstance(value, dict):
        found = (_impossible_count(item, key) for key, item in value.items())
    elif isinstance(value, list):
        found = (_impossible_count(item, name) for item in value)
    else:
        wrong = isinstance(value, int) and not 0 <= value < 1 << 63
        return f"{name} {value}" if wrong else ""
    return next(filter(None, found), "")
