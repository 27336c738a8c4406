"""What does a bridge add to a step of its host, and how exact are the rows of the host's callbacks?

    python -m benchmarks.bridges --host lightning --rounds 31

Two trainings of the host exist at the same time, without and with the bridge (`measure=True`, the default hooks,
no writer). A greenlet pauses each after a block of steps, and blocks alternate; quoted are medians over rounds of
the ratio within a round. The computation of a step spins for a fixed time, so a step lasts this time and the
host's own work. The host has one callback of 200 µs, which measures itself; `row` is its row in the costs.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.helpers.bridge_hosts import HOSTS, Ride
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import (
    Case,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    pinned,
    publish,
    yes_no,
)

STEPS = {0.0: None, 0.0005: 1.03, 0.001: 1.03, 0.02: 1.005}
"""Seconds of computation in a step, and the goal for the ratio."""
EXACT = 0.02
"""How far a row may differ from the callback's own clock."""


class Paused:
    """A training in a greenlet, which `block` continues for some steps."""

    def __init__(self, ride: Ride, number: int) -> None:
        self.ride, self.number = ride, number
        greenlet: Any = import_module("greenlet")
        main = greenlet.getcurrent()
        self._training = greenlet.greenlet(lambda: ride.run(main.switch, number), main)

    def block(self) -> None:
        """Continue until the next pause."""
        self._training.switch()

    def close(self) -> None:
        """End the training: GreenletExit is raised in its pause."""
        self._training.throw()


def one(host: str, step: float, rounds: int) -> dict[str, Any]:
    """Measure one length of a step."""
    number = max(2, int(0.15 / (step + 0.001)))
    with tempfile.TemporaryDirectory() as directory, pinned():
        trainings = {
            name: Paused(Ride(host, step, name == "bridge", Path(directory, name)), number)
            for name in ("host", "bridge")
        }
        for each in trainings.values():
            each.block()  # up to the first pause
        taken = measure([Case(n, block=t.block, number=number) for n, t in trainings.items()], rounds=rounds)
        ride = trainings["bridge"].ride
        row = max((row.seconds for row in ride.costs()), default=0.0)
        result = _numbers(step, taken["host"], taken["bridge"]) | {"row": row, "own": ride.own}
        for each in trainings.values():
            each.close()
    return result


def _numbers(step: float, host: Taken, bridge: Taken) -> dict[str, Any]:
    low, high = bridge.interval_to(host)
    return {
        "step": step, "host": host.median, "bridge": bridge.median, "ratio": bridge.ratio_to(host),
        "low": low, "high": high, "least": min(bridge.seconds) / min(host.seconds),
    }  # fmt: skip


def rows(results: list[dict[str, Any]]) -> str:
    """The table of one host."""
    return markdown_table(
        ("computes ms", "host's step ms", "bridge adds µs", "ratio", "95 %", "fastest", "goal", "met", "row / own clock"),
        [
            (
                f"{r['step'] * 1e3:g}", f"{r['host'] * 1e3:.3f}", f"{(r['ratio'] - 1) * r['host'] * 1e6:.1f}",
                f"{r['ratio']:.4f}", f"{r['low']:.4f}–{r['high']:.4f}", f"{r['least']:.4f}",
                "" if STEPS[r["step"]] is None else f"≤ {STEPS[r['step']]}",
                "" if STEPS[r["step"]] is None else yes_no(r["ratio"] <= STEPS[r["step"]]),
                f"{r['row'] / r['own']:.4f}",
            )
            for r in results
        ],
    )  # fmt: skip


def short(record: dict[str, Any]) -> str:
    """The section that opens the report."""
    answers, goals = [], []
    for host, results in record["hosts"].items():
        worst = max(abs(r["row"] / r["own"] - 1) for r in results)
        steps = ", ".join(f"{r['ratio']:.3f} of {r['host'] * 1e3:.2f} ms" for r in results)
        answers.append(f"{host}: a step with the bridge takes {steps}.")
        goals += [_goal(host, r) for r in results if STEPS[r["step"]] is not None]
        goals.append(
            {"goal": f"{host}, row of a callback to its own clock", "wanted": f"<= {EXACT:.0%} apart",
             "measured": f"{worst:.1%}", "met": yes_no(worst <= EXACT)}
        )  # fmt: skip
    return section(
        "a training of each host, without and with the bridge, in turns.", answers, goals, record["about"]
    )


def _goal(host: str, result: dict[str, Any]) -> dict[str, str]:
    limit = STEPS[result["step"]] or 0.0
    return {
        "goal": f"{host}, a step of {result['host'] * 1e3:.1f} ms", "wanted": f"<= {limit}x",
        "measured": f"{result['ratio']:.3f}x", "met": yes_no(result["ratio"] <= limit),
    }  # fmt: skip


def main() -> None:
    """Measure, print the tables, and keep them where the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", choices=sorted(HOSTS), nargs="+", default=sorted(HOSTS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    hosts = {host: [one(host, step, arguments.rounds) for step in STEPS] for host in arguments.host}
    about = environment("torch", "lightning", "pytorch-ignite", "mmengine", "transformers")
    record = {"about": about, "hosts": hosts}
    tables = "\n\n".join(f"## {host}\n\n{rows(results)}" for host, results in hosts.items())
    facts = ", ".join(f"{name} {version}" for name, version in about.items())
    report = f"# What does a bridge add to a step of its host?\n\n`{command_line('benchmarks.bridges')}`: {facts}.\n\n{tables}"
    publish(report, record, short, json=arguments.json, markdown=arguments.markdown)


if __name__ == "__main__":
    main()
