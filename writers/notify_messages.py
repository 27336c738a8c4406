"""Make the messages of `NotifyWriter` from the events of a run."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from math import isnan

from eventloop.checkpoint.retention.best import infer_rule
from eventloop.events import (
    COMPLETED,
    AfterRun,
    AfterTest,
    AfterVal,
    BeforeRun,
    BeforeTrain,
    CheckpointFailed,
    Event,
    HandlerFailed,
    InvalidLoss,
    PreemptionRequested,
    RolledBack,
    ScalarsLogged,
)
from eventloop.events.base import event_name
from eventloop.events.run import Run
from eventloop.util.formatting import duration, on_a_line, value_text
from eventloop.util.printable import printable
from eventloop.writers.notify_addresses import Message
from eventloop.writers.tracker_values import run_name_of

FIELD_LENGTH = 1000
"""The number of characters of a field, such as an error, that a message has."""
TITLE_LENGTH = 150
_KINDS: Mapping[type[Event], str] = {
    CheckpointFailed: "failure",
    HandlerFailed: "failure",
    InvalidLoss: "failure",
    PreemptionRequested: "warning",
    RolledBack: "warning",
}
_LEFT_OUT = ("max_iters", "max_epochs", "data")


class Progress:
    """The facts about a run that the message of its end has: scores, and when it began."""

    NEEDED = (BeforeRun, BeforeTrain, AfterVal, AfterTest, ScalarsLogged)

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, when: float | None) -> None:
        self._began = self._now = when
        self.trains = False
        """Whether the run is a training, and not a validation, test or prediction alone."""
        self._last: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._test: dict[str, float] = {}
        self._loss: float | None = None

    def receive(self, when: float, event: Event) -> None:
        """Receive an event and the Unix time of its emit."""
        self._now = when
        match event:
            case BeforeRun():
                self._begin(when)
            case BeforeTrain():
                self.trains = True
            case AfterVal(reason="completed"):
                self._last.update(event.metrics)
                for name, score in event.metrics.items():
                    self._record_best(name, score)
            case AfterTest(reason="completed"):
                self._test = event.metrics
            case ScalarsLogged(mode="train"):
                self._loss = event.scalars.get("loss", self._loss)

    def _record_best(self, name: str, score: float) -> None:
        try:
            choose = min if infer_rule(name) == "less" else max
        except ValueError:  # nobody has said which of its values are better
            return
        if not isnan(score):
            self._best[name] = choose(self._best.get(name, score), score)

    def lines(self) -> list[str]:
        """Return the lines about time and scores."""
        lines = []
        if self._began is not None and self._now is not None:  # else the begin is in no delivered event
            lines.append(f"time: {duration(max(0.0, self._now - self._began))}")
        for name, score in self._last.items():
            best = f", best {value_text(self._best[name])}" if name in self._best else ""
            lines.append(f"{on_a_line(name)}: last {value_text(score)}{best}")
        lines += [f"test {on_a_line(name)}: {value_text(score)}" for name, score in self._test.items()]
        return lines if self._loss is None else [*lines, f"loss in training: {value_text(self._loss)}"]


class Texts:
    """Make messages that name the run, its machine and its directory.

    Args:
        run: the facts of the run.
    """

    def __init__(self, run: Run) -> None:
        self._name = on_a_line(run_name_of(run, None), 60)
        self._where = f"directory: {on_a_line(socket.gethostname())}:{on_a_line(run.work_dir)}"

    def of_event(self, event: Event, progress: Progress, held_back: Counter[str]) -> Message:
        """Return the message about an event, which counts the events that had none."""
        if isinstance(event, AfterRun):
            headline, kind = _end_of(event, trains=progress.trains)
            lines = [*_end_lines(event), *progress.lines()]
        else:
            headline, kind = event_name(type(event)).replace("_", " "), _KINDS.get(type(event), "info")
            lines = _field_lines(event)
        return self._message(headline, lines, kind, held_back)

    def of_hang(self, seconds: float, held_back: Counter[str]) -> Message:
        """Return the message that no iteration has ended for some time."""
        text = f"No iteration has ended for {duration(seconds)}."
        lines = [f"{text} The run may hang, or do something that takes long between two iterations."]
        return self._message("no progress", lines, "warning", held_back)

    def of_held_back(self, held_back: Counter[str]) -> Message:
        """Return the message that only counts the events that had none."""
        return self._message("more events", [], "info", held_back)

    def _message(self, headline: str, lines: list[str], kind: str, held_back: Counter[str]) -> Message:
        if held_back:
            counts = ", ".join(f"{count:,} {name}" for name, count in held_back.most_common())
            lines = [*lines, f"events without a message of their own since the last one: {counts}"]
        title = on_a_line(f"{self._name}: {headline}", TITLE_LENGTH)
        return Message(title, "\n".join([*lines, self._where]), kind)


def _end_of(event: AfterRun, *, trains: bool) -> tuple[str, str]:
    """Return how a run ended as the end of a title, and the kind of the message."""
    what = "training" if trains else "run"
    if (event.error or "").startswith(KeyboardInterrupt.__name__):
        return f"{what} interrupted", "warning"
    if event.error is not None:
        return f"{what} failed", "failure"
    if event.signal is not None:
        return f"{what} ended by {event.signal}", "warning"
    if event.reason == COMPLETED:
        return f"{what} completed", "success"
    return f"{what} stopped: {event.reason}", "info"


def _end_lines(event: AfterRun) -> list[str]:
    lines = [f"reason: {_shortened(event.reason)}"]
    if event.error is not None:
        lines.append(f"error: {_shortened(event.error)}")
    if event.signal is not None:
        lines.append(f"signal: {event.signal}")
    of = f" of {event.max_iters:,}" if event.max_iters is not None else ""
    return [*lines, f"iterations: {event.iter:,}{of}, epochs: {event.epoch:,}"]


def _field_lines(event: Event) -> list[str]:
    fields = ((name, getattr(event, name)) for name in event.__struct_fields__ if name not in _LEFT_OUT)
    return [f"{name}: {_shortened(str(value))}" for name, value in fields if value not in ("", None)]


def _shortened(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= FIELD_LENGTH else f"{shown[:FIELD_LENGTH]}…"
