"""Read the curves of a run from its `metrics.jsonl`, and reduce each to a bounded number of points.

The file is read once. The records of a curve are kept as two arrays of numbers, 16 bytes a record, and are
reduced at the end.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from eventloop.eventlog.jsonl import NUMBERS, RESERVED, UNREADABLE, from_json_value, name_of

BLOCK = 1 << 20
"""The number of bytes read at once; the objects decoded from a block are freed before the next one."""
POINTS = 2000
"""The largest number of points of one curve; a screen shows no more."""
TEXTS, TEXT = 20, 10_000
FURTHEST = (1 << 63) - 1
"""The largest step: steps are stored in 64 bits."""

Row = dict[str, Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Recorded = tuple[Integers, Floats]
"""The steps of the records of a curve, and their values."""
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


class TextLine(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the run has logged, such as the note of a command."""

    step: int
    mode: str
    name: str
    text: str


class RunLog(msgspec.Struct, kw_only=True):
    """The content of a run's `metrics.jsonl`: curves, resumes, and how the run ended."""

    whole: int = 0
    """The number of complete lines in the file."""
    curves: list[Curve] = []
    """The curves, in the order of their first records."""
    resumed_at: list[int] = []
    """The number of completed iterations at each resume from an earlier iteration."""
    superseded: int = 0
    """The number of records of iterations that a resumed run repeated; no curve contains them."""
    cut_short: int = 0
    """The number of lines that are damaged or were cut short by a kill.

    A run under way may have one such line, its last.
    """
    ended: str | None = None
    """How the last call of `train`, `val` or `test` ended: "completed", another reason, or the error.

    None if the call has not ended, or if its end was not logged.
    """
    begun_again: bool = False
    """Whether a call began after an earlier one ended, and has not ended itself: it runs or was killed."""
    info: dict[str, str] = {}
    """The facts of the `run_info` events, by name."""
    texts: list[TextLine] = []
    """The last `TEXTS` texts, oldest first, each of at most `TEXT` characters."""


def read_curves(path: Path) -> RunLog:
    """Read the curves of a `metrics.jsonl`; of iterations that ran twice, only the later records count.

    Each `before_run` or `rolled_back` line begins a new part of the run. In a file without such lines, a new
    part begins where the training step becomes smaller.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not empty and has no line that JSONLWriter writes.
    """
    return _read(path).log()


def read_records(path: Path, wanted: Callable[[str, str], bool]) -> dict[tuple[str, str], Recorded]:
    """Read all records of some curves of a `metrics.jsonl`, by mode and name.

    Args:
        path: the file.
        wanted: returns for a mode and a name whether the curve is read.

    Raises:
        OSError, ValueError: as `read_curves`.
    """
    records = _read(path).records()
    return {(mode, name): found for mode, name, found in records if wanted(mode, name)}


def _read(path: Path) -> _Reader:
    reader = _Reader()
    with path.open("rb") as file:
        while lines := file.readlines(BLOCK):
            reader.read(lines)
        file.seek(0)
        line = file.readline(60)
    if line and not reader.whole:
        raise ValueError(
            f"{path} has no line that JSONLWriter writes: expected JSON objects with `event`, or with `mode` "
            f"and `step`, got the first line {line!r}"
        )
    return reader


class _Records:
    """The records of one curve as two arrays, and the number of records before each part that has some."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")
        self.begins: dict[int, int] = {}

    def latest(self, limits: Sequence[float]) -> Recorded:
        """Return the steps and values that no later part has replaced.

        Args:
            limits: for each part the least step at which a later part begins.
        """
        steps, values = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        kept = np.ones(len(steps), bool)
        again, end = math.inf, len(steps)  # from the step `again` on a later part has the curve
        for part, begin in reversed(self.begins.items()):
            own = steps[begin:end]
            kept[begin:end] = (own <= limits[part]) & (own < again)
            if kept[begin:end].any():
                again = int(own[kept[begin:end]][0])
            end = begin
        return steps[kept], values[kept]


class _Reader:
    """Collect the records of a file, and begin a new part at each resume of the run.

    A file without `before_run` lines has a resume wherever the training step becomes smaller.
    """

    def __init__(self) -> None:
        self._log = RunLog()
        self._starts = [0]  # the number of completed iterations at the begin of each part
        self._curves: defaultdict[tuple[str, str], _Records] = defaultdict(_Records)
        self._furthest = 0  # the largest step of the current part
        self._last_trained: int | None = 0  # None: the file has `before_run` lines, and needs no guess

    def read(self, lines: list[bytes]) -> None:
        """Read some lines; those of other programs are left out."""
        for row in self._decode(lines):
            if "event" in row:
                self._read_event(row)
            elif isinstance(mode := row.get("mode"), str) and is_step(step := row.get("step")):
                self._read_scalars(mode, step, row)

    @property
    def whole(self) -> int:
        """The number of complete lines read so far."""
        return self._log.whole

    def log(self) -> RunLog:
        """Return the content of all lines read so far."""
        self._log.curves = [reduced(name, mode, *found) for mode, name, found in self.records()]
        return self._log

    def records(self) -> Iterator[tuple[str, str, Recorded]]:
        """Yield the mode, the name and the records of each curve; those of each are freed in turn."""
        limits = [*accumulate([math.inf, *self._starts[:0:-1]], min)][::-1]
        for mode, key in [*self._curves]:
            records = self._curves.pop((mode, key))
            steps, values = records.latest(limits)
            self._log.superseded += len(records.steps) - len(steps)
            if len(steps):
                yield mode, name_of(key), (steps, values)

    def _decode(self, lines: list[bytes]) -> list[Row]:
        try:
            return _decoder.decode_lines(b"".join(lines))
        except UNREADABLE:
            rows = [self._decode_line(line) for line in lines if line.strip()]
            return [row for row in rows if row]

    def _decode_line(self, line: bytes) -> Row | None:
        try:
            return _decoder.decode(line)
        except UNREADABLE:
            self._log.cut_short += 1
            return None

    def _read_scalars(self, mode: str, step: int, row: Row) -> None:
        self._log.whole += 1
        if mode == "train" and self._last_trained is not None:
            if step < self._last_trained:
                self._begin_part(step - 1)
            self._last_trained = step
        self._furthest = max(self._furthest, step)
        part = len(self._starts) - 1
        for key, value in row.items():
            if key in RESERVED:
                continue
            records = self._curves[mode, key]
            number = value if type(value) is float else as_number(value)
            if number is not None:
                if part not in records.begins:
                    records.begins[part] = len(records.steps)
                records.steps.append(step)
                records.values.append(number)

    def _begin_part(self, start: int) -> None:
        if start < self._furthest:
            self._log.resumed_at.append(start)
        self._starts.append(start)
        self._furthest = start

    def _read_event(self, row: Row) -> None:
        try:
            row = from_json_value(row)
        except RecursionError:
            self._log.cut_short += 1
            return
        self._log.whole += 1
        match row:
            case {"event": "before_run"}:
                if is_step(start := row.get("iter", 0)):
                    self._last_trained = None
                    self._begin_part(start)
                self._log.begun_again = self._log.begun_again or self._log.ended is not None
                self._log.ended = None
            case {"event": "rolled_back"} if is_step(start := row.get("iter", 0)):
                self._begin_part(start)
            case {"event": "after_run", "reason": str(reason), **rest}:
                self._log.ended = f"error: {error}" if (error := rest.get("error")) else reason
                self._log.begun_again = False
            case {"event": "text_logged", "mode": str(mode), "name": str(name), "text": str(text)}:
                step = step if is_step(step := row.get("step")) else 0
                line = TextLine(step=step, mode=mode, name=name, text=text[:TEXT])
                self._log.texts = [*self._log.texts, line][-TEXTS:]
            case {"event": "run_info", "info": dict(info)}:
                self._log.info |= {str(key): str(value) for key, value in info.items()}


def is_step(value: object) -> TypeGuard[int]:
    """Return whether a value can be a step: an integer of 64 bits that is not negative."""
    return type(value) is int and 0 <= value <= FURTHEST


def as_number(value: Any) -> float | None:
    """Convert a value, or the name of NaN or an infinity, to a float.

    Returns None if it is not a number, or an integer beyond the largest float.
    """
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return NUMBERS.get(value) if isinstance(value, str) else None


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
