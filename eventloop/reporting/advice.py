"""Advise on the costs of a run by lines that name a costly part, the cause and a remedy.

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
"""The wait for data gets a line of advice from this share of a median iteration on."""
TRANSFER_SECONDS = 2e-3
"""The advice suggests worker processes from this wait for a batch on, in seconds.

Worker processes help only if the wait is clearly longer than the transfer of a batch from a worker. The
transfer took 1.4 ms for 32 rows of 64 floats, with a `DataLoader` over a `TensorDataset` and 1 or 2 workers
on two CPUs.
"""
HANDLER_SHARE = 0.1
"""A handler gets a line of advice from this share of the time of all iterations on."""
READ_SHARE = 0.1
"""Waits for the device to read metrics get a line of advice from this share of all iterations' time on."""
TAIL = 4
"""Slow iterations get a line of advice if the p99 of iterations is this many times the median."""
TAIL_SHARE = 0.02
"""Slow iterations get a line of advice if they add this share of all iterations' time."""
TAIL_SAMPLES = 200
"""The fewest iterations whose 99th percentile is trusted."""
WARM_UP_SHARE = 0.1
WARM_UP_SECONDS = 1.0
"""The first iterations get a line of advice if they add this share of all iterations' time, and this long."""
LEAST_POINTS = 10
"""The fewest points of the trend from which the median iteration is computed."""
WAIT_SHARE = 0.02
"""The waits of one cause get a line of advice from this share of the run on."""
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
    """Hold a line of advice, and the seconds of the run that its cause takes; lines are sorted by these."""

    seconds: float
    text: str


def advice(costs: RunCosts, ranks: Sequence[RunCosts] | None = None) -> list[str]:
    """Return at most three lines of advice, the costliest first.

    The list is empty for a run without iterations, and for a run without a costly part.

    Args:
        costs: the costs of the run, on one rank.
        ranks: the costs of all known ranks, for a line on the rank that the others wait for. None means only
            `costs`; [] leaves that line out.
    """
    if not costs.phases.iterations:
        return []
    dominant, read = _dominant_handler(costs), _longest_read(costs)
    candidates = [
        _slow_subscriber(costs),
        slow_loader(costs),
        _slow_first_iterations(costs),
        _slow_iterations(costs, dominant),
        *_waits(costs),
    ]
    if read is not None:
        candidates.append(_read_advice(read, costs))
    if dominant is not None and not _explains(read, dominant, costs):
        candidates.append(_handler_advice(dominant, costs))
    if records := ([costs] if ranks is None else ranks):
        candidates.append(_rank_waits(records))
    lines = sorted((line for line in candidates if line is not None), key=lambda line: -line.seconds)
    return [line.text for line in lines[:MOST]]


def data_share(costs: RunCosts) -> float:
    """Return the share of a median iteration, 0..1, in which the training waits for data.

    Return 0.0 if the trend has fewer than `LEAST_POINTS` points.
    """
    return usual(costs, "data") / usual(costs, "wall") if len(costs.trend) >= LEAST_POINTS else 0.0


def slow_loader(costs: RunCosts) -> Advice | None:
    """Return the advice on the train loader if the training waits for it, else None."""
    if (waiting_share := data_share(costs)) < LOADER_SHARE:
        return None
    iteration = duration(usual(costs, "wall"))
    problem = (
        f"the loader is the bottleneck: {share(waiting_share, 1.0)} of the median iteration, {iteration}, "
        "waits for data"
    )
    workers = costs.num_workers
    if usual(costs, "data") < TRANSFER_SECONDS:
        remedy = (
            "use larger batches, or a loader that indexes tensors; the transfer of a batch from a worker "
            "process takes 1 to 2 ms"
        )
    elif workers is None:
        remedy = "load ahead, as a DataLoader with num_workers does"
    elif workers == 0:
        remedy = "num_workers=0 loads on the training thread: give the DataLoader worker processes"
    else:
        remedy = f"num_workers={workers} do not keep up: use more of them, or prepare less in each sample"
    return Advice(costs.phases.data, f"{problem}; {remedy}")


def _dominant_handler(costs: RunCosts) -> HandlerCost | None:
    """Return the handler that takes the most time in iterations; None if that is below `HANDLER_SHARE`."""
    inside = [cost for cost in costs.handlers if cost.in_iteration]
    dominant = max(inside, key=lambda cost: own_seconds(cost, costs.phases), default=None)
    if dominant is None or own_seconds(dominant, costs.phases) < HANDLER_SHARE * costs.phases.wall:
        return None
    return dominant


def _explains(read: DeviceRead | None, dominant: HandlerCost, costs: RunCosts) -> bool:
    """Return whether waits to read metrics are at least half of the time of the dominant handler."""
    if read is None or read.name != dominant.name:
        return False
    return read.seconds >= own_seconds(dominant, costs.phases) / 2


def _options(cost: HandlerCost) -> str:
    """Return the options that make a handler run less often, as the end of a sentence.

    Return "" for callbacks of other engines, whose options are not known here.
    """
    if cost.event not in IN_ITERATION or cost.name.endswith(")"):  # as in "Timer.on_step_end (lightning)"
        return ""
    return (
        " (every=, @on(every=...), or its interval), or, if it needs no trainer, in the background "
        '(offload="process")'
    )


def _handler_advice(cost: HandlerCost, costs: RunCosts) -> Advice:
    """Return the advice on a handler that takes much of the iterations' time.

    If most of its calls do nothing, the line gives the time of a call that works, and how rare those are.
    """
    seconds = own_seconds(cost, costs.phases)
    per_call = seconds / cost.calls
    calls = f"{duration(per_call)} in each call"
    most_calls_do_nothing = cost.times.max and cost.times.p50 < per_call / 10
    if most_calls_do_nothing:
        # the p99 is the time of an idle call if fewer than 1 of 100 calls work
        busy_seconds = cost.times.p99 if cost.times.p99 > cost.times.max / 10 else cost.times.max
        busy_calls = max(1, round(seconds / busy_seconds))
        calls = f"{duration(busy_seconds)} in 1 of {round(cost.calls / busy_calls)} calls"
    return Advice(
        seconds,
        f"{cost.name} takes {share(seconds, costs.phases.wall)} of the iterations, {calls}; let it work less "
        f"often{_options(cost)}",
    )


def _longest_read(costs: RunCosts) -> DeviceRead | None:
    """Return the reads of metrics by the function that waits longest for them; None below `READ_SHARE`."""
    longest = max(costs.reads, key=lambda read: read.seconds, default=None)
    return None if longest is None or longest.seconds < READ_SHARE * costs.phases.wall else longest


def _read_advice(read: DeviceRead, costs: RunCosts) -> Advice:
    """Return the advice on a function that waits for the device to read metrics."""
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


def _slow_iterations(costs: RunCosts, dominant: HandlerCost | None) -> Advice | None:
    """Return the advice on rare long iterations, unless the dominant handler or a wait explains them."""
    times = costs.iteration
    excess = times.p99 - times.p50
    lost = excess * times.samples / 100  # 1 of 100 iterations takes that much longer than the median one
    is_small = times.p99 < TAIL * times.p50 or lost < TAIL_SHARE * costs.phases.wall
    if times.samples < TAIL_SAMPLES or is_small:
        return None
    if dominant is not None and dominant.times.max > excess / 2:
        return None
    has_long_wait = longest_wait(costs, "iterations") > excess / 2
    if has_long_wait and seconds_waited(costs, place="iterations") > lost / 2:
        return None
    # a cause takes its longest time in at least half of these slow iterations, so a single long call is none
    often = [
        cost
        for cost in costs.handlers
        if cost.times.max and cost.seconds / cost.times.max >= times.samples / 200
    ]
    inside = [cost for cost in often if cost.in_iteration and not cost.includes]
    slowest = max(inside, key=lambda cost: cost.times.max, default=None)
    problem = f"1 of 100 iterations takes {duration(times.p99)}, the median one {duration(times.p50)}"
    if slowest is not None and slowest.times.max > excess / 2:
        cause = f"{slowest.name} takes up to {duration(slowest.times.max)}; let it work less often"
    else:
        cause = "no handler takes as long so often; TraceHook(windows=[...]) records what does"
    return Advice(lost, f"{problem}; {cause}")


def _slow_first_iterations(costs: RunCosts) -> Advice | None:
    """Return the advice on a run whose first point of the trend is much slower than the median iteration."""
    walls = trend(costs, "wall")
    if len(walls) < LEAST_POINTS:
        return None
    first = costs.trend[0].phases
    excess = first.wall - first.iterations * usual(costs, "wall")
    if excess < max(WARM_UP_SECONDS, WARM_UP_SHARE * costs.phases.wall):
        return None
    number = "first iteration" if first.iterations == 1 else f"first {first.iterations:,} iterations"
    return Advice(
        excess,
        f"the {number} took {duration(first.wall)}, {share(first.wall, costs.phases.wall)} of the time of "
        "all; compilation, a search for algorithms or the start of loader workers comes there: measure later "
        "ones",
    )


def _slow_subscriber(costs: RunCosts) -> Advice | None:
    """Return the advice on the background subscriber that is furthest behind, or None.

    A subscriber is behind by the events that it has dropped, and by those in its queue. In a run under way
    only queued events in its spill file count, because the others may be delivered soon. A subscriber that
    has ended with an error is left out, because more speed would not help it.
    """
    behind = []  # (events that are dropped or queued, events that are queued, subscriber)
    for subscriber in costs.subscribers:
        queued = subscriber.queued if costs.complete else min(subscriber.queued, subscriber.spilled)
        if subscriber.dropped + queued and not subscriber.error:
            behind.append((subscriber.dropped + queued, queued, subscriber))
    if not behind:
        return None
    _, queued, worst = max(behind, key=lambda entry: entry[0])
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
    """Return a line on waits for checkpoints and one on waits for the background, each if long enough."""
    lines: list[Advice | None] = []
    for cause, seconds in waits_by_cause(costs).items():
        if cause == "ranks" or seconds < WAIT_SHARE * run_seconds(costs):
            continue
        longest_place = max(PLACES, key=lambda place: seconds_waited(costs, cause, place))
        if cause == "checkpoint":
            remedy = f"{CHECKPOINT_CURES[longest_place]}, {LESS_STATE}"
        else:
            remedy = BACKGROUND_CURES.get(longest_place, NO_BLOCK)
        lines.append(_wait(costs, cause, f"most of it for {_longest(costs, cause)}; {remedy}"))
    return lines


def _rank_waits(records: Sequence[RunCosts]) -> Advice | None:
    """Return the advice on the waits of ranks for each other; None if even the longest wait is short.

    The advice gives the seconds of the rank that waited longest. The rank that waited least came last: it is
    named if it waited less than half as long.

    Args:
        records: the costs of the ranks that have a record.
    """
    waited = {costs.rank: seconds_waited(costs, "ranks") for costs in records}
    longest = max(records, key=lambda costs: waited[costs.rank])
    seconds = waited[longest.rank]
    if not seconds or seconds < WAIT_SHARE * run_seconds(longest):
        return None
    on = f"rank {longest.rank} " if len(records) > 1 else ""
    last_rank = min(waited, key=lambda rank: waited[rank])
    last_text = ""
    if waited[last_rank] < seconds / 2:
        last_text = f"rank {last_rank} came last, and waited {duration(waited[last_rank])}; "
    return _wait(longest, "ranks", f"most of it at {_longest(longest, 'ranks')}; {last_text}{EVEN_RANKS}", on)


def _wait(costs: RunCosts, cause: Cause, text: str, on: str = "") -> Advice:
    """Return the advice on the waits of one cause.

    Args:
        text: the end of the line: the longest wait, and a remedy.
        on: the rank that waited, such as "rank 1 "; "" without ranks.
    """
    problem = f"{WAITING[cause]} took {on}{wait_text(costs, cause, run_seconds(costs))}"
    return Advice(seconds_waited(costs, cause), f"{problem}; {text}")


def _longest(costs: RunCosts, cause: Cause) -> str:
    """Return the name with the longest waits of a cause, with their seconds: "JSONLWriter (1.2 s)"."""
    seconds: dict[str, float] = {}
    for wait in costs.waits:
        if wait.cause == cause:
            seconds[wait.name] = seconds.get(wait.name, 0.0) + wait.seconds
    longest = max(seconds, key=lambda name: seconds[name])
    return f"{longest or 'others'} ({duration(seconds[longest])})"
