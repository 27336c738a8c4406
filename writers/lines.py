"""What the console says: one line of text for a fact. Nothing here writes anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache

from eventloop.catalogue import event_name
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
from eventloop.run import Run

TIMES = ("time", "data_time", "hook_time")


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
        left = max(0, event.max_iters - event.step) * self.seconds
        return str(timedelta(seconds=round(min(left, 1e12))))

    @property
    def speed(self) -> str:
        """`203.4 it/s`, with three digits where an iteration takes long; nothing while it is unknown."""
        if not self.seconds:
            return ""
        rate = 1 / self.seconds
        return f"{rate:.1f} it/s" if rate >= 10 else f"{rate:.3g} it/s"


def train_line(event: ScalarsLogged, scalars: Mapping[str, float], run: Run, pace: Pace) -> str:
    """`Epoch(train) [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:12  203.4 it/s  time: 0.0049  loss: 0.1234`: MMEngine's
    line, and the speed."""
    rates, others = _layout(tuple(scalars))
    parts = [_position(event, run), *(f"{name}: {scalars[name]:.4e}" for name in rates)]
    if eta := pace.eta(event):
        parts.append(f"eta: {eta}")
    if speed := pace.speed:
        parts.append(speed)
    parts += [f"{name}: {number(name, scalars[name])}" for name in others]
    return "  ".join(parts)


@lru_cache(maxsize=256)
def _layout(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """In which order a line has its names: the learning rates, and after the progress the times and the others. It is
    the same line after line."""
    rates = [name for name in names if is_rate(name)]
    times = [name for name in TIMES if name in names]
    return rates, times + [name for name in names if name not in rates and name not in times]


def score_line(event: ScalarsLogged) -> str:
    """`Epoch(val) [2]  accuracy: 0.9800  loss: 0.0700`."""
    unit, done = ("Iter", event.step) if event.max_epochs is None else ("Epoch", event.epoch)
    last = [name for name in TIMES if name in event.scalars]
    scalars = {name: value for name, value in event.scalars.items() if name not in last}
    scalars |= {name: event.scalars[name] for name in last}
    return "  ".join([f"{unit}({event.mode}) [{done}]", *named(scalars)])


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


def named(scalars: Mapping[str, float]) -> list[str]:
    """`name: value`, one a scalar."""
    return [f"{name}: {number(name, value)}" for name, value in scalars.items()]


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
    epoch = f"[{event.epoch + 1}]".rjust(len(str(event.max_epochs)) + 2)
    length = run.iters_per_epoch
    iteration = _of((event.step - 1) % length + 1 if length else event.step, length)
    return f"Epoch({event.mode}) {epoch}[{iteration}]"


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done:>{len(str(total))}}/{total}"
