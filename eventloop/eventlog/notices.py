"""Describe an event without scalars as a sentence; the console and `eventloop watch` show it.

This module imports no torch.
"""

from __future__ import annotations

from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    CheckpointEvaluated,
    CheckpointFailed,
    CheckpointSaved,
    CommandApplied,
    CommandRefused,
    Event,
    EventsDropped,
    HandlerFailed,
    InvalidLoss,
    LoaderStall,
    PreemptionRequested,
    RolledBack,
    SlowHandler,
    SlowRank,
    StopRequested,
    TextLogged,
)
from eventloop.events.base import event_name


def notice(event: Event) -> str:
    """Format an event without scalars as one line; a logged text keeps its line breaks."""
    text = _steering_notice(event)
    return _run_notice(event) if text is None else text


def _steering_notice(event: Event) -> str | None:
    """Return a line on a command, an evaluated checkpoint or a rollback; None for any other event."""
    match event:
        case CommandApplied():
            return f"Command applied: {_command(event)}"
        case CommandRefused():
            return f"Command refused: {_command(event)}: {one_line(event.reason)}"
        case CheckpointEvaluated():
            scores = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            return f"Checkpoint evaluated: {event.path}: {scores}"
        case RolledBack():
            skips = f", skipping {event.skipped:,} batches" if event.skipped else ""
            reason = f": {one_line(event.reason)}" if event.reason else ""
            return f"Rolled back to {event.path} (iteration {event.iter}){skips}{reason}"
    return None


def _command(event: CommandApplied | CommandRefused) -> str:
    """Return a command with its arguments and its source, such as "set lr=0.1 (from ann)"."""
    words = [event.command, *(f"{name}={value}" for name, value in event.arguments.items())]
    source = f" (from {event.source})" if event.source else ""
    return " ".join(words) + source


def _run_notice(event: Event) -> str:
    """Return a line on a checkpoint, a stop, a handler or the end of a run, or on any other event."""
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
            noun = "Stop" if isinstance(event, StopRequested) else "Preemption"
            return f"{noun} requested: {event.reason}"
        case HandlerFailed():
            return f"{event.handler} FAILED ({event.count}x): {one_line(event.error)}"
        case EventsDropped():
            return f"{event.handler} dropped {event.count} events: its queue was full, or it was disabled"
        case SlowHandler():
            return f"{event.handler} is slow: p99 {event.cost * 1e3:.2f} ms over {event.count} calls"
        case LoaderStall() | SlowRank() | InvalidLoss():
            return event.advice
        case AfterRun():
            error = f": {one_line(event.error)}" if event.error else ""
            return f"Run ended at iteration {event.iter}: {event.reason}{error}"
    return f"{event_name(type(event))}: {event}"


def one_line(text: str) -> str:
    """Join the lines of `text` by spaces."""
    return " ".join(text.split())
