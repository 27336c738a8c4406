"""What the console says: one line of text for a fact. Nothing here writes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    EventsDropped,
    HandlerFailed,
    PreemptionRequested,
    ScalarsLogged,
    SlowHandler,
    StopRequested,
    TextLogged,
)
from eventloop.events.base import event_name
from eventloop.events.run import Run

TIMES = ("time", "data_time", "step_time", "hook_time")
POSITION, ETA, SPEED = range(3)
"""Fields of a line that have no scalar's name."""
NUMBER_WIDTH, TIME_WIDTH, ETA_WIDTH, SPEED_WIDTH = 10, 7, 8, 11
"""Characters that `9.9000e-05`, `12.3456`, `10:00:00` and `0.0815 it/s` take."""


class Columns:
    """Where the fields of a line are: a field that comes a second time keeps its place from then on.

    A line that lacks the field leaves the place blank. A place grows where a text is wider than those before it. Fields
    that come once, or for the first time, are at the end.
    """

    LIMIT = 100

    def __init__(self) -> None:
        self._widths: dict[str | int, int] = {}
        self._places: dict[str | int, None] = {}

    def line(self, fields: Mapping[str | int, str]) -> str:
        """Lay out a line."""
        for key, text in fields.items():
            if key in self._widths and len(self._places) < self.LIMIT:
                self._places.setdefault(key)
            self._widths[key] = max(self._widths.get(key, 0), len(text))
        placed = [fields.get(key, "").ljust(self._widths[key]) for key in self._places]
        others = [text for key, text in fields.items() if key not in self._places]
        return "  ".join([*placed, *others]).rstrip()


class Pace:
    """Seconds an iteration, smoothed so that what is shown does not flicker: the mean of the first values, later
    an exponential average that forgets a slow start."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def update(self, seconds: float) -> None:
        """Enter the mean of another interval."""
        if math.isfinite(seconds) and seconds > 0:
            self._count += 1
            self.seconds += (seconds - self.seconds) * max(self.WEIGHT, 1 / self._count)

    def eta(self, event: ScalarsLogged) -> str:
        """Time until the run's last iteration as h:mm:ss, or nothing where it is unknown."""
        if not self.seconds or event.max_iters is None:
            return ""
        left = round(min(max(0, event.max_iters - event.step) * self.seconds, 1e12))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"

    @property
    def speed(self) -> str:
        """`203.4 it/s`, with three digits where an iteration takes long; nothing while it is unknown."""
        if not self.seconds:
            return ""
        rate = 1 / self.seconds
        return (
            f"{rate:.0f} it/s" if rate >= 1000 else f"{rate:.1f} it/s" if rate >= 10 else f"{rate:.3g} it/s"
        )


def train_line(
    event: ScalarsLogged, scalars: Mapping[str, float], run: Run, pace: Pace, columns: Columns
) -> str:
    """`Epoch(train) [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:12  203.4 it/s  loss: 0.1234  time: 0.0049`: MMEngine's
    line with the speed, and the times last."""
    fields: dict[str | int, str] = {POSITION: _position(event, run)}
    rates = [name for name in scalars if is_rate(name)]
    fields |= _named(scalars, rates)
    if eta := pace.eta(event):
        fields[ETA] = f"eta: {eta:<{ETA_WIDTH}}"
    if speed := pace.speed:
        fields[SPEED] = f"{speed:<{SPEED_WIDTH}}"
    return columns.line(fields | _named(scalars, _times_last(name for name in scalars if name not in rates)))


def score_line(event: ScalarsLogged, columns: Columns) -> str:
    """`Epoch(val)  [2]  accuracy: 0.9800  loss: 0.0700`."""
    if event.max_epochs is None:
        position = f"Iter({event.mode}) [{_padded(event.step, event.max_iters)}]"
    else:
        position = f"Epoch({event.mode}) {_epoch(event.epoch, event.max_epochs)}"
    fields: dict[str | int, str] = {POSITION: position}
    return columns.line(fields | _named(event.scalars, _times_last(event.scalars)))


def _times_last(names: Iterable[str]) -> list[str]:
    """Their order in a line; a sort that keeps the others in theirs."""
    return sorted(names, key=lambda name: TIMES.index(name) if name in TIMES else -1)


def _named(scalars: Mapping[str, float], names: Iterable[str]) -> dict[str | int, str]:
    """`name: value` of each, as wide as most of its values are."""
    return {
        name: f"{name}: {number(name, scalars[name]):<{TIME_WIDTH if name in TIMES else NUMBER_WIDTH}}"
        for name in names
    }


def notice(event: Event) -> str:
    """One line about anything else."""
    match event:
        case TextLogged():
            return f"{event.name}: {event.text}" if event.name else event.text
        case CheckpointSaved():
            return f"Checkpoint saved: {event.path} ({event.bytes / 1e6:.1f} MB, {event.seconds:.2f} s)"
        case CheckpointFailed():
            return f"Checkpoint FAILED: {event.path}: {one_line(event.error)}"
        case AfterLoadCheckpoint():
            return f"Checkpoint loaded: {event.path}"
        case StopRequested() | PreemptionRequested():
            what = "Stop" if isinstance(event, StopRequested) else "Preemption"
            return f"{what} requested: {event.reason}"
        case HandlerFailed():
            return f"{event.handler} FAILED ({event.count}x): {one_line(event.error)}"
        case EventsDropped():
            return f"{event.handler} dropped {event.count} events: there was no room for them"
        case SlowHandler():
            return f"{event.handler} is slow: p99 {event.cost * 1e3:.2f} ms over {event.count} calls"
        case AfterRun():
            error = f": {one_line(event.error)}" if event.error else ""
            return f"Run ended at iteration {event.iter}: {event.reason}{error}"
    return f"{event_name(type(event))}: {event}"


def number(name: str, value: float) -> str:
    """Four digits, as a power of ten where four places behind the point would not show them."""
    small = value != 0 and not 1e-3 <= abs(value) < 1e6 and not name.endswith("time")
    return f"{value:.4e}" if is_rate(name) or small else f"{value:.4f}"


@lru_cache(maxsize=4096)
def is_rate(name: str) -> bool:
    """True for learning rates: `lr`, `base_lr`, `lr/group1`."""
    return any(part == "lr" or part.endswith("_lr") for part in name.split("/"))


def one_line(text: str) -> str:
    """`text` without its line breaks."""
    return " ".join(text.split())


def _position(event: ScalarsLogged, run: Run) -> str:
    if event.max_epochs is None:
        return f"Iter({event.mode}) [{_of(event.step, event.max_iters)}]"
    length = run.iters_per_epoch
    iteration = _of((event.step - 1) % length + 1 if length else event.step, length)
    return f"Epoch({event.mode}) {_epoch(event.epoch + 1, event.max_epochs)}[{iteration}]"


def _epoch(number: int, total: int) -> str:
    return f"[{number}]".rjust(len(str(total)) + 2)


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{_padded(done, total)}/{total}"


def _padded(done: int, total: int | None) -> str:
    return f"{done:>{len(str(total or 0))}}"
