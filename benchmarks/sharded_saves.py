"""For how long does a save of a sharded model block the training threads?

    python -m benchmarks.sharded_saves --json benchmarks/results/sharded_saves.json

A model under FSDP2 on two ranks, with AdamW 400 MB together, is saved by our CheckpointHook, by
`torch.distributed.checkpoint.save`, and by its `async_save` with a thread and with a process, in turns in one training.
Blocked is what the training thread spends in collecting the states, in the call, and in waiting before the optimizer's
step; of the slowest rank. It is measured on an idle machine, and beside two busy processes a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.helpers.in_short import section
from benchmarks.helpers.sharded_ranks import WAYS, Task
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no

RANKS = 2
OURS, SYNCHRONOUS = "eventloop", "dcp.save"
GOAL = 0.02
PLACES = ("alone", "in company")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep CPUs busy while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(task: Task, directory: Path | None) -> dict[str, list[float]]:
    """Return the blocked seconds of the slowest rank, by way and turn, of one training."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        body = msgspec.json.encode(task).decode()
        command = [sys.executable, "-m", "benchmarks.helpers.sharded_ranks"]
        ranks = [
            subprocess.Popen([*command, str(rank), str(RANKS), folder, body], stdout=subprocess.DEVNULL)
            for rank in range(RANKS)
        ]
        if any(rank.wait() for rank in ranks):
            raise RuntimeError("a rank failed; its error is above")
        return msgspec.json.decode((Path(folder) / "result.json").read_bytes(), type=dict[str, list[float]])


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    lines = [
        f"{place}: eventloop blocks {ways[OURS] * 1e3:.1f} ms, dcp.save {ways[SYNCHRONOUS] * 1e3:.0f} ms."
        for place, ways in record["blocked"].items()
    ]
    about = "a model under FSDP2 on two ranks of one machine, with AdamW 400 MB."
    return section(about, lines, goals(record), record["environment"])


def goals(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the goals beside what was measured."""
    ratios = {place: ways[OURS] / ways[SYNCHRONOUS] for place, ways in record["blocked"].items()}
    return [
        {
            "goal": f"blocked, to dcp.save, {place}",
            "wanted": f"<= {GOAL}",
            "measured": f"{ratio:.4f}",
            "met": yes_no(ratio <= GOAL),
        }
        for place, ratio in ratios.items()
    ]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="of a turn")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default a temporary one")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    task = Task(options.width, options.depth, options.rounds, options.iterations)
    taken = {}
    for place, processes in zip(PLACES, (0, 2 * (os.cpu_count() or 1)), strict=True):
        with busy(processes):
            taken[place] = run(task, options.directory)
    blocked = {
        place: {way: statistics.median(seconds) for way, seconds in ways.items()}
        for place, ways in taken.items()
    }
    about = {**environment("torch", "msgspec"), "rounds": f"{options.rounds}, medians"}
    record = {"environment": about, "blocked": blocked, "turns": taken}
    rows = [
        [
            way.name,
            *(f"{b[way.name] * 1e3:.1f} ms, {b[way.name] / b[SYNCHRONOUS]:.3f}" for b in blocked.values()),
        ]
        for way in WAYS
    ]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.sharded_saves')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "Each cell: the median time, and its ratio to that of dcp.save.",
            markdown_table(("way", *PLACES), rows),
        ]
    )
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
