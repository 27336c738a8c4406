"""Format events as console lines; used by `ConsoleWriter` and its bars. Nothing here does I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from eventloop.costs.step_clock import TIMES
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.reporting.advice import LOADER_SHARE

POSITION, ETA, SPEED = range(3)
"""Keys of the fields of a line other than scalars."""
NUMBER_WIDTH, TIME_WIDTH, ETA_WIDTH, SPEED_WIDTH = 10, 7, 8, 11
"""Widths in characters, of values such as `9.9000e-05`, `12.3456`, `10:00:00` and `0.0815 it/s`."""


class Columns:
    """Align the fields of successive lines: from its second appearance on, a field keeps its column.

    A line without the field leaves the column blank. A column grows with the widest text so far. Fields that
    appear for the first time are at the end of their line.
    """

    LIMIT = 100
    """The largest number of columns."""

    def __init__(self) -> None:
        self._widths: dict[str | int, int] = {}
        self._places: dict[str | int, None] = {}

    def line(self, fields: Mapping[str | int, str]) -> str:
        """Return one line with `fields` in their columns."""
        for key, text in fields.items():
            if key in self._widths and len(self._places) < self.LIMIT:
                self._places.setdefault(key)
            self._widths[key] = max(self._widths.get(key, 0), len(text))
        placed = [fields.get(key, "").ljust(self._widths[key]) for key in self._places]
        others = [text for key, text in fields.items() if key not in self._places]
        return "  ".join([*placed, *others]).rstrip()


class Pace:
    """Smooth the seconds per iteration, so that the displayed speed does not flicker.

    The first values are averaged. Later values enter an exponential moving average, in which a slow start
    loses its weight.
    """

    WEIGHT = 0.2
    """The weight of a new value in the moving average."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def update(self, seconds: float) -> None:
        """Add the mean seconds per iteration of an interval; ignore NaN, infinity and values up to 0."""
        if math.isfinite(seconds) and seconds > 0:
            self._count += 1
            self.seconds += (seconds - self.seconds) * max(self.WEIGHT, 1 / self._count)

    def eta(self, event: ScalarsLogged) -> str:
        """Return the time until the run's last iteration as h:mm:ss, or "" if it is unknown."""
        if not self.seconds or event.max_iters is None:
            return ""
        left = round(min(max(0, event.max_iters - event.step) * self.seconds, 1e12))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"

    @property
    def speed(self) -> str:
        """Return iterations per second such as `203.4 it/s`, or "" while the speed is unknown."""
        if not self.seconds:
            return ""
        rate = 1 / self.seconds
        digits = ".0f" if rate >= 1000 else ".1f" if rate >= 10 else ".3g"
        return f"{rate:{digits}} it/s"


def train_line(
    event: ScalarsLogged, scalars: Mapping[str, float], run: Run, pace: Pace, columns: Columns
) -> str:
    """Format a training line: MMEngine's line, with the speed added and the times last.

    Epoch(train) [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:12  203.4 it/s  loss: 0.1234  time: 0.0049
    """
    fields: dict[str | int, str] = {POSITION: _position(event, run)}
    rates = [name for name in scalars if is_rate(name)]
    fields |= _named(scalars, rates)
    if eta := pace.eta(event):
        fields[ETA] = f"eta: {eta:<{ETA_WIDTH}}"
    if speed := pace.speed:
        fields[SPEED] = f"{speed:<{SPEED_WIDTH}}"
    return columns.line(fields | _named(scalars, _times_last(name for name in scalars if name not in rates)))


def between_line(event: ScalarsLogged, scalars: Mapping[str, float], run: Run) -> str:
    """Format values that were put outside of iterations: `Epoch(train) [2][180/180]  a: 0.5000`."""
    fields: dict[str | int, str] = {POSITION: _position(event, run)}
    return Columns().line(fields | _named(scalars, _times_last(scalars)))


def score_line(event: ScalarsLogged, columns: Columns) -> str:
    """Format the scalars of an evaluation as a line: `Epoch(val)  [2]  accuracy: 0.9800  loss: 0.0700`."""
    if event.max_epochs is None:
        position = f"Iter({event.mode}) [{_padded(event.step, event.max_iters)}]"
    else:
        position = f"Epoch({event.mode}) {_epoch(event.epoch, event.max_epochs)}"
    fields: dict[str | int, str] = {POSITION: position}
    return columns.line(fields | _named(event.scalars, _times_last(event.scalars)))


def _times_last(names: Iterable[str]) -> list[str]:
    """Sort `names` so that times are last, in the order of `TIMES`; the others keep their order."""
    return sorted(names, key=lambda name: TIMES.index(name) if name in TIMES else -1)


def _named(scalars: Mapping[str, float], names: Iterable[str]) -> dict[str | int, str]:
    """Return `name: value` for each name, padded to the usual width of such values."""
    return {
        name: f"{name}: {number(name, scalars[name]):<{TIME_WIDTH if name in TIMES else NUMBER_WIDTH}}"
        for name in names
    }


def number(name: str, value: float) -> str:
    """Format a value with four decimals.

    Learning rates, and values below 1e-3 or from 1e6 on, are in scientific notation; times never are.
    """
    small = value != 0 and not 1e-3 <= abs(value) < 1e6 and not name.endswith("time")
    return f"{value:.4e}" if is_rate(name) or small else f"{value:.4f}"


def bar_fields(event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> list[str]:
    """Return the fields after a progress bar, the most important first, each with a constant width."""
    fields = []
    if "loss" in latest:
        fields.append(f"  loss {_short('loss', latest['loss']):>7}")
    if pace.speed:
        fields.append(f"  {pace.speed:>10}")
    if eta := pace.eta(event):
        fields.append(f"  eta {eta:>{ETA_WIDTH}}")
    waits, whole = latest.get("data_time", 0.0), latest.get("time", 0.0)
    if waits > LOADER_SHARE * whole:
        fields.append(f"  data {waits / whole:.0%}")
    if "lr" in latest:
        fields.append(f"  lr {_short('lr', latest['lr']):>7}")
    return fields


def _short(name: str, value: float) -> str:
    """Format a value in at most seven characters, with as many digits as fit."""
    texts = [number(name, value), f"{value:.1e}", f"{value:.0e}"]
    if abs(value) >= 1:
        texts.insert(1, f"{value:.5g}")
    return next((text for text in texts if len(text) <= 7), texts[-1])


@lru_cache(maxsize=4096)
def is_rate(name: str) -> bool:
    """Return whether `name` is a learning rate, such as `lr`, `base_lr` or `lr/group1`."""
    return any(part == "lr" or part.endswith("_lr") for part in name.split("/"))


def _position(event: ScalarsLogged, run: Run) -> str:
    iteration = iteration_shown(event, run)
    if event.max_epochs is None:
        return f"Iter({event.mode}) [{of(iteration, event.max_iters)}]"
    shown = of(iteration, run.iters_per_epoch)
    epoch = min(event.epoch + 1, event.max_epochs)  # after the training `epoch` is that of no iteration
    return f"Epoch({event.mode}) {_epoch(epoch, event.max_epochs)}[{shown}]"


def iteration_shown(event: ScalarsLogged, run: Run) -> int:
    """Return the number of iterations in the epoch so far, or in a run without epochs."""
    length = None if event.max_epochs is None else run.iters_per_epoch
    return (event.step - 1) % length + 1 if length else event.step


def is_after_epoch(event: ScalarsLogged, run: Run) -> bool:
    """Return whether values were put when their epoch was over, such as by a handler of after_train_epoch."""
    length = None if event.max_epochs is None else run.iters_per_epoch
    return bool(length) and event.iter == event.step == (event.epoch + 1) * (length or 0)


def of(done: int, total: int | None) -> str:
    """Return ` 40/180`, padded to the width of the total, or `40` without a total."""
    return str(done) if total is None else f"{_padded(done, total)}/{total}"


def _epoch(number: int, total: int) -> str:
    return f"[{number}]".rjust(len(str(total)) + 2)


def _padded(done: int, total: int | None) -> str:
    return f"{done:>{len(str(total or 0))}}"
