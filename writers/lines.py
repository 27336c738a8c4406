"""Format events as lines of text for `ConsoleWriter` and its progress bars. Nothing here does I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from eventloop.costs.step_clock import TIMES
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.reporting.advice import LOADER_SHARE

POSITION, ETA, SPEED = range(3)
"""The keys of a line's fields that are not scalars; the key of a scalar's field is the scalar's name."""
NUMBER_WIDTH, TIME_WIDTH, ETA_WIDTH, SPEED_WIDTH = 10, 7, 8, 11
"""Widths in characters of a number, seconds, a remaining time and a speed.

Examples are `9.9000e-05`, `12.3456`, `10:00:00` and `0.0815 it/s`.
"""


class Columns:
    """Align the fields of successive lines in columns.

    A field gets a column when it appears for the second time. A line without the field leaves the column
    blank. A column is as wide as its widest text so far. Fields without a column are at the end of the line.
    """

    LIMIT = 100
    """The largest number of columns."""

    def __init__(self) -> None:
        self._widths: dict[str | int, int] = {}  # by key, the length of the longest text so far
        self._columns: dict[str | int, None] = {}  # the keys of the fields with a column, in their order

    def line(self, fields: Mapping[str | int, str]) -> str:
        """Return one line with the texts of `fields` in their columns."""
        for key, text in fields.items():
            if key in self._widths and len(self._columns) < self.LIMIT:
                self._columns.setdefault(key)
            self._widths[key] = max(self._widths.get(key, 0), len(text))
        aligned = [fields.get(key, "").ljust(self._widths[key]) for key in self._columns]
        others = [text for key, text in fields.items() if key not in self._columns]
        return "  ".join([*aligned, *others]).rstrip()


class Pace:
    """Smooth the seconds per iteration, so that the displayed speed does not flicker.

    The result is the mean of the first five values, and after them an exponential moving average, in which a
    slow start loses its weight.
    """

    WEIGHT = 0.2
    """The weight of a new value in the moving average."""

    def __init__(self) -> None:
        self.seconds = 0.0  # the smoothed seconds per iteration; 0 before the first value
        self._count = 0

    def update(self, seconds: float) -> None:
        """Add the seconds per iteration of a logging interval; ignore NaN, infinity and values up to 0."""
        if math.isfinite(seconds) and seconds > 0:
            self._count += 1
            self.seconds += (seconds - self.seconds) * max(self.WEIGHT, 1 / self._count)

    def eta(self, event: ScalarsLogged) -> str:
        """Return the time until the run's last iteration as h:mm:ss, or "" if it is unknown."""
        if not self.seconds or event.max_iters is None:
            return ""
        remaining = max(0, event.max_iters - event.step) * self.seconds
        seconds = round(min(remaining, 1e12))  # an infinity could not be rounded
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    @property
    def speed(self) -> str:
        """Return iterations per second such as `203.4 it/s`, or "" while the speed is unknown."""
        if not self.seconds:
            return ""
        rate = 1 / self.seconds
        if rate >= 1000:
            return f"{rate:.0f} it/s"
        return f"{rate:.1f} it/s" if rate >= 10 else f"{rate:.3g} it/s"


def train_line(
    event: ScalarsLogged, scalars: Mapping[str, float], run: Run, pace: Pace, columns: Columns
) -> str:
    """Format training scalars as MMEngine does, with the speed added and the times last.

    Epoch(train) [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:12  203.4 it/s  loss: 0.1234  time: 0.0049
    """
    fields: dict[str | int, str] = {POSITION: _position(event, run)}
    rates = [name for name in scalars if is_rate(name)]
    others = [name for name in scalars if name not in rates]
    fields |= _named(scalars, rates)
    if eta := pace.eta(event):
        fields[ETA] = f"eta: {eta:<{ETA_WIDTH}}"
    if speed := pace.speed:
        fields[SPEED] = f"{speed:<{SPEED_WIDTH}}"
    fields |= _named(scalars, _times_last(others))
    return columns.line(fields)


def between_line(event: ScalarsLogged, scalars: Mapping[str, float], run: Run) -> str:
    """Format training scalars without eta, speed and columns: `Epoch(train) [2][180/180]  a: 0.5000`."""
    fields: dict[str | int, str] = {POSITION: _position(event, run)}
    return Columns().line(fields | _named(scalars, _times_last(scalars)))


def score_line(event: ScalarsLogged, columns: Columns) -> str:
    """Format the scores of a validation or test: `Epoch(val)  [2]  accuracy: 0.9800  loss: 0.0700`."""
    if event.max_epochs is None:
        position = f"Iter({event.mode}) [{_padded(event.step, event.max_iters)}]"
    else:
        position = f"Epoch({event.mode}) {_epoch(event.epoch, event.max_epochs)}"
    fields: dict[str | int, str] = {POSITION: position}
    return columns.line(fields | _named(event.scalars, _times_last(event.scalars)))


def _times_last(names: Iterable[str]) -> list[str]:
    """Return `names` with the names in `TIMES` last, in the order of `TIMES`; others keep their order."""
    return sorted(names, key=lambda name: TIMES.index(name) if name in TIMES else -1)


def _named(scalars: Mapping[str, float], names: Iterable[str]) -> dict[str | int, str]:
    """Return, by name, the text `name: value` of each scalar in `names`, padded to the usual width."""
    texts: dict[str | int, str] = {}
    for name in names:
        width = TIME_WIDTH if name in TIMES else NUMBER_WIDTH
        texts[name] = f"{name}: {number(name, scalars[name]):<{width}}"
    return texts


def number(name: str, value: float) -> str:
    """Format the scalar called `name` with four decimals.

    Learning rates, and values below 1e-3 or from 1e6 on, are in scientific notation. Scalars whose names end
    in "time" never are.
    """
    in_range = value == 0 or 1e-3 <= abs(value) < 1e6 or name.endswith("time")
    return f"{value:.4f}" if in_range and not is_rate(name) else f"{value:.4e}"


def bar_fields(event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> list[str]:
    """Return the texts after a progress bar, the most important first: loss, speed, eta, data, lr.

    Args:
        event: the last training event.
        latest: the last value of each scalar. The share of the time that the loop waits for data is shown
            only if it is large.
        pace: the seconds per iteration.
    """
    fields = []
    if "loss" in latest:
        fields.append(f"  loss {_short('loss', latest['loss']):>7}")
    if pace.speed:
        fields.append(f"  {pace.speed:>10}")
    if eta := pace.eta(event):
        fields.append(f"  eta {eta:>{ETA_WIDTH}}")
    data_seconds, seconds = latest.get("data_time", 0.0), latest.get("time", 0.0)
    if data_seconds > LOADER_SHARE * seconds:
        fields.append(f"  data {data_seconds / seconds:.0%}")
    if "lr" in latest:
        fields.append(f"  lr {_short('lr', latest['lr']):>7}")
    return fields


def _short(name: str, value: float) -> str:
    """Format a value in at most seven characters, with as many digits as fit."""
    texts = [number(name, value), f"{value:.1e}", f"{value:.0e}"]  # from the most digits to the fewest
    if abs(value) >= 1:
        texts.insert(1, f"{value:.5g}")
    return next((text for text in texts if len(text) <= 7), texts[-1])


@lru_cache(maxsize=4096)
def is_rate(name: str) -> bool:
    """Return whether `name` is a learning rate, such as `lr`, `base_lr` or `lr/group1`."""
    return any(part == "lr" or part.endswith("_lr") for part in name.split("/"))


def _position(event: ScalarsLogged, run: Run) -> str:
    """Return the head of a training line: `Epoch(train) [2][ 40/180]`, or `Iter(train) [ 40/900]`."""
    iteration = iteration_shown(event, run)
    if event.max_epochs is None:
        return f"Iter({event.mode}) [{of(iteration, event.max_iters)}]"
    epoch = min(event.epoch + 1, event.max_epochs)  # at the end of the training `epoch` is `max_epochs`
    iterations = of(iteration, run.iters_per_epoch)
    return f"Epoch({event.mode}) {_epoch(epoch, event.max_epochs)}[{iterations}]"


def iteration_shown(event: ScalarsLogged, run: Run) -> int:
    """Return the number of completed iterations in the event's epoch, or of the run if it has no epochs."""
    epoch_length = None if event.max_epochs is None else run.iters_per_epoch
    return (event.step - 1) % epoch_length + 1 if epoch_length else event.step


def is_after_epoch(event: ScalarsLogged, run: Run) -> bool:
    """Return whether an event was logged between the last iteration of its epoch and the next epoch."""
    epoch_length = None if event.max_epochs is None else run.iters_per_epoch
    if not epoch_length:
        return False
    # within an iteration `iter` is one less than `step`
    return event.iter == event.step == (event.epoch + 1) * epoch_length


def of(done: int, total: int | None) -> str:
    """Return a text such as ` 40/180`, padded to the width of the total, or `40` without a total."""
    return str(done) if total is None else f"{_padded(done, total)}/{total}"


def _epoch(number: int, total: int) -> str:
    """Return the number of an epoch in brackets, such as ` [2]`, padded to the width of `[total]`."""
    return f"[{number}]".rjust(len(str(total)) + 2)


def _padded(done: int, total: int | None) -> str:
    """Return `done`, padded to the width of `total`."""
    return f"{done:>{len(str(total or 0))}}"
