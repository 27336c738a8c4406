"""Write, list and merge the trace files of a run.

Each window is a file in the folder `traces` of the run's directory, named after its iterations; each rank
writes a file of its own. A file is written in one step after the whole window is recorded, so a kill never
leaves a part of a file.
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
_NAME = re.compile(r"iterations_(\d+)-(\d+)\.json")


Moment = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""A time in microseconds, bounded to about 30 years so that a sum of many stays finite."""
Length = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _SpanArgs(msgspec.Struct):
    iter: int | msgspec.UnsetType = msgspec.UNSET


class _Span(msgspec.Struct, tag_field="ph", tag="X"):
    name: str
    cat: str
    ts: Moment
    dur: Length
    args: _SpanArgs


class _Depth(msgspec.Struct, tag_field="ph", tag="C"):
    ts: Moment


class _TrackArgs(msgspec.Struct):
    name: str = ""


class _Track(msgspec.Struct, tag_field="ph", tag="M"):
    name: str
    args: _TrackArgs


class _Facts(msgspec.Struct):
    began: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1


class _Trace(msgspec.Struct):
    """The parts of a file that are read."""

    otherData: _Facts
    traceEvents: list[_Span | _Depth | _Track]


class TraceFile(NamedTuple):
    """The file of a recorded window, with the numbers of its first and last iteration, counted from 0."""

    first: int
    last: int
    path: Path


def trace_path(run: Path, facts: WindowFacts) -> Path:
    """Return the path for the file of a window in the directory of its run."""
    return path_of_iterations(run, facts.first_iter, facts.iterations, facts.rank)


def path_of_iterations(run: Path, first: int, iterations: int, rank: int = 0) -> Path:
    """Return the path for the file of so many iterations from the first one on."""
    return of_rank(run / FOLDER / f"iterations_{first}-{first + max(0, iterations - 1)}.json", rank)


def of_rank(path: Path, rank: int) -> Path:
    """Return the path of another rank's file of a window, given that of rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}.json") if rank else path


def write_trace(run: Path, facts: WindowFacts, recorder: SpanRecorder) -> None:
    """Write the file of a window into the directory of its run; a file of the same iterations is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    path = trace_path(run, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as file:
        file.write(encoded(chrome_trace(facts, recorder)))


def encoded(trace: dict[str, Any]) -> bytes:
    """Encode the JSON object of a trace with one event per line, each by a separate call.

    A call holds the GIL, so other threads can run between two lines.
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
    found = [
        TraceFile(int(name[1]), int(name[2]), path)
        for path in (run / FOLDER).glob("*.json")
        if (name := _NAME.fullmatch(path.name))
    ]
    if not found:
        runs = sorted(path.parent.name for path in run.glob(f"*/{FOLDER}"))
        why = (
            f"there are runs in {', '.join(runs)}"
            if runs
            else ("the run had no TraceHook, or ended before it recorded a window")
        )
        raise ValueError(f"{run} has no trace: expected files in {run / FOLDER}, got none; {why}")
    return sorted(found)


def merged(files: Sequence[TraceFile]) -> dict[str, Any]:
    """Return one trace of several windows, which viewers show as one process each.

    The windows are as far apart in time as they were in the run.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    traces = [read_trace(file.path) for file in files]
    origin = min(trace["otherData"]["began"] for trace in traces)
    events = []
    for number, (file, trace) in enumerate(zip(files, traces, strict=True), start=1):
        shift = (trace["otherData"]["began"] - origin) * 1e6
        for event in trace["traceEvents"]:
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + shift, 3)
            elif event["name"] == "process_name":
                name = event["args"].get("name", "")
                event["args"]["name"] = f"{name}, iterations {file.first}..{file.last}"
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = number
            events.append({**event, "pid": number})
    about = {**traces[0]["otherData"], "iterations": ", ".join(f"{f.first}..{f.last}" for f in files)}
    return {**traces[0], "otherData": {**about, "began": origin}, "traceEvents": events}


def read_trace(path: Path) -> dict[str, Any]:
    """Read the trace file of a window.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or not a trace of eventloop.
    """
    try:
        if not is_trace(path):
            raise ValueError("it does not begin like one")
        data = path.read_bytes()
        msgspec.json.decode(data, type=_Trace)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = on_a_line(str(error))
        raise ValueError(f"{path} is damaged, or not a trace of eventloop: {why}") from error
