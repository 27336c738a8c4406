"""Read the curves of a run from its `metrics.jsonl`, in one pass and bounded memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from eventloop.eventlog.jsonl import NUMBERS, RESERVED, UNREADABLE, name_of, unmarked
from eventloop.reporting.downsample import Curve, Downsampler

BLOCK = 1 << 20
"""Bytes read at once; the objects decoded from a block are freed before the next block."""

Row = dict[str, Any]
Columns = dict[str, tuple[Any, ...]]
_decoder = msgspec.json.Decoder(Row)
FURTHEST = (1 << 63) - 1
"""The largest step: steps are stored in 64 bits."""


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run's `metrics.jsonl`: curves, restarts, and how the run ended."""

    whole: int
    """Number of complete lines."""
    curves: list[Curve]
    """In the order of their first records."""
    resumed_at: list[int]
    """Completed iterations at which the run went on after it went back to an earlier iteration."""
    superseded: int
    """Number of records of iterations that were run again later; they are in no curve."""
    cut_short: int
    """Number of lines that a kill cut short or that are damaged; a run under way may have one, its last."""
    ended: str | None
    """How the last call of `train`, `val` or `test` ended: "completed", another reason, or the error.

    None if it has not ended, or its end was not logged.
    """
    begun_again: bool = False
    """True if a call began after one that ended, and has not ended: it goes on, or was killed."""
    info: dict[str, str]
    """The facts of the `run_info` events."""


def read_curves(path: Path) -> RunLog:
    """Read a log of scalars; of iterations run twice, only the later records count.

    The `before_run` lines mark where a run went on. In a file without them, a training step smaller than the
    one before does.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not empty and has no line that JSONLWriter writes.
    """
    with _without_collector():
        return _read(path, _find_starts(path) or _find_steps_back(path))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector in the block.

    Decoding makes millions of objects without cycles; the collector would spend a sixth of the time on them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read(path: Path, starts: list[_Start]) -> RunLog:
    reader = _Reader([start.iteration for start in starts])
    ends = [start.offset for start in starts]
    for offset, block in _blocks(path):
        begin = 0
        while ends and ends[0] < offset + len(block):
            end = ends.pop(0) - offset
            reader.take(block[begin:end])
            reader.begin_part()
            begin = end
        reader.take(block[begin:] if begin else block)
    if not reader.whole and path.stat().st_size:
        raise ValueError(f"{path} {_describe_content(reader)}")
    return reader.log()


def _describe_content(reader: _Reader) -> str:
    """Describe the content of a file that has no line of scalars or of an event."""
    if not reader.cut_short:
        return "has no line that JSONLWriter writes: expected lines of scalars or of events"
    if reader.foreign is None:
        return "has no complete line: it is torn"
    return f"is not a log of scalars: expected JSON objects, got the line {reader.foreign[:60]!r}"


class _Start(NamedTuple):
    """The begin of a part of the run: its offset in the file, and the completed iterations."""

    offset: int
    iteration: int


class _Reader:
    """Read the lines of a file, part by part; a part ends where the run went back or on."""

    def __init__(self, starts: list[int]) -> None:
        """Prepare for parts, of which all but the first begin at the iterations `starts`."""
        self._limits: list[float] = [*accumulate([math.inf, *reversed(starts)], min)][::-1]
        self._starts = starts
        self._part = 0
        self._furthest = 0
        self._resumed_at: list[int] = []
        self._envelopes: dict[tuple[str, str], Downsampler] = {}
        self._latest: dict[tuple[str, str], int] = {}  # the part of a curve's last record
        self._superseded = 0
        self._ended: str | None = None
        self._begun_again = False
        self._info: dict[str, str] = {}
        self.whole = 0
        self.cut_short = 0
        self.foreign: bytes | None = None
        """The first line that cannot be the beginning of a JSON object."""

    def begin_part(self) -> None:
        """Begin the next part."""
        start = self._starts[self._part]
        if start < self._furthest:
            self._resumed_at.append(start)
        self._part += 1
        self._furthest = start

    def take(self, lines: bytes) -> None:
        """Read complete lines of the current part."""
        for keys, rows in groupby(self._decode(lines), tuple):  # by their keys: most are like the one before
            if "event" in keys:
                for row in rows:
                    self._take_event(row)
            elif "mode" in keys and "step" in keys:
                columns = dict(zip(keys, zip(*map(dict.values, rows), strict=True), strict=True))
                for mode, part in _by_mode(columns):
                    self._take_scalars(mode, part)

    def log(self) -> RunLog:
        """Return the content of all lines read so far."""
        return RunLog(
            whole=self.whole,
            curves=[envelope.curve(name, mode) for (mode, name), envelope in self._envelopes.items()],
            resumed_at=self._resumed_at,
            superseded=self._superseded,
            cut_short=self.cut_short,
            ended=self._ended,
            begun_again=self._begun_again,
            info=self._info,
        )

    def _decode(self, lines: bytes) -> list[Row]:
        try:
            return _decoder.decode_lines(lines)
        except UNREADABLE:
            return [row for line in lines.splitlines() if line.strip() and (row := self._decode_line(line))]

    def _decode_line(self, line: bytes) -> Row | None:
        try:
            return _decoder.decode(line)
        except UNREADABLE:
            self.cut_short += 1
            if self.foreign is None and not line.lstrip().startswith(
                (b"{", b"\0")
            ):  # zeros: a disk's, after a crash
                self.foreign = line
            return None

    def _take_scalars(self, mode: str, columns: Columns) -> None:
        """Add rows of the same keys and mode, given as columns."""
        columns = _with_steps(columns)
        steps: Sequence[int] = columns["step"]
        if not steps:
            return
        self.whole += len(steps)
        self._furthest = max(self._furthest, max(steps))
        limit = self._limits[self._part]
        if self._furthest > limit:
            kept = [step <= limit for step in steps]
            self._superseded += len(kept) - sum(kept)
            columns = {key: _choose(column, kept) for key, column in columns.items()}
            steps = columns["step"]
        if steps:
            for key, column in columns.items():
                if key not in RESERVED:
                    self._add(mode, name_of(key), steps, column)

    def _add(self, mode: str, name: str, steps: Sequence[int], values: tuple[Any, ...]) -> None:
        if set(map(type, values)) != {float}:
            kept = [(step, n) for step, v in zip(steps, values, strict=True) if (n := _number(v)) is not None]
            if not kept:
                return
            steps, values = zip(*kept, strict=True)
        curve = mode, name
        envelope = self._envelopes.get(curve)
        if envelope is None:
            envelope = self._envelopes[curve] = Downsampler()
        elif self._latest[curve] != self._part:
            self._superseded += envelope.forget_from(steps[0])
        self._latest[curve] = self._part
        envelope.add(steps, values)

    def _take_event(self, row: Row) -> None:
        try:
            row = unmarked(row)
        except RecursionError:
            self.cut_short += 1
            return
        self.whole += 1
        match row:
            case {"event": "before_run"}:
                self._begun_again = self._begun_again or self._ended is not None
                self._ended = None
            case {"event": "after_run", "reason": str(reason), **rest}:
                self._ended = f"error: {error}" if (error := rest.get("error")) else reason
                self._begun_again = False
            case {"event": "run_info", "info": dict(info)}:
                self._info |= {str(key): str(value) for key, value in info.items()}


def _by_mode(columns: Columns) -> Iterator[tuple[str, Columns]]:
    modes = columns["mode"]
    for mode in [mode for mode in dict.fromkeys(modes) if isinstance(mode, str)]:
        if modes.count(mode) == len(modes):
            yield mode, columns
        else:
            kept = [each == mode for each in modes]
            yield mode, {key: _choose(column, kept) for key, column in columns.items()}


def _with_steps(columns: Columns) -> Columns:
    """Drop the rows whose step is not an int from 0 to `FURTHEST`."""
    steps = columns["step"]
    if set(map(type, steps)) == {int} and min(steps) >= 0 and max(steps) <= FURTHEST:
        return columns
    kept = [type(step) is int and 0 <= step <= FURTHEST for step in steps]
    return {key: _choose(column, kept) for key, column in columns.items()}


def _choose(column: tuple[Any, ...], kept: list[bool]) -> tuple[Any, ...]:
    return tuple(value for value, keep in zip(column, kept, strict=True) if keep)


def _number(value: Any) -> float | None:
    """Convert a value, or the name of NaN or an infinity, to a float.

    Returns None if it is not a number, or an integer beyond the largest float.
    """
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return NUMBERS.get(value) if isinstance(value, str) else None


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the file in blocks of whole lines, each with its offset; the last line may be incomplete."""
    offset, rest = 0, b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            end = block.rfind(b"\n") + 1
            if not end:
                rest += block
                continue
            whole, rest = rest + block[:end], block[end:]
            yield offset, whole
            offset += len(whole)
    if rest:
        yield offset, rest


class _BeforeRun(msgspec.Struct, tag="before_run", tag_field="event"):
    iter: Annotated[int, msgspec.Meta(ge=0, le=FURTHEST)] = 0


def _find_starts(path: Path) -> list[_Start]:
    """Find the `before_run` lines without decoding the others."""
    begin, found = b'{"event":"before_run"', []
    for offset, block in _blocks(path):
        at = block.find(begin)
        while at >= 0:
            try:
                line = block[at : block.find(b"\n", at) + 1 or None]
                found.append(_Start(offset + at, msgspec.json.decode(line, type=_BeforeRun).iter))
            except UNREADABLE:
                pass  # cut short; the run that went on after it wrote another one
            at = block.find(begin, at + 1)
    return found


class _LoggedStep(msgspec.Struct):
    mode: str | None = None
    step: int | None = None


def _find_steps_back(path: Path) -> list[_Start]:
    """Find each step of training that is less than the step before it.

    The iteration of a start is the step minus 1, the completed iterations before it.
    """
    decode = msgspec.json.Decoder(_LoggedStep).decode
    found, last = [], 0
    for offset, block in _blocks(path):
        for line in block.splitlines(keepends=True):
            try:
                place = decode(line)
            except UNREADABLE:
                place = _LoggedStep()
            if place.mode == "train" and place.step is not None and 0 <= place.step <= FURTHEST:
                if place.step < last:
                    found.append(_Start(offset, place.step - 1))
                last = place.step
            offset += len(line)
    return found
