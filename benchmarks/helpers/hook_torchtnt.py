"""torchtnt's callbacks for `hook_cost`, called as its training loop calls them, with its State and unit."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.helpers.hook_bench import Bench, Peer
from benchmarks.helpers.hook_calls import COLLECTED
from benchmarks.helpers.hook_timers import PROFILED, PROFILES
from benchmarks.helpers.timing import Case

TORCHTNT = "torchtnt"
STEP_END = "callback.on_train_step_end(state, unit)"


def state_and_unit() -> tuple[Any, Any]:
    """Of a training whose loader nobody reads."""
    framework = import_module("torchtnt.framework")
    states = import_module("torchtnt.framework.state")

    class Unit(framework.TrainUnit):  # type: ignore[misc, name-defined]
        def train_step(self, state: Any, data: Any) -> None: ...

    phase = states.PhaseState(dataloader=[], max_epochs=1)
    return states.State(entry_point=states.EntryPoint.TRAIN, train_state=phase), Unit()


def made(name: str, *arguments: Any, **options: Any) -> Any:
    """One of its callbacks."""
    return getattr(import_module("torchtnt.framework.callbacks"), name)(*arguments, **options)


class NoLogger:
    """A logger that does nothing."""

    def log(self, name: str, data: float, step: int) -> None:
        """Take one number."""


def iteration_times(bench: Bench, label: str) -> Case:
    """The timer of its loop, of the wait for the loader and of the step, and IterationTimeLogger with a logger that does
    nothing."""
    state, unit = state_and_unit()
    callback = made("IterationTimeLogger", NoLogger())
    names = {
        "callback": callback,
        "state": state,
        "unit": unit,
        "time": state.train_state.iteration_timer.time,
        "progress": unit.train_progress,
    }
    body = (
        "with time('data_wait_time'): pass"
        f"\nwith time('train_iteration_time'): progress.increment_step(); {STEP_END}"
    )
    return bench.iterations(label, body, names, part=5)


def collections(bench: Bench, label: str) -> Case:
    """GarbageCollector: the middle generation after each step, all after 1000; it freezes nothing."""
    state, unit = state_and_unit()
    names = {
        "callback": made("GarbageCollector", COLLECTED),
        "state": state,
        "unit": unit,
        "progress": unit.train_progress,
        "steps": range(COLLECTED),
    }
    body = f"progress.increment_step(); {STEP_END}"
    return bench.over(label, "for _ in steps", body, COLLECTED, names, lambda: None)


def function(bench: Bench, label: str) -> Case:
    """Lambda."""
    state, unit = state_and_unit()
    callback = made("Lambda", on_train_step_end=lambda state, unit: None)
    return bench.iterations(label, STEP_END, {"callback": callback, "state": state, "unit": unit})


def profiles(bench: Bench, label: str) -> Case:
    """PyTorchProfiler, and the profile that it is given, which the hooks of others make themselves."""
    state, unit = state_and_unit()
    callbacks: list[Any] = []

    def again() -> None:
        gc.collect()
        callbacks[:] = [made("PyTorchProfiler", profile()) for _ in range(PROFILES)]

    again()
    names = {
        "callbacks": callbacks,
        "state": state,
        "unit": unit,
        "steps": range(PROFILED),
        "profile": profile,
        "cpu": [ProfilerActivity.CPU],
    }
    body = (
        "callback.profiler = profile(activities=cpu)"
        "\ncallback.on_train_start(state, unit)"
        f"\nfor _ in steps: {STEP_END}"
        "\ncallback.on_train_end(state, unit)"
    )
    return bench.over(label, "for callback in callbacks", body, PROFILED * PROFILES, names, again)


PEERS = [
    Peer(row, f"torchtnt {what}", TORCHTNT, make)
    for row, what, make in (
        ("IterationTimer", "IterationTimeLogger", iteration_times),
        ("GarbageCollectionHook, every 10", "GarbageCollector", collections),
        ("CallbackHook, a function of both", "Lambda", function),
        (f"ProfilerHook, each of {PROFILED} profiled", "PyTorchProfiler", profiles),
    )
]
"""Row, label, and what makes the case."""
