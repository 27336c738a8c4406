"""Write and read `trace.jsonl`, the trace of a run: one JSON object a line.

`TraceHook` writes it into the run's directory, and `eventloop trace` reads it. The first line is the header
with the version. For each window, chunks of the training thread's spans follow, then the line `window`, which
completes them; then the spans of the background as they end, and the line `closed`. So a run that was killed
after its window keeps it, and a file that was cut short shows where. A resumed run appends, after removing a
partial last line.

Times are seconds by `perf_counter`.
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
"""Spans in one line; the GIL is held only while one line is encoded."""


class TraceError(ValueError):
    """A run directory has no trace, or a trace that cannot be read."""


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="line"):
    """The first line: format and version."""

    format: str
    version: int


HEADER = Header(FORMAT, VERSION)


class Chunk(msgspec.Struct, frozen=True, tag="chunk", tag_field="line"):
    """Some spans and queue depths of one window."""

    key: int
    spans: list[Span] = []
    depths: list[Depth] = []


class WindowFacts(msgspec.Struct, frozen=True, kw_only=True, tag="window", tag_field="line"):
    """The line `window`: the facts of one window.

    The chunks before it hold every span of the training thread.
    """

    key: int
    """Identifies the window in the file: its begin in nanoseconds since 1970."""
    run: str
    """The name of the run's directory."""
    first_iter: int
    """0-based, as in events."""
    iterations: int
    """Completed iterations."""
    complete: bool
    """False if the training ended within the window."""
    began: float
    ended: float
    thread: int
    """The track of the training thread."""
    pid: int
    rank: int = 0
    world_size: int = 1


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed", tag_field="line"):
    """The line `closed`: nothing more of a window follows."""

    key: int
    lost: int = 0
    """Spans and depths beyond the recorder's limit, which were not recorded."""


class Tracks(msgspec.Struct, frozen=True, tag="tracks", tag_field="line"):
    """Names of a window's tracks.

    `threads` has the names of threads by identifier, `lanes` where each background subscriber runs.
    """

    key: int
    threads: dict[int, str] = {}
    lanes: dict[str, RunsOn] = {}


Line = Header | Chunk | WindowFacts | Closed | Tracks


class Window:
    """One recorded window, collected from its lines."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.facts: WindowFacts | None = None
        self.spans: list[Span] = []
        self.depths: list[Depth] = []
        self.threads: dict[int, str] = {}
        self.lanes: dict[str, RunsOn] = {}
        self.lost = 0
        self.closed = False
        """False if the run was killed before all background spans were written."""

    def take(self, line: Chunk | WindowFacts | Closed | Tracks) -> None:
        """Add the content of one line."""
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
    """Append windows to the file of a run directory, each in two parts.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._encoder = msgspec.json.Encoder()
        self._spans: dict[int, int] = {}  # number of written spans by window; `_depths` likewise
        self._depths: dict[int, int] = {}

    def write_window(self, facts: WindowFacts, recorder: SpanRecorder) -> None:
        """Write the spans recorded so far, then the line `window`, which completes them.

        Called with the training thread's part.
        """
        with open_appending(self.path, is_torn) as file:
            if not os.fstat(file.fileno()).st_size:
                self._write(file, [HEADER])
            self._write_new(file, facts.key, recorder)
            self._write(file, [facts])

    def close_window(self, key: int, recorder: SpanRecorder) -> None:
        """Write the spans recorded since `write_window`, then the line `closed`."""
        with open_appending(self.path, is_torn) as file:
            self._write_new(file, key, recorder)
            self._write(file, [Closed(key=key, lost=recorder.lost)])

    def _write_new(self, file: FileIO, key: int, recorder: SpanRecorder) -> None:
        first, depth = self._spans.get(key, 0), self._depths.get(key, 0)
        # spans and depths that come meanwhile belong to the next part
        last, deepest = len(recorder.spans), len(recorder.depths)
        for at in range(first, last, CHUNK):
            self._write(file, [Chunk(key, spans=recorder.spans[at : min(at + CHUNK, last)])])
        for at in range(depth, deepest, CHUNK):
            self._write(file, [Chunk(key, depths=recorder.depths[at : min(at + CHUNK, deepest)])])
        self._write(file, [Tracks(key, dict(recorder.threads), dict(recorder.lanes))])
        self._spans[key], self._depths[key] = last, deepest

    def _write(self, file: FileIO, lines: Sequence[Line]) -> None:
        try:
            data = self._encoder.encode_lines(lines)
        except UnicodeEncodeError:  # the name of a folder need not be UTF-8
            data = self._encoder.encode_lines(without_surrogates(msgspec.to_builtins(lines)))
        write_all(file, data)


# --- reading -----------------------------------------------------------------------------------------------


class Trace:
    """The complete windows of a file in the order of their recording; `torn` if a kill cut the file short."""

    def __init__(self, path: Path, windows: list[Window], *, torn: bool) -> None:
        self.path = path
        self.windows = windows
        self.torn = torn


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the trace of a run.

        trace = read_trace("runs/digits")
        print(trace.windows[-1], len(trace.windows[-1].spans))

    Args:
        path: the run's directory, or its `trace.jsonl`.

    Raises:
        FileNotFoundError: the path does not exist.
        TraceError: the directory is empty or not of a run; the file is of another format, of a newer version,
            without a window, or cut short before the end of its first window.
        OSError: the file cannot be read.
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
        raise TraceError(f"{file} has no window: the run ended before it recorded one")
    return Trace(file, whole, torn=torn or len(whole) < len(windows))


def _lines(path: Path, data: bytes) -> Iterator[Line | None]:
    """Yield the decoded lines, and None for each line that was cut short."""
    if not data:
        raise TraceError(f"{path} is torn: it is empty; a kill or a full disk cut it short at once")
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
            raise msgspec.ValidationError("the header of another format")
    except UNREADABLE:
        if not line.endswith(b"\n") and msgspec.json.encode(HEADER).startswith(line):
            raise TraceError(
                f"{path} is torn: a kill or a full disk cut it short within its first line"
            ) from None
        raise TraceError(
            f"{path} is not a trace of eventloop: expected a header with the format {FORMAT!r} in its first "
            f"line, got {line[:60]!r}"
        ) from None
    if header.version > VERSION:
        raise TraceError(
            f"{path} has version {header.version}: expected at most {VERSION}, the newest that this "
            "eventloop reads; update torch-eventloop"
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
"""Files that eventloop leaves in the directory of a run, except checkpoints."""


def find_trace(path: Path) -> Path:
    """Return the trace file of a run directory; a path of a file is returned as it is.

    Raises:
        FileNotFoundError: the path does not exist.
        TraceError: the directory is empty, not of a run, or of a run without a trace.
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
            f"{path} is not a run's directory: expected {FILE_NAME} or other files of a run in it; give the "
            "directory of a run that has recorded a trace"
        )
    raise TraceError(
        f"{path} has no trace ({FILE_NAME}): the run had no TraceHook, or ended before it recorded a window; "
        "train with TraceHook among the hooks"
    )
