"""The file `trace.jsonl` of a run directory: what `TraceHook` recorded, a JSON object a line.

The first line is the header, with the version. Of each window the spans of the training thread follow, in chunks,
then the line `window`, which says that they are whole; then those of the background, as they end, and `closed`. So a
run that was killed behind its window has it, and a file that was cut short says where. A resumed run appends; what a
kill left of half a line is removed first.
Times are `perf_counter`'s, in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import msgspec

from eventloop.costs.records import RunsOn
from eventloop.costs.spans import Depth, Span, SpanRecorder
from eventloop.eventlog.jsonl import UNREADABLE, is_torn
from eventloop.util.append_file import open_appending, write_all
from eventloop.util.surrogates import without_surrogates

FILE_NAME = "trace.jsonl"
FORMAT = "eventloop trace"
VERSION = 1
CHUNK = 1024
"""Spans of a line: the interpreter is not held for longer than it takes to encode them."""


class TraceError(ValueError):
    """A run directory has no trace, or one that cannot be read."""


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="line"):
    """The first line."""

    format: str
    version: int


HEADER = Header(FORMAT, VERSION)


class Chunk(msgspec.Struct, frozen=True, tag="chunk", tag_field="line"):
    """Some of what a window holds."""

    key: int
    spans: list[Span] = []
    depths: list[Depth] = []


class WindowFacts(msgspec.Struct, frozen=True, kw_only=True, tag="window", tag_field="line"):
    """What a window is; the chunks before it hold all of the training thread."""

    key: int
    """Its own in the file: the time it began, in nanoseconds since 1970."""
    run: str
    """The name of the run's directory."""
    first_iter: int
    """0-based, as in events."""
    iterations: int
    """That were completed."""
    complete: bool
    """False where the training ended within it."""
    began: float
    ended: float
    thread: int
    """The track of the training thread."""
    pid: int
    rank: int = 0
    world_size: int = 1


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed", tag_field="line"):
    """Nothing more of a window will follow."""

    key: int
    lost: int = 0
    """Spans and depths beyond the recorder's limit."""


class Tracks(msgspec.Struct, frozen=True, tag="tracks", tag_field="line"):
    """Names of a window's tracks."""

    key: int
    threads: dict[int, str] = {}
    lanes: dict[str, RunsOn] = {}


Line = Header | Chunk | WindowFacts | Closed | Tracks


class Window:
    """One window, as it is read."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.facts: WindowFacts | None = None
        self.spans: list[Span] = []
        self.depths: list[Depth] = []
        self.threads: dict[int, str] = {}
        self.lanes: dict[str, RunsOn] = {}
        self.lost = 0
        self.closed = False
        """False where the run was killed before it had all of the background."""

    def take(self, line: Chunk | WindowFacts | Closed | Tracks) -> None:
        """Enter a line."""
        if isinstance(line, Chunk):
            self.spans += line.spans
            self.depths += line.depths
        elif isinstance(line, Tracks):
            self.threads |= line.threads
            self.lanes |= line.lanes
        elif isinstance(line, WindowFacts):
            self.facts = line
        else:
            self.lost, self.closed = line.lost, True

    def __str__(self) -> str:
        facts = self.facts
        if facts is None:
            return "a window that was cut short"
        last = facts.first_iter + max(0, facts.iterations - 1)
        cut = "" if facts.complete else ", cut short by the end of the training"
        return f"iterations {facts.first_iter}..{last}{cut}"


# --- writing -----------------------------------------------------------------------------------------------


class TraceAppender:
    """Appends windows to the file of a run directory, each in two parts.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._encoder = msgspec.json.Encoder()
        self._spans: dict[int, int] = {}  # how many of a window are written
        self._depths: dict[int, int] = {}

    def write_window(self, facts: WindowFacts, recorder: SpanRecorder) -> None:
        """Write what the training thread has recorded, and that it is all of it."""
        with open_appending(self.path, is_torn) as file:
            if not os.fstat(file.fileno()).st_size:
                self._write(file, [HEADER])
            self._write_new(file, facts.key, recorder)
            self._write(file, [facts])

    def close_window(self, key: int, recorder: SpanRecorder) -> None:
        """Write what the background has recorded since, and that it is all of it."""
        with open_appending(self.path, is_torn) as file:
            self._write_new(file, key, recorder)
            self._write(file, [Closed(key=key, lost=recorder.lost)])

    def _write_new(self, file: FileIO, key: int, recorder: SpanRecorder) -> None:
        first, depth = self._spans.get(key, 0), self._depths.get(key, 0)
        last, deepest = (
            len(recorder.spans),
            len(recorder.depths),
        )  # more may come meanwhile: they are the next part's
        for at in range(first, last, CHUNK):
            self._write(file, [Chunk(key, spans=recorder.spans[at : min(at + CHUNK, last)])])
        for at in range(depth, deepest, CHUNK):
            self._write(file, [Chunk(key, depths=recorder.depths[at : min(at + CHUNK, deepest)])])
        self._write(file, [Tracks(key, dict(recorder.threads), dict(recorder.lanes))])
        self._spans[key], self._depths[key] = last, deepest

    def _write(self, file: FileIO, lines: Sequence[Line]) -> None:
        try:
            data = self._encoder.encode_lines(lines)
        except UnicodeEncodeError:  # as the name of a folder that is no UTF-8
            data = self._encoder.encode_lines(without_surrogates(msgspec.to_builtins(lines)))
        write_all(file, data)


# --- reading -----------------------------------------------------------------------------------------------


class Trace:
    """The windows of a file, in the order they were recorded, and whether a kill cut it short."""

    def __init__(self, path: Path, windows: list[Window], *, torn: bool) -> None:
        self.path = path
        self.windows = windows
        self.torn = torn


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace of a run.

        trace = read_trace("runs/digits")
        print(trace.windows[-1], len(trace.windows[-1].spans))

    Args:
        path: the run's directory, or its `trace.jsonl`.

    Raises:
        FileNotFoundError: there is no run.
        TraceError: the directory is empty, or no run's; there is no window; the file is torn before the end of its
            first window, of a newer version, or something else.
        OSError: it cannot be read.
    """
    file = find_trace(Path(path))
    windows: dict[int, Window] = {}
    torn = False
    for line in _lines(file, file.read_bytes()):
        if isinstance(line, Header):
            continue
        if line is None:
            torn = True
        else:
            windows.setdefault(line.key, Window(line.key)).take(line)
    whole = [window for window in windows.values() if window.facts is not None]
    if not whole and (torn or windows):
        raise TraceError(f"{file} is torn: a kill or a full disk cut it short within its first window")
    if not whole:
        raise TraceError(f"{file} holds no window: the run ended before it recorded one")
    return Trace(file, whole, torn=torn or len(whole) < len(windows))


def _lines(path: Path, data: bytes) -> Iterator[Line | None]:
    """The lines; None stands for one that was cut short."""
    if not data:
        raise TraceError(f"{path} is torn: it is empty, a kill or a full disk cut it short at once")
    decode = msgspec.json.Decoder(Line).decode
    head, *rest = data.splitlines(keepends=True)
    yield _header(path, head)
    for text in rest:
        try:
            yield decode(text) if text.endswith(b"\n") else None
        except UNREADABLE:
            yield None


def _header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
        if header.format != FORMAT:
            raise msgspec.ValidationError("a header of something else")
    except UNREADABLE:
        if not line.endswith(b"\n") and msgspec.json.encode(HEADER).startswith(line):
            raise TraceError(
                f"{path} is torn: a kill or a full disk cut it short within its first line"
            ) from None
        raise TraceError(
            f"{path} is no trace of eventloop: its first line should be its header, and is {line[:60]!r}"
        ) from None
    if header.version > VERSION:
        raise TraceError(
            f"{path} has version {header.version}, newer than this eventloop reads ({VERSION}): update torch-eventloop"
        )
    return header


OF_A_RUN = (
    "metrics.jsonl",
    "metrics.csv",
    "events.evl",
    "costs.json",
    "trace.jsonl",
    "tensorboard",
    "images",
)
"""What eventloop leaves in a run's directory, besides checkpoints."""


def find_trace(path: Path) -> Path:
    """The file of a run directory, or the file itself.

    Raises:
        FileNotFoundError: there is nothing.
        TraceError: the directory is empty, no run's, or a run's without a trace.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"no run at {path}: give the run's directory or its {FILE_NAME}")
    if (path / FILE_NAME).is_file():
        return path / FILE_NAME
    names = {inside.name for inside in path.iterdir()}
    if not names:
        raise TraceError(f"{path} is empty: give the directory of a run that has recorded a trace")
    if names.isdisjoint(OF_A_RUN) and not any((path / name / "manifest.json").is_file() for name in names):
        raise TraceError(
            f"{path} is not a run's directory: it holds no {FILE_NAME}, nor anything else of a run"
        )
    raise TraceError(
        f"{path} holds no trace ({FILE_NAME}): its run had no TraceHook, or ended before a window was recorded"
    )
