"""Read the curves of a run from its `metrics.jsonl`, and reduce each to a bounded number of points.

The file is read once. Meanwhile the records of a curve are two arrays of numbers, 16 bytes for each record.
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
"""How many bytes are read and decoded at a time, which bounds the memory for the decoded objects."""
POINTS = 2000
"""The largest number of points of one curve; a screen shows no more."""
TEXTS, TEXT = 20, 10_000
"""The largest number of texts that are kept, and of characters of each."""
FURTHEST = (1 << 63) - 1
"""The largest step: steps are stored in 64 bits."""

Row = dict[str, Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Recorded = tuple[Integers, Floats]
"""The steps of the records of a curve, and their values."""
_decoder = msgspec.json.Decoder(Row)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one scalar over the steps of a run, as at most `POINTS` points.

    A point has the value of one record, or in a long run the mean, least and greatest value of about
    `count / len(steps)` consecutive records. It is NaN (null in JSON) if none of these values is finite.
    """

    name: str
    mode: str
    """The mode of the records: train, val or test."""
    count: int
    """Number of records."""
    first: float
    last: float
    last_step: int
    """The step of the last record; the last item of `steps` may be smaller, the middle of its records."""
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
    """Hold a text that the run has logged, such as that of the command `note`."""

    step: int
    mode: str
    name: str
    text: str


class RunLog(msgspec.Struct, kw_only=True):
    """Hold the content of a run's `metrics.jsonl`: curves, resumes, texts, and how the run ended."""

    whole: int = 0
    """The number of complete lines that JSONLWriter has written."""
    curves: list[Curve] = []
    """The curves, in the order of their first records."""
    resumed_at: list[int] = []
    """For each resume from before the last logged step, the number of completed iterations."""
    superseded: int = 0
    """The number of records that a resumed run has logged again; curves contain only the later ones."""
    cut_short: int = 0
    """The number of lines that are damaged or were cut short by a kill.

    A run under way may have one such line, its last.
    """
    ended: str | None = None
    """How the last call of `train`, `val` or `test` ended: "completed", another reason, or the error.

    None if the call has not ended, or if its end was not logged.
    """
    begun_again: bool = False
    """Whether a later call of `train`, `val` or `test` has begun and not ended: it runs or was killed."""
    info: dict[str, str] = {}
    """The facts of the `run_info` events, by name."""
    texts: list[TextLine] = []
    """The last `TEXTS` texts, oldest first, each of at most `TEXT` characters."""


def read_curves(path: Path) -> RunLog:
    """Read the curves of a `metrics.jsonl`, without records that a resumed run has logged again.

    Each `before_run` or `rolled_back` line begins a new part of the run, and so does a smaller training step
    in a file without such lines. From its first step on, the records of a later part replace all records of
    earlier parts.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not empty, and JSONLWriter has written no line of it.
    """
    return _read(path).log()


def read_records(path: Path, is_chosen: Callable[[str, str], bool]) -> dict[tuple[str, str], Recorded]:
    """Read all records of the chosen curves of a `metrics.jsonl`, by mode and name.

    Args:
        path: the file.
        is_chosen: returns for a mode and a name whether the curve is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not empty, and JSONLWriter has written no line of it.
    """
    curves = _read(path).records()
    return {(mode, name): recorded for mode, name, recorded in curves if is_chosen(mode, name)}


def _read(path: Path) -> _Reader:
    """Read a whole `metrics.jsonl`; raise ValueError if JSONLWriter has written no line of it."""
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
    """Collect the records of one curve, in the order of the file.

    A part of the run lasts until a resume or rollback, after which records may have smaller steps. The parts
    are numbered from 0.
    """

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")
        self.begins: dict[int, int] = {}
        """By the number of each part of the run that has records, the index of its first one in `steps`."""

    def latest(self, limits: Sequence[float]) -> Recorded:
        """Return the steps and values of the records that no later part of the run has replaced.

        Args:
            limits: for each part, the largest step of a record that no later part replaces: the least number
                of completed iterations at which a later part begins, infinite for the last part.
        """
        steps, values = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        is_latest = np.ones(len(steps), bool)
        end = len(steps)
        replaced_from = math.inf  # from this step on, the records of later parts are the latest
        for part, begin in reversed(self.begins.items()):
            part_steps = steps[begin:end]
            is_latest[begin:end] = (part_steps <= limits[part]) & (part_steps < replaced_from)
            if is_latest[begin:end].any():
                replaced_from = int(part_steps[is_latest[begin:end]][0])
            end = begin
        return steps[is_latest], values[is_latest]


class _Reader:
    """Decode the lines of a `metrics.jsonl`, and collect the records of its curves and the other contents.

    A new part of the run begins at each `before_run` or `rolled_back` line. In a file without `before_run`
    lines, one also begins where the training step becomes smaller.
    """

    def __init__(self) -> None:
        self._log = RunLog()
        self._starts = [0]  # the number of completed iterations at the begin of each part
        self._curves: defaultdict[tuple[str, str], _Records] = defaultdict(_Records)
        self._furthest = 0  # the largest step of the current part
        self._last_trained: int | None = 0  # the last training step; None once a `before_run` line was read

    def read(self, lines: list[bytes]) -> None:
        """Read some lines, and skip those that JSONLWriter has not written."""
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
        self._log.curves = [reduced(name, mode, *recorded) for mode, name, recorded in self.records()]
        return self._log

    def records(self) -> Iterator[tuple[str, str, Recorded]]:
        """Yield the mode, the name and the records of each curve, and remove the curve from this object."""
        # for each part the least start of the parts after it: minima of the starts, from the last one on
        limits = [*accumulate([math.inf, *self._starts[:0:-1]], min)][::-1]
        for mode, key in [*self._curves]:
            records = self._curves.pop((mode, key))
            steps, values = records.latest(limits)
            self._log.superseded += len(records.steps) - len(steps)
            if len(steps):
                yield mode, name_of(key), (steps, values)

    def _decode(self, lines: list[bytes]) -> list[Row]:
        """Return the lines as rows, decoded together; one by one if any of them is damaged."""
        try:
            return _decoder.decode_lines(b"".join(lines))
        except UNREADABLE:
            rows = [self._decode_line(line) for line in lines if line.strip()]
            return [row for row in rows if row]

    def _decode_line(self, line: bytes) -> Row | None:
        """Return a line as a row; count a damaged one, and return None for it."""
        try:
            return _decoder.decode(line)
        except UNREADABLE:
            self._log.cut_short += 1
            return None

    def _read_scalars(self, mode: str, step: int, row: Row) -> None:
        """Add the numbers of a row to their curves; begin a new part if a step shows a resume."""
        self._log.whole += 1
        if mode == "train" and self._last_trained is not None:
            if step < self._last_trained:
                self._begin_part(step - 1)  # a training step counts the iteration that has just ended
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
        """Begin a part of the run after `start` completed iterations, as after a resume or rollback."""
        if start < self._furthest:
            self._log.resumed_at.append(start)
        self._starts.append(start)
        self._furthest = start

    def _read_event(self, row: Row) -> None:
        """Use the row of an event: begins and ends of calls, rollbacks, texts and `run_info`."""
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
    """Return whether a value can be a step: an int from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value <= FURTHEST


def as_number(value: Any) -> float | None:
    """Convert a number, or the name of NaN or an infinity, to a float.

    Return None for any other value, and for an int beyond the largest float.
    """
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return NUMBERS.get(value) if isinstance(value, str) else None


def reduced(name: str, mode: str, steps: Integers, values: Floats) -> Curve:
    """Return a curve of at most `POINTS` points, from one or more records in the order of their steps.

    If there are more records, each point merges equally many consecutive ones. The least and greatest values
    of the curve stay exact.
    """
    finite = np.isfinite(values)
    finite_or_nan, bad = np.where(finite, values, np.nan), steps[~finite]
    least, greatest = None, None  # indices of records
    if finite.any():
        least, greatest = int(np.nanargmin(finite_or_nan)), int(np.nanargmax(finite_or_nan))
    width = -(-len(steps) // POINTS)  # records in a point
    starts = np.arange(0, len(steps), width)
    ends = np.minimum(starts + width, len(steps)) - 1
    low, high = np.fmin.reduceat(finite_or_nan, starts), np.fmax.reduceat(finite_or_nan, starts)
    finite_counts = np.add.reduceat(finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # divided before the sum, so that no sum of large values is infinite
        means = np.add.reduceat(np.where(finite, values, 0.0) / width, starts) * (width / finite_counts)
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
        mean=np.clip(means, low, high).tolist(),  # by rounding, a mean may lie outside of its values
        low=low.tolist() if width > 1 else [],
        high=high.tolist() if width > 1 else [],
    )
