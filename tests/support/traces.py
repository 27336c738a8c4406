"""The trace files of a run, read back as spans for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A complete event of a trace, in microseconds."""

    track: str
    kind: str
    name: str
    began: float
    ended: float
    iter: int | None
    event: str


class Window(NamedTuple):
    """One file: its facts, its spans in order of time, and the names of its counters."""

    about: dict[str, Any]
    spans: list[Span]
    queues: set[str]


def inside(inner: Span, outer: Span) -> bool:
    """Whether a span lies within another one."""
    return outer.began <= inner.began and inner.ended <= outer.ended


def read_windows(run: Path) -> list[Window]:
    """The windows of a run in the order of their iterations."""
    files = sorted((run / "traces").glob("iterations_*.json"), key=_first)
    return [_window(json.loads(file.read_bytes())) for file in files]


def _first(file: Path) -> int:
    return int(file.stem.removeprefix("iterations_").partition("-")[0])


def _window(trace: dict[str, Any]) -> Window:
    events = trace["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [
        Span(
            tracks[e["tid"]],
            e["cat"],
            e["name"],
            e["ts"],
            round(e["ts"] + e["dur"], 3),
            e["args"].get("iter"),
            e["args"].get("event", ""),
        )
        for e in events
        if e["ph"] == "X"
    ]
    return Window(trace["otherData"], spans, {e["name"] for e in events if e["ph"] == "C"})
