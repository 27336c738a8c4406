"""Write, list and merge the trace files of a run.

Each window is a file in the folder `traces` of the run's directory, named after its iterations. Each rank
writes a file of its own. A file is written under a temporary name and then renamed, so a kill never leaves an
incomplete file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from eventloop.costs.records import MOST_RANKS
from eventloop.costs.spans import SpanRecorder
from eventloop.tracing.chrome import MADE_BY, WindowFacts, chrome_trace
from eventloop.util.append_file import replacing
from eventloop.util.formatting import on_a_line

FOLDER = "traces"
"""The folder in the run's directory with the trace files."""
_NAME = re.compile(r"iterations_(\d+)-(\d+)\.json")
"""Matches the names of rank 0's files, with the first and the last iteration."""


Microseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""A time in microseconds, bounded to about 30 years so that a sum of many stays finite."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A length of time in microseconds."""


class _SpanArgs(msgspec.Struct):
    """The checked arguments of a span."""

    iter: int | msgspec.UnsetType = msgspec.UNSET


class _Span(msgspec.Struct, tag_field="ph", tag="X"):
    """The checked fields of a span, a complete event."""

    name: str
    cat: str
    ts: Microseconds
    dur: Duration
    args: _SpanArgs


class _QueueLength(msgspec.Struct, tag_field="ph", tag="C"):
    """The checked field of a queue's length, a counter event."""

    ts: Microseconds


class _MetadataArgs(msgspec.Struct):
    """The checked argument of a metadata event."""

    name: str = ""


class _Metadata(msgspec.Struct, tag_field="ph", tag="M"):
    """The checked fields of the name or order of a process or track, a metadata event."""

    name: str
    args: _MetadataArgs


class _Facts(msgspec.Struct):
    """The checked facts of a window."""

    began: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1


class _Trace(msgspec.Struct):
    """The parts of a trace file that are checked when it is read."""

    otherData: _Facts
    traceEvents: list[_Span | _QueueLength | _Metadata]


class TraceFile(NamedTuple):
    """The file of a recorded window, with the 0-based numbers of its first and last iteration."""

    first: int
    last: int
    path: Path


def trace_path(run: Path, facts: WindowFacts) -> Path:
    """Return the path of a window's file in the directory of its run."""
    return path_of_iterations(run, facts.first_iter, facts.iterations, facts.rank)


def path_of_iterations(run: Path, first: int, iterations: int, rank: int = 0) -> Path:
    """Return the path of a rank's file for the window of `iterations` iterations that begins at `first`."""
    return of_rank(run / FOLDER / f"iterations_{first}-{first + max(0, iterations - 1)}.json", rank)


def of_rank(path: Path, rank: int) -> Path:
    """Return the path of a rank's file of a window, given the path of rank 0's file."""
    return path.with_name(f"{path.stem}.rank{rank}.json") if rank else path


def write_trace(run: Path, facts: WindowFacts, recorder: SpanRecorder) -> None:
    """Write a recorded window to its file; a file of the same iterations is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    path = trace_path(run, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as file:
        file.write(encoded(chrome_trace(facts, recorder)))


def encoded(trace: dict[str, Any]) -> bytes:
    """Return the JSON object of a trace as bytes, with one event per line.

    Each event is encoded by a separate call, between which other threads can run, because a call holds the
    interpreter lock.
    """
    encode = msgspec.json.Encoder().encode
    head = {name: value for name, value in trace.items() if name != "traceEvents"}
    events = b",\n".join(encode(event) for event in trace["traceEvents"])
    return encode(head)[:-1] + b',"traceEvents":[\n' + events + b"\n]}\n"


def is_trace(path: Path) -> bool:
    """Return whether a file begins as `encoded` writes it."""
    begin = b'{"otherData":{"made_by":"' + MADE_BY.encode()
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def find_traces(run: Path) -> list[TraceFile]:
    """Return the trace files of a run's rank 0 in the order of their iterations.

    Raises:
        FileNotFoundError: the directory of the run does not exist.
        ValueError: it has no trace file.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"no run at {run}: expected the directory of a run")
    matches = [(_NAME.fullmatch(path.name), path) for path in (run / FOLDER).glob("*.json")]
    traces = [TraceFile(int(match[1]), int(match[2]), path) for match, path in matches if match]
    if not traces:
        runs = sorted(path.parent.name for path in run.glob(f"*/{FOLDER}"))
        reason = "the run had no TraceHook, or ended before it recorded a window"
        if runs:
            reason = f"there are runs in {', '.join(runs)}"
        raise ValueError(f"{run} has no trace: expected files in {run / FOLDER}, got none; {reason}")
    return sorted(traces)


def merged(files: Sequence[TraceFile]) -> dict[str, Any]:
    """Return one trace of several windows of a rank, which viewers show as one process for each window.

    The time between two events is the same as in the run.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    traces = [read_trace(file.path) for file in files]
    origin = min(trace["otherData"]["began"] for trace in traces)
    events = []
    for number, (file, trace) in enumerate(zip(files, traces, strict=True), start=1):
        shift = (trace["otherData"]["began"] - origin) * 1e6  # microseconds
        for event in trace["traceEvents"]:
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + shift, 3)
            elif event["name"] == "process_name":
                name = event["args"].get("name", "")
                event["args"]["name"] = f"{name}, iterations {file.first}..{file.last}"
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = number
            events.append({**event, "pid": number})
    window_facts = {**traces[0]["otherData"], "iterations": ", ".join(f"{f.first}..{f.last}" for f in files)}
    return {**traces[0], "otherData": {**window_facts, "began": origin}, "traceEvents": events}


def read_trace(path: Path) -> dict[str, Any]:
    """Read and check the trace file of a window, and return its JSON object.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or not a trace of eventloop.
    """
    try:
        if not is_trace(path):
            raise ValueError("it does not begin like one")
        data = path.read_bytes()
        msgspec.json.decode(data, type=_Trace)  # raises if a field that this package reads is wrong
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = on_a_line(str(error))
        raise ValueError(f"{path} is damaged, or not a trace of eventloop: {reason}") from error
