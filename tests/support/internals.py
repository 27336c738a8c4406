"""Replace limits, clocks and functions of the engine's modules for one test.

The tests name such a module by its last part, and only the table below knows where it is. So a module that moves
is edited at one place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from time import monotonic

import pytest

MODULES = {
    path.rpartition(".")[2]: f"eventloop.{path}"
    for path in (
        "assembly.data_ranks",
        "autoattach.hosts",
        "background.background",
        "background.closing",
        "background.overtime",
        "background.queues.awaited",
        "background.queues.inbox",
        "background.queues.spill",
        "background.queues.subscriber",
        "background.queues.supervision",
        "background.runners.thread_runner",
        "background.workers.process_runner",
        "bridges.host",
        "bus.dispatch",
        "bus.handler",
        "bus.process_exit",
        "bus.recording",
        "checkpoint.commit",
        "checkpoint.directory",
        "checkpoint.listing",
        "checkpoint.retention.pending",
        "checkpoint.saving.saver",
        "cli",
        "cli.demo",
        "cli.listing_text",
        "cli.replay",
        "costs.foreign_calls",
        "costs.sampling",
        "costs.step_clock",
        "costs.waits",
        "data.position",
        "evaluation.prediction",
        "events.base",
        "hooks.check_invalid_loss",
        "hooks.checkpoint",
        "hooks.costs",
        "hooks.early_stopping",
        "hooks.iter_timer",
        "hooks.iteration_timer",
        "hooks.memory",
        "hooks.one_rank",
        "hooks.optimizer",
        "hooks.pet_timer",
        "hooks.profiler",
        "hooks.sync_buffers",
        "metrics.reduce",
        "metrics.statistics",
        "model.peak_memory",
        "optim.clipping",
        "ownership.acquiring",
        "ownership.holding",
        "ownership.status",
        "processes.child",
        "steering.commands",
        "stops.rank_stop",
        "stops.signals",
        "stops.rank_times",
        "temporary.process_identity",
        "training.heartbeat",
        "training.trainer",
        "training.update_batches",
        "writers.event_log_writer",
        "writers.jsonl",
        "writers.notebook",
        "writers.progress",
        "writers.tensorboard",
        "writers.tracker",
    )
}


def substitute(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Put a value in the place of a module's name until the test ends: `substitute(monkeypatch, "spill.CHUNK", 9)`."""
    module, _, attribute = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(MODULES[module]), attribute, value)


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float], *modules: str) -> None:
    """Give these modules a clock of the test in place of `perf_counter`."""
    for module in modules:
        substitute(monkeypatch, f"{module}.perf_counter", clock)


def clock_after(condition: Callable[[], object]) -> Callable[[], float]:
    """Return a clock that stands still until a condition holds, however busy the machine is until then."""
    began, since = monotonic(), list[float]()

    def now() -> float:
        if not since and condition():
            since.append(monotonic())
        return began + (monotonic() - since[0] if since else 0.0)

    return now


def drain_after(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], object]) -> None:
    """Let the time of a flush or close begin when a condition holds."""
    substitute(monkeypatch, "overtime.monotonic", clock_after(condition))


def close_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log say of each close that it took its timeout, also if a busy machine has made it longer."""
    substitute(monkeypatch, "closing.monotonic", lambda: 0.0)
