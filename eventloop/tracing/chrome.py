"""Convert a recorded window to Chrome's trace event format, which Perfetto and Chrome's tracing open.

The format is that of "Trace Event Format" (Google, 2016, JSON object form): complete events (`ph` X) for
spans, counters (C) for the lengths of queues, metadata (M) for the names and order of tracks. `ts` and `dur`
are microseconds since the earliest record. Both viewers require that any two spans of a track are nested or
do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from eventloop.costs.spans import SAVER, Depth, Span, SpanRecorder

MADE_BY = "eventloop trace"
"""The text by which a file is recognized as a trace of eventloop."""
TRAINING = "training thread"
"""The name of the training thread's track."""
_PAIRED = frozenset(
    {"run", "train", "val", "test", "train_epoch", "val_epoch", "test_epoch", "val_iter", "test_iter"}
    | {"predict", "predict_iter"}
)
"""The stages of a run for which `_stage_spans` makes a span from the `before_` to the `after_` event.

Iterations are not included, because they are recorded as spans.
"""
_KINDS = ("iteration", "phase", "event", "handler", "wait", "delivery", "save")
"""The kinds of spans, ordered from outer to inner.

If two spans begin and end at the same time, the span whose kind comes first encloses the other.
"""


class WindowFacts(NamedTuple):
    """The run, the process and the iterations of a recorded window."""

    run: str
    """The name of the run's directory."""
    first_iter: int
    """The number of the window's first iteration in the run, counted from 0."""
    iterations: int
    """The number of iterations that were completed within the window."""
    complete: bool
    """False if the training ended before the window's last iteration."""
    began: float
    """The begin of the window in seconds of `perf_counter`, like the times of the spans."""
    began_unix: float
    """The begin of the window in seconds since 1970."""
    thread: int
    """The identifier of the training thread, which its spans have as their `track`."""
    pid: int
    rank: int = 0
    world_size: int = 1

    def __str__(self) -> str:
        last = self.first_iter + max(0, self.iterations - 1)
        ending = "" if self.complete else ", cut short by the end of the training"
        return f"iterations {self.first_iter}..{last}{ending}"


def chrome_trace(facts: WindowFacts, recorder: SpanRecorder) -> dict[str, Any]:
    """Return a recorded window of iterations as a JSON object in Chrome's trace event format."""
    recorded = list(recorder.spans)  # a copy, because a delivery that has not ended may add its span later
    spans, queue_depths = [*recorded, *_stage_spans(recorded)], list(recorder.depths)
    origin = min([facts.began, *(span.began for span in spans), *(depth.at for depth in queue_depths)])
    name = f"eventloop {facts.run}, rank {facts.rank} of {facts.world_size}"
    metadata = [
        _metadata(facts.pid, 0, "process_name", name=name),
        _metadata(facts.pid, 0, "process_sort_index", sort_index=facts.rank),
    ]
    events: list[dict[str, Any]] = []
    tid = 0  # the number of a row in the viewers; 0 is for the process as a whole
    for track, track_spans in _in_order(spans, facts, recorder):
        for number, row in enumerate(nested_rows(track_spans), start=1):
            tid += 1
            name = _track_name(track, facts, recorder) + (f" #{number}" if number > 1 else "")
            metadata.append(_metadata(facts.pid, tid, "thread_name", name=name))
            metadata.append(_metadata(facts.pid, tid, "thread_sort_index", sort_index=tid))
            events += [_complete(span, facts.pid, tid, origin, recorder) for span in row]
    events += [_counter(depth, facts.pid, origin) for depth in queue_depths]
    events.sort(key=lambda event: event["ts"])  # a stable sort, so that enclosing spans stay first
    window_facts = {
        "made_by": MADE_BY,
        "run": facts.run,
        "iterations": str(facts),
        "rank": facts.rank,
        "world_size": facts.world_size,
        "began": facts.began_unix + origin - facts.began,
        "times": "of the host; on a GPU the training thread runs ahead of the device",
        "not recorded": f"{recorder.lost} spans and depths beyond the limit" if recorder.lost else "nothing",
    }
    return {"otherData": window_facts, "displayTimeUnit": "ms", "traceEvents": metadata + events}


def nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute the spans of a track over rows, so that the spans of a row are nested or do not overlap.

    Each span is put into the first possible row. A thread needs only one row. Checkpoint saves may overlap,
    and so may deliveries to a subscriber whose worker process was restarted.
    """
    rows: list[list[Span]] = []
    open_ends: list[list[float]] = []  # for each row, the ends of the enclosing spans, the innermost last
    for span in sorted(spans, key=_outer_first):
        end = span.began + span.seconds
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= span.began:
                ends.pop()
            if not ends or end <= ends[-1]:
                row.append(span)
                ends.append(end)
                break
        else:
            rows.append([span])
            open_ends.append([end])
    return rows


def _outer_first(span: Span) -> tuple[float, float, int]:
    """Return a sort key that sorts spans by their begin, and an enclosing span before the enclosed one."""
    return span.began, -span.seconds, _KINDS.index(span.kind)


def _stage_spans(spans: Sequence[Span]) -> list[Span]:
    """Return spans for runs, epochs and evaluations, from their `before_` event to their `after_` event."""
    stage_spans: list[Span] = []
    before_events: dict[tuple[int | str, str], Span] = {}  # of the stages that have not ended yet
    for event in sorted((span for span in spans if span.kind == "event"), key=_outer_first):
        prefix, _, stage = event.name.partition("_")
        if stage not in _PAIRED:
            continue
        if prefix == "before":
            before_events[event.track, stage] = event
        elif (before := before_events.pop((event.track, stage), None)) is not None:
            seconds = event.began + event.seconds - before.began
            stage_spans.append(Span(event.track, "phase", stage, before.began, seconds, before.iter))
    return stage_spans


def _in_order(
    spans: Iterable[Span], facts: WindowFacts, recorder: SpanRecorder
) -> list[tuple[int | str, list[Span]]]:
    """Group spans by track, in the order in which viewers show the tracks.

    The training thread comes first, then the checkpoint saver, background subscribers and other threads.
    """
    tracks: dict[int | str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)

    def sort_key(track: int | str) -> tuple[int, str]:
        is_in_group = (track == facts.thread, track == SAVER, track in recorder.lanes, True)
        return is_in_group.index(True), _track_name(track, facts, recorder)

    return sorted(tracks.items(), key=lambda item: sort_key(item[0]))


def _track_name(track: int | str, facts: WindowFacts, recorder: SpanRecorder) -> str:
    """Return the name that viewers show for a track, such as "JSONLWriter (process)".

    The track of a background subscriber has the subscriber's name, and where the subscriber runs.
    """
    if track == facts.thread:
        return TRAINING
    if isinstance(track, int):
        return f"thread {recorder.threads.get(track, track)}"
    return f"{track} ({recorder.lanes[track]})" if track in recorder.lanes else track


def _counter(depth: Depth, pid: int, origin: float) -> dict[str, Any]:
    """Return the counter event that shows the number of events in a queue at one time."""
    return {
        "ph": "C",
        "name": f"queue of {depth.queue}",
        "cat": "queue",
        "pid": pid,
        "tid": 0,
        "ts": _us(depth.at, origin),
        "args": {"events": depth.events},
    }


def _metadata(pid: int, tid: int, kind: str, **args: str | int) -> dict[str, Any]:
    """Return the metadata event that names or orders a process, or with `tid` > 0 one of its rows."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(span: Span, pid: int, tid: int, origin: float, recorder: SpanRecorder) -> dict[str, Any]:
    """Return the complete event that shows a span in the row `tid` of a process."""
    args: dict[str, Any] = {}
    if span.iter is not None:
        args["iter"] = span.iter
    if span.event:
        args["for" if span.kind == "wait" else "event"] = span.event
    if span.kind == "handler":
        args["priority"] = span.number
    elif span.kind == "delivery":
        args["events"] = span.number
        args["runs_on"] = recorder.lanes.get(str(span.track), "")
    ts = _us(span.began, origin)
    # computed from rounded ends, so that no span ends a nanosecond after the span that encloses it
    dur = round(_us(span.began + span.seconds, origin) - ts, 3)
    position = {"pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return {"ph": "X", "name": span.name, "cat": span.kind, **position, "args": args}


def _us(seconds: float, origin: float) -> float:
    """Return the microseconds from `origin` to a time, both in seconds of `perf_counter`."""
    return round((seconds - origin) * 1e6, 3)
