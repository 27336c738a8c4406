"""Advise on the costs of a run: which part takes the time, why, and what to do about it.

`trainer.summary()`, `eventloop report` and its page begin with these lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from eventloop.costs.records import (
    IN_ITERATION,
    WAITING,
    Cause,
    DeviceRead,
    HandlerCost,
    Place,
    RunCosts,
)
from eventloop.costs.shares import own_seconds
from eventloop.costs.trend import trend, usual
from eventloop.reporting.waits import (
    PLACES,
    longest_wait,
    run_seconds,
    seconds_waited,
    wait_text,
    waits_by_cause,
)
from eventloop.util.formatting import duration, share

MOST = 3
"""The largest number of lines of advice for one run."""
LOADER_SHARE = 0.3
"""The share of a median iteration from which the wait for data gets a line of advice."""
TRANSFER_SECONDS = 2e-3
"""The wait for a batch, in seconds, from which the advice suggests worker processes.

They shorten only a wait that is clearly longer than the transfer of a batch from a worker. The transfer took
1.4 ms for 32 rows of 64 floats, with a `DataLoader` over a `TensorDataset` and 1 or 2 workers on two CPUs.
"""
HANDLER_SHARE = 0.1
"""The share of the time of all iterations from which one handler gets a line of advice."""
READ_SHARE = 0.1
"""The share of all iterations' time from which waits to read metrics get a line of advice."""
TAIL = 4
"""The ratio of the p99 to the median iteration above which slow iterations get a line of advice."""
TAIL_SHARE = 0.02
"""The share of all iterations' time that slow iterations must add to get a line of advice."""
TAIL_SAMPLES = 200
"""The fewest iterations whose 99th percentile is trusted."""
WARM_UP_SHARE = 0.1
WARM_UP_SECONDS = 1.0
"""The share of all iterations' time, and the seconds, that slow first iterations must add to get a line."""
LEAST_POINTS = 10
"""The fewest points of the trend whose median counts as the usual iteration."""


WAIT_SHARE = 0.02
"""The share of a run from which the waits of one cause get a line of advice."""
CHECKPOINT_CURES: dict[Place, str] = {
    "iterations": 'save less often (interval=), leave saves out while the disk is busy (when_busy="skip")',
    "evaluations": "validate less often (val_interval=), or keep the best of fewer metrics (save_best=)",
    "end": "the run ends when its last saves are on the disk: keep fewer of them due there (save_last=False)",
}
CHECKPOINT_CURES["between"] = CHECKPOINT_CURES["iterations"]
LESS_STATE = "save less state (save_optimizer=False, if no run resumes from it), or use a faster disk"
BACKGROUND_CURES: dict[Place, str] = {
    "end": 'send it fewer events (every=), let it write many at once (batch=True), or use offload="process"',
}
NO_BLOCK = (
    'use overflow="spill" in place of "block", call bus.flush() less often, let it write many events at once '
    '(batch=True), or use offload="process"'
)
EVEN_RANKS = (
    "give all ranks equal shares of the data and of the work between iterations, such as saves and logs"
)


class Advice(NamedTuple):
    """A line of advice, and the seconds of the run that its cause takes, by which lines are sorted."""

    seconds: float
    text: str


def advice(costs: RunCosts, ranks: Sequence[RunCosts] | None = None) -> list[str]:
    """Return at most three lines of advice, the costliest first.

    A line gives a figure, its cause and a remedy. The list is empty for a run without iterations, and for a
    run in which no part is worth a line.

    Args:
        costs: the costs of the run, on one rank.
        ranks: the costs of all known ranks, among which the rank that the others wait for is looked for; None
            means only `costs`, and [] that another line names that rank.
    """
    if not costs.phases.iterations:
        return []
    dominant, read = _dominant(costs), _longest_read(costs)
    found = [_behind(costs), slow_loader(costs), _first(costs), _tail(costs, dominant), *_waits(costs)]
    if read is not None:
        found.append(_waiting(read, costs))
    if dominant is not None and not _explains(read, dominant, costs):
        found.append(_handler(dominant, costs))
    if records := ([costs] if ranks is None else ranks):
        found.append(_rank_waits(records))
    known = sorted((each for each in found if each is not None), key=lambda each: -each.seconds)
    return [each.text for each in known[:MOST]]


def data_share(costs: RunCosts) -> float:
    """Return the share of a median iteration that waits for data, 0..1.

    It is 0.0 with fewer than `LEAST_POINTS` points in the trend.
    """
    return usual(costs, "data") / usual(costs, "wall") if len(costs.trend) >= LEAST_POINTS else 0.0


def slow_loader(costs: RunCosts) -> Advice | None:
    """Return the advice on the train loader if the training waits for it, else None."""
    if (waits := data_share(costs)) < LOADER_SHARE:
        return None
    whole = duration(usual(costs, "wall"))
    part = f"{share(waits, 1.0)} of the median iteration, {whole},"
    what = f"the loader is the bottleneck: {part} waits for data"
    workers = costs.num_workers
    if usual(costs, "data") < TRANSFER_SECONDS:
        todo = (
            "use larger batches, or a loader that indexes tensors; the transfer of a batch from a worker "
            "process takes 1 to 2 ms"
        )
    elif workers is None:
        todo = "load ahead, as a DataLoader with num_workers does"
    elif workers == 0:
        todo = "num_workers=0 loads on the training thread: give the DataLoader worker processes"
    else:
        todo = f"num_workers={workers} do not keep up: use more of them, or prepare less in each sample"
    return Advice(costs.phases.data, f"{what}; {todo}")


def _dominant(costs: RunCosts) -> HandlerCost | None:
    """Return the handler that takes the most time, or None if that is below `HANDLER_SHARE`."""
    inside = [cost for cost in costs.handlers if cost.in_iteration]
    most = max(inside, key=lambda cost: own_seconds(cost, costs.phases), default=None)
    if most is None or own_seconds(most, costs.phases) < HANDLER_SHARE * costs.phases.wall:
        return None
    return most


def _explains(read: DeviceRead | None, dominant: HandlerCost, costs: RunCosts) -> bool:
    """Return whether waits for the device make up at least half of the time of the dominant handler."""
    if read is None or read.name != dominant.name:
        return False
    return read.seconds >= own_seconds(dominant, costs.phases) / 2


def _options(cost: HandlerCost) -> str:
    """Return the options that make a handler run less often, as the end of a sentence.

    The text is empty for callbacks of other engines, which have options of their own.
    """
    if cost.event not in IN_ITERATION or cost.name.endswith(")"):
        return ""
    return (
        " (every=, @on(every=...), or its interval), or, if it needs no trainer, in the background "
        '(offload="process")'
    )


def _handler(cost: HandlerCost, costs: RunCosts) -> Advice:
    seconds = own_seconds(cost, costs.phases)
    calls = f"{duration(seconds / cost.calls)} in each call"
    if cost.times.max and cost.times.p50 < seconds / cost.calls / 10:  # most calls do nothing
        busy = cost.times.p99 if cost.times.p99 > cost.times.max / 10 else cost.times.max
        calls = f"{duration(busy)} in 1 of {round(cost.calls / max(1, round(seconds / busy)))} calls"
    return Advice(
        seconds,
        f"{cost.name} takes {share(seconds, costs.phases.wall)} of the iterations, {calls}; let it work less "
        f"often{_options(cost)}",
    )


def _longest_read(costs: RunCosts) -> DeviceRead | None:
    """Return the function that waits longest for the device to read metrics, or None below `READ_SHARE`."""
    longest = max(costs.reads, key=lambda read: read.seconds, default=None)
    return None if longest is None or longest.seconds < READ_SHARE * costs.phases.wall else longest


def _waiting(read: DeviceRead, costs: RunCosts) -> Advice:
    iterations = costs.phases.iterations
    often = f"{max(1, round(read.calls / iterations)):,} times an iteration"
    if read.calls < 1.5 * iterations:
        every = max(1, round(iterations / read.calls))
        often = "in each iteration" if every == 1 else f"once in {every:,} iterations"
    return Advice(
        read.seconds,
        f"{read.name} ({read.line}) waits for the device {often} to read metrics, "
        f"{duration(read.seconds / read.calls)} each, {share(read.seconds, costs.phases.wall)} of the "
        "iterations, and no work is queued meanwhile; read less often (every=), or take the values from "
        "scalars_logged, which come without a wait",
    )


def _tail(costs: RunCosts, dominant: HandlerCost | None) -> Advice | None:
    """Return the advice on rare long iterations, unless the dominant handler or a wait explains them."""
    times = costs.iteration
    longer = times.p99 - times.p50
    lost = longer * times.samples / 100
    if times.samples < TAIL_SAMPLES or times.p99 < TAIL * times.p50 or lost < TAIL_SHARE * costs.phases.wall:
        return None
    if dominant is not None and dominant.times.max > longer / 2:
        return None
    if (
        longest_wait(costs, "iterations") > longer / 2
        and seconds_waited(costs, place="iterations") > lost / 2
    ):
        return None
    # a handler with one long call cannot be the cause of 1 slow iteration in 100
    often = [c for c in costs.handlers if c.times.max and c.seconds / c.times.max >= times.samples / 200]
    inside = [cost for cost in often if cost.in_iteration and not cost.includes]
    slowest = max(inside, key=lambda cost: cost.times.max, default=None)
    what = f"1 of 100 iterations takes {duration(times.p99)}, the median one {duration(times.p50)}"
    if slowest is not None and slowest.times.max > longer / 2:
        cause = f"{slowest.name} takes up to {duration(slowest.times.max)}; let it work less often"
    else:
        cause = "no handler takes as long so often; TraceHook(windows=[...]) records what does"
    return Advice(lost, f"{what}; {cause}")


def _first(costs: RunCosts) -> Advice | None:
    walls = trend(costs, "wall")
    if len(walls) < LEAST_POINTS:
        return None
    first = costs.trend[0].phases
    longer = first.wall - first.iterations * usual(costs, "wall")
    if longer < max(WARM_UP_SECONDS, WARM_UP_SHARE * costs.phases.wall):
        return None
    number = "first iteration" if first.iterations == 1 else f"first {first.iterations:,} iterations"
    return Advice(
        longer,
        f"the {number} took {duration(first.wall)}, {share(first.wall, costs.phases.wall)} of the time of "
        "all; compilation, a search for algorithms or the start of loader workers comes there: measure later "
        "ones",
    )


def _behind(costs: RunCosts) -> Advice | None:
    """Return the advice on the subscriber that missed the most events, or None if no events were missed.

    Missed are the dropped ones and those left in the queue at the end. In a run under way, events in the
    spill file are counted as waiting instead.
    """
    left = [s.queued if costs.complete else min(s.queued, s.spilled) for s in costs.subscribers]
    pairs = zip(costs.subscribers, left, strict=True)
    behind = [(s.dropped + queued, queued, s) for s, queued in pairs if not s.error and s.dropped + queued]
    if not behind:
        return None
    _, queued, worst = max(behind, key=lambda found: found[0])
    total = worst.delivered + worst.failed + worst.dropped + worst.queued
    counts = {"dropped": worst.dropped, "left" if costs.complete else "waiting": queued}
    text = " and ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    others = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
    return Advice(
        inf,
        f"{worst.name}{others} does not keep up: of {total:,} events {text}, each delivery takes "
        f"{duration(worst.busy.mean)}; send it fewer events (every=), let it write many at once "
        '(batch=True), or use offload="process"',
    )


# --- waits -------------------------------------------------------------------------------------------------


def _waits(costs: RunCosts) -> list[Advice | None]:
    """Return a line each on the waits for checkpoints and for the background, if these are long enough."""
    lines: list[Advice | None] = []
    for cause, seconds in waits_by_cause(costs).items():
        if cause == "ranks" or seconds < WAIT_SHARE * run_seconds(costs):
            continue
        place = max(PLACES, key=lambda each: seconds_waited(costs, cause, each))
        if cause == "checkpoint":
            cure = f"{CHECKPOINT_CURES[place]}, {LESS_STATE}"
        else:
            cure = BACKGROUND_CURES.get(place, NO_BLOCK)
        lines.append(_wait(costs, cause, f"most of it for {_longest(costs, cause)}; {cure}"))
    return lines


def _rank_waits(records: Sequence[RunCosts]) -> Advice | None:
    """Return the advice on the waits of ranks for each other; None if even the longest wait is short.

    The line has the seconds of the rank that waited longest. It also names the rank that waited least, which
    therefore came last and was waited for, unless that rank waited at least half as long.

    Args:
        records: the costs of the ranks that are known.
    """
    waited = {costs.rank: seconds_waited(costs, "ranks") for costs in records}
    longest = max(records, key=lambda costs: waited[costs.rank])
    seconds = waited[longest.rank]
    if not seconds or seconds < WAIT_SHARE * run_seconds(longest):
        return None
    on = f"rank {longest.rank} " if len(records) > 1 else ""
    last_rank = min(waited, key=lambda rank: waited[rank])
    came_last = ""
    if waited[last_rank] < seconds / 2:
        came_last = f"rank {last_rank} came last, and waited {duration(waited[last_rank])}; "
    return _wait(longest, "ranks", f"most of it at {_longest(longest, 'ranks')}; {came_last}{EVEN_RANKS}", on)


def _wait(costs: RunCosts, cause: Cause, text: str, on: str = "") -> Advice:
    what = f"{WAITING[cause]} took {on}{wait_text(costs, cause, run_seconds(costs))}"
    return Advice(seconds_waited(costs, cause), f"{what}; {text}")


def _longest(costs: RunCosts, cause: Cause) -> str:
    """Return the name of what was waited for longest, and its seconds."""
    names: dict[str, float] = {}
    for wait in costs.waits:
        if wait.cause == cause:
            names[wait.name] = names.get(wait.name, 0.0) + wait.seconds
    name = max(names, key=lambda each: names[each])
    return f"{name or 'others'} ({duration(names[name])})"
