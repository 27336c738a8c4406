"""What does a bridge add to a step of its host, and how exact are the rows of the host's callbacks?

    python -m benchmarks.bridges --rounds 61
    python -m benchmarks.bridges --host lightning ignite --rounds 31

Two trainings of a host exist at the same time, without and with the bridge (`measure=True`, the default hooks,
no writer). A greenlet pauses each after a block of steps, and blocks alternate; quoted are medians over rounds of
the ratio within a round. A step has the host's own work, a callback of 200 µs, which measures itself, and a
computation that spins for the time that the step still lacks. `row` is the callback's row in the costs.

`--clock thread` measures the processor time of the training thread, which other programs of the machine lengthen
less; the time that it waits, for another thread of the bridge say, is not in it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib import import_module
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from benchmarks.helpers.bridge_hosts import HOSTS, Clock, Ride
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

STEPS = {0.0: None, 0.001: 1.03, 0.02: 1.005}
"""Seconds that a step of the host alone lasts, and the goal for the ratio; 0.0 computes nothing."""
CLOCKS: dict[str, Clock] = {"wall": perf_counter, "thread": thread_time}
MEASURED = {"wall": "by the clock", "thread": "in processor time of the training thread"}
NOISE = "A ratio below 1, or a host's step that is longer than asked for, shows that other programs used the machine."
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


def of_host(host: str, rounds: int, clock: Clock) -> list[dict[str, Any]]:
    """Measure all lengths of a step of a host. The first says how long its own work takes."""
    results: list[dict[str, Any]] = []
    for step in STEPS:
        own = results[0]["host_least"] if results else 0.0
        results.append(one(host, step, max(0.0, step - own), rounds, clock))
    return results


def one(host: str, step: float, computes: float, rounds: int, clock: Clock) -> dict[str, Any]:
    """Measure one length of a step, which computes for some seconds."""
    number = max(2, int(0.15 / (step + 0.001)))
    with tempfile.TemporaryDirectory() as directory, pinned():
        trainings = {
            name: Paused(Ride(host, computes, name == "bridge", Path(directory, name), clock), number)
            for name in ("host", "bridge")
        }
        for each in trainings.values():
            each.block()  # up to the first pause
        cases = [Case(n, block=t.block, number=number) for n, t in trainings.items()]
        taken = measure(cases, rounds=rounds, clock=clock)
        ride = trainings["bridge"].ride
        row = max((row.seconds for row in ride.costs()), default=0.0)
        result = _numbers(step, taken["host"], taken["bridge"]) | {"row": row, "own": ride.own}
        for each in trainings.values():
            each.close()
    return result


def _numbers(step: float, host: Taken, bridge: Taken) -> dict[str, Any]:
    low, high = bridge.interval_to(host)
    return {
        "step": step,
        "host": host.median,
        "host_least": min(host.seconds),
        "bridge": bridge.median,
        "ratio": bridge.ratio_to(host),
        "low": low,
        "high": high,
        "least": min(bridge.seconds) / min(host.seconds),
    }


def rows(results: list[dict[str, Any]]) -> str:
    """The table of one host."""
    return markdown_table(
        (
            "a step of ms",
            "host's step ms",
            "bridge adds µs",
            "ratio",
            "95 %",
            "fastest",
            "goal",
            "met",
            "row / own clock",
        ),
        [
            (
                f"{r['step'] * 1e3:g}" if r["step"] else "its own",
                f"{r['host'] * 1e3:.3f}",
                f"{(r['ratio'] - 1) * r['host'] * 1e6:.1f}",
                f"{r['ratio']:.4f}",
                f"{r['low']:.4f}–{r['high']:.4f}",
                f"{r['least']:.4f}",
                "" if STEPS[r["step"]] is None else f"≤ {STEPS[r['step']]}",
                "" if STEPS[r["step"]] is None else yes_no(r["ratio"] <= STEPS[r["step"]]),
                f"{r['row'] / r['own']:.4f}",
            )
            for r in results
        ],
    )


def short(record: dict[str, Any]) -> str:
    """The section that opens the report."""
    hosts = record["hosts"]
    answers = []
    for index, step in enumerate(STEPS):
        ratios = ", ".join(
            f"{host} {results[index]['ratio']:.3f} ({_added(results[index])})"
            for host, results in hosts.items()
        )
        length = f"a step of {step * 1e3:g} ms" if step else "a step that computes nothing"
        answers.append(f"The whole to the host alone, {length}: {ratios}.")
    loads = f"{min(record['loads']):.1f} to {max(record['loads']):.1f}"
    goals = [_goal(hosts, index) for index, step in enumerate(STEPS) if STEPS[step] is not None]
    return section(
        f"a training of each host, without and with the bridge, in turns, {MEASURED[record['clock']]}; "
        f"the load of the machine was {loads}, of which this is 1.",
        answers,
        [*goals, _exact(hosts)],
        record["about"],
    )


def _added(result: dict[str, Any]) -> str:
    return f"{(result['ratio'] - 1) * result['host'] * 1e6:.0f} µs"


def _goal(hosts: dict[str, list[dict[str, Any]]], index: int) -> dict[str, str]:
    """The goal for one length of a step, which each host has to meet."""
    step = next(iter(hosts.values()))[index]["step"]
    limit = STEPS[step] or 0.0
    missed = [host for host, results in hosts.items() if results[index]["ratio"] > limit]
    worst = max(results[index]["ratio"] for results in hosts.values())
    return {
        "goal": f"a step of {step * 1e3:g} ms, each host",
        "wanted": f"<= {limit}x",
        "measured": f"{worst:.3f}x at worst" + (f", above it with {', '.join(missed)}" if missed else ""),
        "met": yes_no(not missed),
    }


def _exact(hosts: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    worst = max(abs(r["row"] / r["own"] - 1) for results in hosts.values() for r in results)
    return {
        "goal": "row of a callback to its own clock, each host",
        "wanted": f"<= {EXACT:.0%} apart",
        "measured": f"{worst:.1%} at worst",
        "met": yes_no(worst <= EXACT),
    }


def main() -> None:
    """Measure, print the tables, and keep them where the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", choices=[*HOSTS], nargs="+", default=[*HOSTS])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    loads, hosts = [os.getloadavg()[0]], {}
    for host in arguments.host:
        hosts[host] = of_host(host, arguments.rounds, CLOCKS[arguments.clock])
        loads.append(os.getloadavg()[0])
    about = environment("torch", "lightning", "pytorch-ignite", "mmengine", "transformers")
    record = {"about": about, "clock": arguments.clock, "loads": loads, "hosts": hosts}
    tables = "\n\n".join(f"## {host}\n\n{rows(results)}" for host, results in hosts.items())
    facts = ", ".join(f"{name} {version}" for name, version in about.items())
    command = command_line("benchmarks.bridges")
    report = f"# What does a bridge add to a step of its host?\n\n`{command}`: {facts}. {NOISE}\n\n{tables}"
    publish(report, record, short, json=arguments.json, markdown=arguments.markdown)


if __name__ == "__main__":
    main()
