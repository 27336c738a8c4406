"""Merge the files that all ranks wrote of one window into a single trace, and find the slow rank.

The clocks of the ranks differ. But the ranks leave each iteration's all-reduce of the gradients together, so
the ends of their backward passes are the same moment, by which the clocks are aligned. Iterations without a
backward pass are aligned by their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from eventloop.costs.ranks import LATEST, Straggler, lasting_slow_rank, summed
from eventloop.costs.records import WAITING, Phases
from eventloop.tracing.files import TraceFile, of_rank, read_trace
from eventloop.util.formatting import duration

Json = dict[str, Any]
_TIMED = frozenset({"iteration", "phase", "event", "wait"})
"""The kinds of spans from which the phases of an iteration are computed."""
_OUTER = frozenset({"before_train_iter", "after_train_iter"})
_WITHIN_STEP = frozenset({"after_backward", "before_optimizer_step", "after_optimizer_step"})


class MergedRanks(NamedTuple):
    """A trace of one window in which each rank is a process."""

    trace: Json
    world_size: int
    slow: Straggler | None
    """The rank for which the others wait, or None."""


def merge_ranks(file: TraceFile) -> MergedRanks:
    """Merge rank 0's file of a window with those of the other ranks.

    Raises:
        OSError: a file cannot be read.
        ValueError: the run has one rank, the file of a rank is missing or damaged, or the ranks have no
            iteration in common.
    """
    traces = _read_all(file)
    iterations = [_iterations(trace) for trace in traces]
    shared = sorted(set.intersection(*(set(own) for own in iterations)))
    if not shared:
        raise ValueError(f"{file.path} and the windows of the other ranks have no iteration in common")
    shifts = clock_shifts([{i: own[i].together for i in shared} for own in iterations])
    slow = _slow_rank([[own[i].phases for i in shared] for own in iterations])
    return MergedRanks(_merge(traces, shifts, slow), len(traces), slow)


def _read_all(file: TraceFile) -> list[Json]:
    first = read_trace(file.path)
    world_size = first["otherData"].get("world_size", 1)
    if world_size < 2:
        raise ValueError(f"{file.path} is of a run with one rank: leave out --ranks")
    missing = [rank for rank in range(world_size) if not of_rank(file.path, rank).is_file()]
    if missing:
        path = of_rank(file.path, missing[0])
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"rank {missing[0]} of {world_size} has no window of iterations {file.first}..{file.last}{more}: "
            f"expected {path}; the rank was killed, wrote on another machine, or is still writing"
        )
    return [first, *(read_trace(of_rank(file.path, rank)) for rank in range(1, world_size))]


def clock_shifts(together: Sequence[dict[int, float]]) -> list[float]:
    """Return the difference of rank 0's clock and each rank's, to be added to the times of that rank.

    Args:
        together: for each rank the times, by iteration, at which it left the all-reduce that ends together on
            all ranks.
    """
    first = together[0]
    return [median(first[i] - own[i] for i in first.keys() & own.keys()) for own in together]


class Iteration(NamedTuple):
    """The times of one iteration on one rank."""

    phases: Phases
    together: float
    """The time at which the rank left the all-reduce, in microseconds of the rank's clock."""


def _iterations(trace: Json) -> dict[int, Iteration]:
    """Return the completed iterations of a rank's trace, by number."""
    spans: dict[int, list[Json]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in _TIMED and "iter" in event["args"]:
            spans.setdefault(event["args"]["iter"], []).append(event)
    return {
        number: _iteration(own)
        for number, own in spans.items()
        if any(event["cat"] == "iteration" for event in own)
    }


def _iteration(every: Sequence[Json]) -> Iteration:
    """Compute the phase times of an iteration from its spans, divided in the same way as by StepClock."""
    seconds: dict[str, float] = {}
    ends: dict[str, float] = {}
    spans = [event for event in every if event["cat"] != "wait"]
    whole = next(event for event in spans if event["cat"] == "iteration")
    waits = [event for event in every if event["cat"] == "wait" and _within(event, whole)]
    for event in spans:
        name = event["cat"] if event["cat"] == "iteration" else event["name"]
        inside = waits if event is not whole else []
        waited = sum(wait["dur"] for wait in inside if _within(wait, event))
        seconds[name] = seconds.get(name, 0.0) + (event["dur"] - waited) / 1e6
        ends[name] = event["ts"] + event["dur"]
    backward, optimizer = seconds.get("backward", 0.0), seconds.get("optimizer", 0.0)
    optimizer -= sum(seconds.get(name, 0.0) for name in _WITHIN_STEP) if optimizer else 0.0
    hooks = sum(seconds.get(name, 0.0) for name in _OUTER) - backward - optimizer
    data, forward = seconds.get("data", 0.0), seconds.get("forward", 0.0)
    each = {cause: _seconds_of(waits, name) for cause, name in WAITING.items()}
    rest = seconds["iteration"] - data - forward - backward - optimizer - hooks - sum(each.values())
    phases = Phases(
        iterations=1,
        data=data,
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        hooks=hooks,
        unaccounted=max(0.0, rest),
        **each,
    )
    return Iteration(phases, ends.get("backward", ends["iteration"]))


def _within(inner: Json, outer: Json) -> bool:
    begins: bool = outer["ts"] <= inner["ts"]
    return begins and bool(inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def _seconds_of(waits: Sequence[Json], name: str) -> float:
    seconds: float = sum(wait["dur"] for wait in waits if wait["name"] == name) / 1e6
    return seconds


def _slow_rank(ranks: Sequence[Sequence[Phases]]) -> Straggler | None:
    """Return the slow rank of the window, or None.

    A window of a trace is shorter than those in which a run looks for a slow rank, so it is divided into
    shorter ones.
    """
    windows = [list(each) for each in zip(*ranks, strict=True)]
    size = max(1, len(windows) // LATEST)
    return lasting_slow_rank([summed(windows[at : at + size]) for at in range(0, len(windows), size)])


def _merge(traces: Sequence[Json], shifts: Sequence[float], slow: Straggler | None) -> Json:
    """Merge the traces of all ranks into one, on the clock of rank 0, which begins at 0.

    The events of `traces` are changed in place. Those of type "M" are metadata, without a time.
    """
    origin = min(_begin(trace) + shift for trace, shift in zip(traces, shifts, strict=True))
    events = []
    for rank, (trace, shift) in enumerate(zip(traces, shifts, strict=True)):
        is_slow = slow is not None and rank == slow.rank
        for event in trace["traceEvents"]:
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + shift - origin, 3)
            elif event["name"] == "process_name":
                event["args"]["name"] = f"rank {rank}" + (_mark(slow) if slow and is_slow else "")
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = rank
            events.append({**event, "pid": rank})
    about = {key: value for key, value in traces[0]["otherData"].items() if key != "rank"}
    about |= {"began": about["began"] + origin / 1e6, "slow rank": slow.text if slow else "none"}
    return {**traces[0], "otherData": about, "traceEvents": events}


def _begin(trace: Json) -> float:
    return min((event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"), default=0.0)


def _mark(slow: Straggler) -> str:
    return f", slow in {slow.where}: {duration(slow.longer)} longer an iteration"
