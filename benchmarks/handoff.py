"""What does it cost the training thread to hand one event to the background, by the bus and in other ways?

    python -m benchmarks.handoff --json handoff.json --markdown handoff.md

The part of `hook_overhead` that is about this, alone: one emit to seven subscribers of the bus, beside one hand-over of what
other projects do, in interleaved rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks._handoff import COROUTINES, THREADS, all_cases
from benchmarks._timing import command_line, environment, markdown_table, measure, pinned, publish, yes_no
from benchmarks.hook_overhead import BUILD, EVENT, HANDOFF_GOAL_NS, VERSIONS, handoff_rows


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="rounds the medians are over")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with all_cases(EVENT, BUILD) as cases, pinned():
        taken = measure(cases, rounds=options.rounds)
    about, own = environment(*VERSIONS), taken["bus.emit"]
    what = f"hand-over to {THREADS} threads and {COROUTINES} coroutines"
    goal = [what, f"<= {HANDOFF_GOAL_NS:.0f} ns", f"{own.ns:.0f} ns", yes_no(own.ns <= HANDOFF_GOAL_NS)]
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.handoff')}",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        markdown_table(["goal", "wanted", "measured", "met"], [goal]),
        markdown_table(["way", "µs on the emitting thread", "x bus.emit"], handoff_rows(taken)),
    ]
    record = {"environment": about, "figures": {each.name: each.record() for each in taken.values()}}
    publish("\n\n".join(parts), record, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
