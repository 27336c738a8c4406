"""Merge the trace files of all ranks of one window into a single trace, and find the slow rank.

The clocks of the ranks differ. But the all-reduce of the gradients, and so the backward pass of an iteration,
ends at the same time on all ranks, and the clocks are aligned by these ends. Iterations without a backward
pass are aligned by their own ends.
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
"""The JSON object of a trace or of one of its events."""
_TIMED = frozenset({"iteration", "phase", "event", "wait"})
"""The kinds of spans from which the phases of an iteration are computed."""
_OUTER = frozenset({"before_train_iter", "after_train_iter"})
"""The events whose handlers run the backward pass and the optimizer's step, besides other hooks."""
_WITHIN_STEP = frozenset({"after_backward", "before_optimizer_step", "after_optimizer_step"})
"""The events whose handlers run within the optimizer's phase."""


class MergedRanks(NamedTuple):
    """The merged trace of one window, in which each rank is a process."""

    trace: Json
    world_size: int
    slow: Straggler | None
    """The rank for which the other ranks wait, or None."""


def merge_ranks(file: TraceFile) -> MergedRanks:
    """Merge the trace files of all ranks of a window, given the file of rank 0.

    Raises:
        OSError: a file cannot be read.
        ValueError: the run has one rank, the file of a rank is missing or damaged, or the ranks have no
            iteration in common.
    """
    traces = _read_all(file)
    iterations_by_rank = [_iterations(trace) for trace in traces]
    common = sorted(set.intersection(*map(set, iterations_by_rank)))  # the iterations that all ranks have
    if not common:
        raise ValueError(f"{file.path} and the windows of the other ranks have no iteration in common")
    backward_ends = [{i: iterations[i].backward_end for i in common} for iterations in iterations_by_rank]
    slow = _slow_rank([[iterations[i].phases for i in common] for iterations in iterations_by_rank])
    return MergedRanks(_merge(traces, clock_shifts(backward_ends), slow), len(traces), slow)


def _read_all(file: TraceFile) -> list[Json]:
    """Return the traces of all ranks, given rank 0's file."""
    first_trace = read_trace(file.path)
    world_size = first_trace["otherData"].get("world_size", 1)
    if world_size < 2:
        raise ValueError(f"{file.path} is of a run with one rank: leave out --ranks")
    missing_ranks = [rank for rank in range(world_size) if not of_rank(file.path, rank).is_file()]
    if missing_ranks:
        path = of_rank(file.path, missing_ranks[0])
        more = f", and {len(missing_ranks) - 1} more" if len(missing_ranks) > 1 else ""
        raise ValueError(
            f"rank {missing_ranks[0]} of {world_size} has no window of iterations "
            f"{file.first}..{file.last}{more}: "
            f"expected {path}; the rank was killed, wrote on another machine, or is still writing"
        )
    return [first_trace, *(read_trace(of_rank(file.path, rank)) for rank in range(1, world_size))]


def clock_shifts(ends: Sequence[dict[int, float]]) -> list[float]:
    """Return for each rank the shift to add to its times to convert them to the clock of rank 0.

    Args:
        ends: for each rank, by iteration, when the all-reduce ended by the clock of the rank. All ranks leave
            an all-reduce at the same moment.

    Returns:
        the shifts, in the unit of the times.
    """
    first_ends = ends[0]
    return [
        median(first_ends[i] - own_ends[i] for i in first_ends.keys() & own_ends.keys()) for own_ends in ends
    ]


class Iteration(NamedTuple):
    """The times of one iteration on one rank."""

    phases: Phases
    backward_end: float
    """The end of the backward pass, or of the iteration without one, in microseconds of the rank's clock."""


def _iterations(trace: Json) -> dict[int, Iteration]:
    """Return the completed iterations of a rank's trace, by number."""
    spans_by_number: dict[int, list[Json]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in _TIMED and "iter" in event["args"]:
            spans_by_number.setdefault(event["args"]["iter"], []).append(event)
    iterations = {}
    for number, spans in spans_by_number.items():
        if any(span["cat"] == "iteration" for span in spans):
            iterations[number] = _iteration(spans)
    return iterations


def _iteration(spans_and_waits: Sequence[Json]) -> Iteration:
    """Compute the phase times of an iteration from its spans, in the same way as StepClock.

    A wait of the training thread counts as a wait, and not as part of the phase in which it happened. The
    handlers of `after_train_iter` run the backward pass and the optimizer's step, whose times are therefore
    subtracted from those of the hooks.
    """
    spans = [event for event in spans_and_waits if event["cat"] != "wait"]
    iteration_span = next(span for span in spans if span["cat"] == "iteration")
    waits = [event for event in spans_and_waits if event["cat"] == "wait" and _within(event, iteration_span)]
    seconds: dict[str, float] = {}
    ends: dict[str, float] = {}
    for span in spans:
        name = "iteration" if span["cat"] == "iteration" else span["name"]
        inner_waits = [] if span is iteration_span else [wait for wait in waits if _within(wait, span)]
        waited = sum(wait["dur"] for wait in inner_waits)
        seconds[name] = seconds.get(name, 0.0) + (span["dur"] - waited) / 1e6
        ends[name] = span["ts"] + span["dur"]
    data, forward = seconds.get("data", 0.0), seconds.get("forward", 0.0)
    backward, optimizer = seconds.get("backward", 0.0), seconds.get("optimizer", 0.0)
    if optimizer:  # its span contains calls of handlers, which count as hooks
        optimizer -= sum(seconds.get(name, 0.0) for name in _WITHIN_STEP)
    hooks = sum(seconds.get(name, 0.0) for name in _OUTER) - backward - optimizer
    waited_by_cause = {cause: _seconds_of(waits, name) for cause, name in WAITING.items()}
    unaccounted = seconds["iteration"] - data - forward - backward - optimizer - hooks
    unaccounted -= sum(waited_by_cause.values())
    phases = Phases(
        iterations=1,
        data=data,
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        hooks=hooks,
        unaccounted=max(0.0, unaccounted),
        **waited_by_cause,
    )
    return Iteration(phases, ends.get("backward", ends["iteration"]))


def _within(inner: Json, outer: Json) -> bool:
    """Return whether a span lies within another span."""
    begins_within: bool = outer["ts"] <= inner["ts"]
    ends_within: bool = inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    return begins_within and ends_within


def _seconds_of(waits: Sequence[Json], name: str) -> float:
    """Return the seconds of the waits with this name."""
    seconds: float = sum(wait["dur"] for wait in waits if wait["name"] == name) / 1e6
    return seconds


def _slow_rank(ranks: Sequence[Sequence[Phases]]) -> Straggler | None:
    """Return the rank that is slow in most parts of the recorded iterations, or None.

    `lasting_slow_rank` compares about `LATEST` windows of a run, so the iterations are divided into so many
    parts.

    Args:
        ranks: for each rank, the phases of each iteration.
    """
    iterations = [list(phases) for phases in zip(*ranks, strict=True)]
    size = max(1, len(iterations) // LATEST)
    windows = [iterations[start : start + size] for start in range(0, len(iterations), size)]
    return lasting_slow_rank([summed(window) for window in windows])


def _merge(traces: Sequence[Json], shifts: Sequence[float], slow: Straggler | None) -> Json:
    """Merge the traces of all ranks into one on the clock of rank 0, with the earliest time as 0.

    Args:
        traces: the traces, whose events are changed in place.
        shifts: the result of `clock_shifts`.
        slow: the slow rank, or None.
    """
    # the earliest event of all ranks, whose time becomes 0, in microseconds of rank 0's trace
    origin = min(_begin(trace) + shift for trace, shift in zip(traces, shifts, strict=True))
    events = []
    for rank, (trace, shift) in enumerate(zip(traces, shifts, strict=True)):
        suffix = _slow_text(slow) if slow is not None and rank == slow.rank else ""
        for event in trace["traceEvents"]:
            if event["ph"] != "M":  # "M" is metadata, which has no time
                event["ts"] = round(event["ts"] + shift - origin, 3)
            elif event["name"] == "process_name":
                event["args"]["name"] = f"rank {rank}{suffix}"
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = rank
            events.append({**event, "pid": rank})
    window_facts = {key: value for key, value in traces[0]["otherData"].items() if key != "rank"}
    window_facts["began"] += origin / 1e6
    window_facts["slow rank"] = slow.text if slow else "none"
    return {**traces[0], "otherData": window_facts, "traceEvents": events}


def _begin(trace: Json) -> float:
    """Return the time of the earliest event of a trace, in microseconds; 0 without events."""
    return min((event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"), default=0.0)


def _slow_text(slow: Straggler) -> str:
    """Return the text to append to the name of the slow rank: its slow phase, and the time that it costs."""
    return f", slow in {slow.where}: {duration(slow.longer)} longer an iteration"
