"""Compose the messages of `NotifyWriter` from the events of a run."""

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
"""The most characters of a field of an event, such as its error, in a message."""
TITLE_LENGTH = 150
"""The most characters of a message's title."""
_KINDS: Mapping[type[Event], str] = {
    CheckpointFailed: "failure",
    HandlerFailed: "failure",
    InvalidLoss: "failure",
    PreemptionRequested: "warning",
    RolledBack: "warning",
}
"""The kind of the message about an event; "info" for other events."""
_LEFT_OUT = ("max_iters", "max_epochs", "data")
"""The fields of an event that its message does not have."""


class Progress:
    """Collect the facts for the message about the end of a run: its duration, scores and loss."""

    NEEDED = (BeforeRun, BeforeTrain, AfterVal, AfterTest, ScalarsLogged)
    """The events that `receive` needs."""

    def __init__(self) -> None:
        self._reset(None)

    def _reset(self, began: float | None) -> None:
        """Reset the facts for a new run; `began` is the Unix time of its begin, or None if it is unknown."""
        self._began = self._last_time = began
        self.trains = False
        """Whether the run is a training, and not only a validation, test or prediction."""
        self._last: dict[str, float] = {}  # by name, the scores of the last completed validation
        self._best: dict[str, float] = {}  # by name, the best scores of all completed validations
        self._test: dict[str, float] = {}  # by name, the scores of the last completed test
        self._loss: float | None = None  # the last logged loss of the training

    def receive(self, timestamp: float, event: Event) -> None:
        """Update the facts by an event, given with the Unix time of its emit."""
        self._last_time = timestamp
        match event:
            case BeforeRun():
                self._reset(timestamp)
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
        """Update the best score of a name that shows whether higher or lower scores are better."""
        try:
            better = min if infer_rule(name) == "less" else max
        except ValueError:
            return
        if not isnan(score):
            self._best[name] = better(self._best.get(name, score), score)

    def lines(self) -> list[str]:
        """Return the lines about duration, scores and loss."""
        lines = []
        if self._began is not None and self._last_time is not None:  # None without a `before_run` event
            lines.append(f"time: {duration(max(0.0, self._last_time - self._began))}")
        for name, score in self._last.items():
            best = f", best {value_text(self._best[name])}" if name in self._best else ""
            lines.append(f"{on_a_line(name)}: last {value_text(score)}{best}")
        lines += [f"test {on_a_line(name)}: {value_text(score)}" for name, score in self._test.items()]
        return lines if self._loss is None else [*lines, f"loss in training: {value_text(self._loss)}"]


class Texts:
    """Compose messages that name the run, its machine and its directory.

    The argument `unsent` of its methods has, by name, the number of events since the last message about which
    no message was sent.

    Args:
        run: the facts of the run.
    """

    def __init__(self, run: Run) -> None:
        self._name = on_a_line(run_name_of(run, None), 60)
        self._where = f"directory: {on_a_line(socket.gethostname())}:{on_a_line(run.work_dir)}"

    def of_event(self, event: Event, progress: Progress, unsent: Counter[str]) -> Message:
        """Return the message about an event.

        Args:
            event: the event.
            progress: the facts of the run so far.
            unsent: by name, the number of events since the last message that had no message of their own.
        """
        if isinstance(event, AfterRun):
            headline, kind = _run_end(event, trains=progress.trains)
            lines = [*_end_lines(event), *progress.lines()]
        else:
            headline, kind = event_name(type(event)).replace("_", " "), _KINDS.get(type(event), "info")
            lines = _field_lines(event)
        return self._message(headline, lines, kind, unsent)

    def of_hang(self, seconds: float, unsent: Counter[str]) -> Message:
        """Return the message that no iteration has ended for so many seconds."""
        text = f"No iteration has ended for {duration(seconds)}."
        lines = [f"{text} The run may hang, or do something that takes long between two iterations."]
        return self._message("no progress", lines, "warning", unsent)

    def of_unsent(self, unsent: Counter[str]) -> Message:
        """Return a message that only counts the events without a message of their own."""
        return self._message("more events", [], "info", unsent)

    def _message(self, headline: str, lines: list[str], kind: str, unsent: Counter[str]) -> Message:
        """Return a message with the run's name before the headline, and its directory as the last line."""
        if unsent:
            counts = ", ".join(f"{count:,} {name}" for name, count in unsent.most_common())
            lines = [*lines, f"events without a message of their own since the last one: {counts}"]
        title = on_a_line(f"{self._name}: {headline}", TITLE_LENGTH)
        return Message(title, "\n".join([*lines, self._where]), kind)


def _run_end(event: AfterRun, *, trains: bool) -> tuple[str, str]:
    """Return a headline such as "training failed", and the kind of the message such as "failure"."""
    noun = "training" if trains else "run"
    if (event.error or "").startswith(KeyboardInterrupt.__name__):
        return f"{noun} interrupted", "warning"
    if event.error is not None:
        return f"{noun} failed", "failure"
    if event.signal is not None:
        return f"{noun} ended by {event.signal}", "warning"
    if event.reason == COMPLETED:
        return f"{noun} completed", "success"
    return f"{noun} stopped: {event.reason}", "info"


def _end_lines(event: AfterRun) -> list[str]:
    """Return the lines about why and where a run ended."""
    lines = [f"reason: {_shortened(event.reason)}"]
    if event.error is not None:
        lines.append(f"error: {_shortened(event.error)}")
    if event.signal is not None:
        lines.append(f"signal: {event.signal}")
    of_total = f" of {event.max_iters:,}" if event.max_iters is not None else ""
    return [*lines, f"iterations: {event.iter:,}{of_total}, epochs: {event.epoch:,}"]


def _field_lines(event: Event) -> list[str]:
    """Return a line for each field of an event that is not empty."""
    lines = []
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name not in _LEFT_OUT and value not in ("", None):
            lines.append(f"{name}: {_shortened(str(value))}")
    return lines


def _shortened(text: str) -> str:
    """Return a text without control characters, cut after `FIELD_LENGTH` characters."""
    clean = printable(text)
    return clean if len(clean) <= FIELD_LENGTH else f"{clean[:FIELD_LENGTH]}…"
