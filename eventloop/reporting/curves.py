"""Read the curves of a run from its `metrics.jsonl`, and reduce each to a bounded number of points.

The file is read once. The records of a curve are kept as two arrays of numbers, 16 bytes a record, and are
reduced at the end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from eventloop.eventlog.jsonl import NUMBERS, RESERVED, UNREADABLE, name_of, unmarked

BLOCK = 1 << 20
"""The number of bytes read at once; the objects decoded from a block are freed before the next one."""
POINTS = 2000
"""The largest number of points of one curve; a screen shows no more."""
FURTHEST = (1 << 63) - 1
"""The largest step: steps are stored in 64 bits."""

Row = dict[str, Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_decoder = msgspec.json.Decoder(Row)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One scalar over the steps of a run, as at most `POINTS` points.

    A point is one record, or in a long run the mean, least and greatest value of about `count / len(steps)`
    consecutive records. NaN (null in JSON) means that none of a point's values is finite.
    """

    name: str
    mode: str
    """The mode of the records: train, val or test."""
    count: int
    """Number of records."""
    first: float
    last: float
    last_step: int
    """The step of the last record; the last of `steps` may be smaller, as it is the middle of a point."""
    least: float
    """The least finite value of all records."""
    least_step: int | None
    """The step of the least value; None if no value is finite."""
    greatest: float
    greatest_step: int | None
    not_finite: int
    """Number of values that were NaN or infinite."""
    first_not_finite: int | None
    """The step of the first value that was NaN or infinite; None if there is none."""
    steps: list[int]
    """The step of each point: the number of completed iterations in the middle of its records."""
    mean: list[float]
    low: list[float]
    """The least value of each point; `low` and `high` are empty if each point is one record."""
    high: list[float]


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run's `metrics.jsonl`: curves, resumes, and how the run ended."""

    whole: int
    """The number of complete lines in the file."""
    curves: list[Curve]
    """The curves, in the order of their first records."""
    resumed_at: list[int]
    """The number of completed iterations at each resume from an earlier iteration."""
    superseded: int
    """The number of records of iterations that a resumed run repeated; no curve contains them."""
    cut_short: int
    """The number of lines that are damaged or were cut short by a kill.

    A run under way may have one such line, its last.
    """
    ended: str | None
    """How the last call of `train`, `val` or `test` ended: "completed", another reason, or the error.

    None if the call has not ended, or if its end was not logged.
    """
    begun_again: bool = False
    """Whether a call began after an earlier one ended, and has not ended itself: it runs or was killed."""
    info: dict[str, str]
    """The facts of the `run_info` events, by name."""


def read_curves(path: Path) -> RunLog:
    """Read the curves of a `metrics.jsonl`; of iterations that ran twice, only the later records count.

    Each `before_run` line begins a new part of the run. In a file without such lines, a new part begins where
    the training step becomes smaller.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not empty and has no line that JSONLWriter writes.
    """
    reader = _Reader()
    for block in _blocks(path):
        reader.take(block)
    if not reader.whole and path.stat().st_size:
        with path.open("rb") as file:
            line = file.readline(60)
        raise ValueError(
            f"{path} has no line that JSONLWriter writes: expected JSON objects with `event`, or with `mode` "
            f"and `step`, got the first line {line!r}"
        )
    return reader.log()


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; the last block may end with an incomplete line."""
    rest: list[bytes] = []
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if end := block.rfind(b"\n") + 1:
                yield b"".join([*rest, block[:end]])
                rest = []
            rest.append(block[end:])
    if last := b"".join(rest):
        yield last


class _Part:
    """The records from the begin of a run, or from a resume, up to the next resume."""

    def __init__(self, start: int) -> None:
        self.start = start
        """The number of completed iterations when the part begins."""
        self.curves: dict[tuple[str, str], tuple[array[int], array[float]]] = {}
        """The steps and the values of each curve, by mode and name."""

    def add(self, mode: str, name: str, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Add records of one curve; values that are not numbers are left out."""
        if set(map(type, values)) != {float}:
            numbers = [_number(value) for value in values]
            steps = [step for step, number in zip(steps, numbers, strict=True) if number is not None]
            values = [number for number in numbers if number is not None]
        if steps:
            recorded = self.curves.setdefault((mode, name), (array("q"), array("d")))
            recorded[0].extend(steps)
            recorded[1].extend(values)

    def take(self, curve: tuple[str, str]) -> tuple[Integers, Floats]:
        """Remove one curve, and return its steps and values."""
        steps, values = self.curves.pop(curve)
        return np.array(steps, np.int64), np.array(values, np.float64)


class _Reader:
    """Collect the records of a file, and begin a new part at each resume of the run.

    A file without `before_run` lines has a resume wherever the training step becomes smaller.
    """

    def __init__(self) -> None:
        self.whole = 0
        self._cut_short = 0
        self._parts = [_Part(0)]
        self._furthest = 0  # the largest step of the current part
        self._last_trained: int | None = 0  # None: the file has `before_run` lines, and needs no guess
        self._resumed_at: list[int] = []
        self._ended: str | None = None
        self._begun_again = False
        self._info: dict[str, str] = {}

    def take(self, lines: bytes) -> None:
        """Read a block of whole lines."""
        for kind, rows in groupby(self._decode(lines), _kind):  # most lines are like the one before
            if "event" in kind[1:]:
                for row in rows:
                    self._take_event(row)
            elif isinstance(kind[0], str) and "step" in kind[1:]:
                self._take_scalars(kind[0], [row for row in rows if _is_step(row["step"])])

    def log(self) -> RunLog:
        """Return the content of all lines read so far."""
        curves, superseded = _merged(self._parts)
        return RunLog(
            whole=self.whole, curves=curves, resumed_at=self._resumed_at, superseded=superseded,
            cut_short=self._cut_short, ended=self._ended, begun_again=self._begun_again, info=self._info,
        )  # fmt: skip

    def _decode(self, lines: bytes) -> list[Row]:
        try:
            return _decoder.decode_lines(lines)
        except UNREADABLE:
            return [row for line in lines.splitlines() if line.strip() and (row := self._decode_line(line))]

    def _decode_line(self, line: bytes) -> Row | None:
        try:
            return _decoder.decode(line)
        except UNREADABLE:
            self._cut_short += 1
            return None

    def _take_scalars(self, mode: str, rows: list[Row]) -> None:
        """Add records of one mode that have the same keys."""
        self.whole += len(rows)
        steps = [row["step"] for row in rows]
        backs: list[int] = []
        if mode == "train" and self._last_trained is not None:
            last = [self._last_trained, *steps]
            backs = [at for at, step in enumerate(steps) if step < last[at]]
            self._last_trained = last[-1]
        for number, (begin, end) in enumerate(pairwise([0, *backs, len(rows)])):
            if number:
                self._begin_part(steps[begin] - 1)
            if begin < end:
                self._add(mode, steps[begin:end], rows[begin:end])

    def _add(self, mode: str, steps: list[int], rows: list[Row]) -> None:
        self._furthest = max(self._furthest, *steps)
        columns = zip(rows[0], zip(*map(dict.values, rows), strict=True), strict=True)
        for key, values in columns:
            if key not in RESERVED:
                self._parts[-1].add(mode, name_of(key), steps, values)

    def _begin_part(self, start: int) -> None:
        if start < self._furthest:
            self._resumed_at.append(start)
        self._parts.append(_Part(start))
        self._furthest = start

    def _take_event(self, row: Row) -> None:
        try:
            row = unmarked(row)
        except RecursionError:
            self._cut_short += 1
            return
        self.whole += 1
        match row:
            case {"event": "before_run"}:
                if _is_step(start := row.get("iter", 0)):
                    self._last_trained = None
                    self._begin_part(start)
                self._begun_again = self._begun_again or self._ended is not None
                self._ended = None
            case {"event": "after_run", "reason": str(reason), **rest}:
                self._ended = f"error: {error}" if (error := rest.get("error")) else reason
                self._begun_again = False
            case {"event": "run_info", "info": dict(info)}:
                self._info |= {str(key): str(value) for key, value in info.items()}


def _kind(row: Row) -> tuple[Any, ...]:
    return row.get("mode"), *row


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= FURTHEST


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


def _merged(parts: list[_Part]) -> tuple[list[Curve], int]:
    """Return the curves over all parts, and the number of records that later parts replaced."""
    starts = [part.start for part in parts[1:]]
    limits = [*accumulate([math.inf, *reversed(starts)], min)]  # of the last part first
    pieces: dict[tuple[str, str], list[tuple[Integers, Floats]]] = {
        curve: [] for part in parts for curve in part.curves
    }
    superseded = 0
    for part, limit in zip(reversed(parts), limits, strict=True):
        for curve in [*part.curves]:
            later = pieces[curve]
            again = int(later[-1][0][0]) if later else math.inf  # from there on a later part has the curve
            steps, values = part.take(curve)
            kept = (steps <= limit) & (steps < again)
            superseded += len(steps) - int(kept.sum())
            if kept.any():
                later.append((steps[kept], values[kept]))
    curves = []
    for (mode, name), found in pieces.items():
        if found:
            steps, values = (np.concatenate(column[::-1]) for column in zip(*found, strict=True))
            found.clear()
            curves.append(reduced(name, mode, steps, values))
    return curves, superseded


def reduced(name: str, mode: str, steps: Integers, values: Floats) -> Curve:
    """Return the curve of at least one record, in the order of their steps.

    Up to `POINTS` records, each is a point. Beyond that, equally many neighbours are merged into a point; the
    least and greatest values stay exact.
    """
    finite = np.isfinite(values)
    known, bad = np.where(finite, values, np.nan), steps[~finite]
    least, greatest = (int(np.nanargmin(known)), int(np.nanargmax(known))) if finite.any() else (None, None)
    width = -(-len(steps) // POINTS)
    starts = np.arange(0, len(steps), width)
    ends = np.minimum(starts + width, len(steps)) - 1
    low, high = np.fmin.reduceat(known, starts), np.fmax.reduceat(known, starts)
    numbers = np.add.reduceat(finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # divided first: no sum is infinite
        means = np.add.reduceat(np.where(finite, values, 0.0) / width, starts) * (width / numbers)
    return Curve(
        name=name,
        mode=mode,
        count=len(steps),
        first=float(values[0]),
        last=float(values[-1]),
        last_step=int(steps[-1]),
        least=math.nan if least is None else float(values[least]),
        least_step=None if least is None else int(steps[least]),
        greatest=math.nan if greatest is None else float(values[greatest]),
        greatest_step=None if greatest is None else int(steps[greatest]),
        not_finite=len(bad),
        first_not_finite=int(bad[0]) if len(bad) else None,
        steps=(steps[starts] + (steps[ends] - steps[starts]) // 2).tolist(),
        mean=np.clip(means, low, high).tolist(),  # rounding may leave the range
        low=low.tolist() if width > 1 else [],
        high=high.tolist() if width > 1 else [],
    )
