"""Runs for the tests of `eventloop report`: cost records and lines of metrics, as the writers leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eventloop import cli
from eventloop.costs.records import (
    HandlerCost,
    Phases,
    RunCosts,
    SubscriberCost,
    Times,
    TrendPoint,
    write_costs,
)

TIMES = Times(samples=100, mean=2e-5, p50=1e-5, p99=1e-4, max=1e-3)


def report(*arguments: object) -> int:
    """The command, in this process."""
    return cli.main(["report", *map(str, arguments)])


def phases(iterations: int, hooks: float = 1e-4) -> Phases:
    """Iterations of 4 ms and what the hooks take."""
    return Phases(
        iterations=iterations,
        data=4e-4 * iterations,
        forward=1e-3 * iterations,
        backward=2e-3 * iterations,
        optimizer=5e-4 * iterations,
        hooks=hooks * iterations,
        unaccounted=1e-4 * iterations,
    )


def handler(name: str = "EMAHook.after_train_iter", **changes: Any) -> HandlerCost:
    """25 µs an iteration of 100."""
    fields = {
        "event": "after_train_iter",
        "priority": 45,
        "calls": 100,
        "seconds": 2.5e-3,
        "share": 0.006,
        "times": TIMES,
    }
    return HandlerCost(**{"name": name, **fields, **changes})


def outside(name: str = "CheckpointHook.after_val_epoch", **changes: Any) -> HandlerCost:
    """Ten calls of 3 ms, in none of the iterations."""
    event = name.rpartition(".")[2]
    fields = {"event": event, "in_iteration": False, "calls": 10, "seconds": 0.03, "share": 0.0}
    return handler(name, **{**fields, **changes})


def subscriber(name: str = "JSONLWriter", **changes: Any) -> SubscriberCost:
    """One that got everything."""
    fields = {
        "event": "scalars_logged, run_info",
        "runs_on": "thread",
        "delivered": 30,
        "dropped": 0,
        "failed": 0,
        "queued": 0,
        "peak_queued": 7,
        "spilled": 0,
        "calls": 20,
        "seconds": 0.2,
        "wait": TIMES,
        "busy": TIMES,
    }
    return SubscriberCost(**{"name": name, **fields, **changes})


def costs(**changes: Any) -> RunCosts:
    """Of 100 iterations, in ten trend points."""
    fields: dict[str, Any] = {
        "phases": phases(100),
        "trend": [TrendPoint(first_iter=i, phases=phases(10)) for i in range(0, 100, 10)],
        "handlers": [
            handler(),
            handler(
                "OptimizerHook.after_train_iter",
                priority=30,
                seconds=0.26,
                share=0.63,
                includes=["backward", "optimizer"],
            ),
        ],
        "subscribers": [subscriber()],
        "complete": True,
    }
    return RunCosts(**{**fields, **changes})


def scalars(step: int, mode: str = "train", **values: float | str) -> dict[str, Any]:
    """A line of `scalars_logged`."""
    return {"mode": mode, "step": step, "iter": step - (mode == "train"), "epoch": 0, **values}


def begins(iteration: int) -> dict[str, Any]:
    """The line of `before_run`."""
    return {"event": "before_run", "iter": iteration, "epoch": 0, "max_iters": None, "max_epochs": 1}


def ends(iteration: int, reason: str = "completed", error: str | None = None) -> dict[str, Any]:
    """The line of `after_run`."""
    return {"event": "after_run", "iter": iteration, "epoch": 1, "reason": reason, "error": error}


def write_lines(run: Path, *rows: dict[str, Any], torn: bytes = b"") -> Path:
    """`metrics.jsonl` of these lines, and of what a kill has left of another one."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / "metrics.jsonl"
    path.write_bytes(msgspec.json.Encoder().encode_lines(rows) + torn)
    return path


TRAINED = [
    begins(0),
    {
        "event": "run_info",
        "mode": "train",
        "step": 0,
        "iter": 0,
        "epoch": 0,
        "info": {"model": "Net", "plan": "a\nb"},
    },
    *(scalars(step, loss=10.0 / step, lr=0.1) for step in range(10, 101, 10)),
    scalars(100, "val", loss=0.2, accuracy=0.9),
    ends(100),
]


def make_run(run: Path, **changes: Any) -> Path:
    """The directory of a whole run."""
    write_lines(run, *TRAINED)
    write_costs(run, costs(**changes))
    return run
