"""What does each hook cost in an iteration, next to the same work by hand and to the peers' hooks in the same run?

    python -m benchmarks.hook_cost --json benchmarks/results/hook_cost.json [--only EMAHook]

Each hook is called directly, by its own method, with a trainer and events that were built once; so what is timed is
the hook and no bus. By hand is what a careful author writes in a loop. The peers are called as their loops call them,
every method they have for an iteration (`helpers/hook_peers.py` and the files it names). The cases of a row take turns in rounds
(see `helpers/timing.py`), each row in a process of its own, since a heap that other rows have left costs who allocates more: quote
the ratios, which are of the same round.

Each public hook has a row, or a reason for having none (`helpers/hook_coverage.py`). One that has work every so many iterations is
quoted with what an iteration costs on average; the row's name says so, and of what else than an iteration a time is.

What is put into `trainer.metrics` is collected every 10 iterations, as the LoggerHook does, and that is part of ours.
What the background does with it later (reading the values, the histories, the events) has a column of its own; the
peers have no background, all they do is in their time. Histories have 1,000 values where nothing else is said.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers import (
    hook_calls,
    hook_norms,
    hook_numbers,
    hook_rows,
    hook_steps,
    hook_timers,
    hook_views,
)
from benchmarks.helpers.hook_bench import BACKGROUND, BY_HAND, OURS, Bench
from benchmarks.helpers.hook_coverage import WITHOUT_ROW, complaints
from benchmarks.helpers.hook_peers import PEERS
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import (
    NOT_INSTALLED,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    pinned,
    publish,
    version_of,
    yes_no,
)

ROWS = {
    **hook_rows.ROWS,
    **hook_timers.ROWS,
    **hook_steps.ROWS,
    **hook_norms.ROWS,
    **hook_views.ROWS,
    **hook_calls.ROWS,
    **hook_numbers.ROWS,
}
VERSIONS = tuple(dict.fromkeys(["torch", *(peer.distribution for peer in PEERS)]))
PUT_GOAL_US = 1.5
EMA_GOAL = 2.0
GOALS = (
    f"Goals: no hook slower than the fastest peer that does its work; EMA at most {EMA_GOAL:.0f}x the bare foreach by "
    f"hand; put_scalar at most {PUT_GOAL_US} µs at any length of the history. Ratios are medians over the rounds, beside "
    "the median's 95 % confidence interval; two decimals of the median decide."
)
COLUMNS = [
    "hook",
    "ours µs",
    "by hand µs",
    "x by hand",
    "best peer µs",
    "best peer",
    "x best peer",
    "95 %",
    "background µs",
    "goal met",
]
PEER_COLUMNS = ["hook", "peer", "µs", "ours / peer"]


@dataclass(frozen=True)
class Row:
    """What a row measured: every case by its label, and the peers that are not installed."""

    name: str
    taken: dict[str, Taken]
    absent: list[str]

    @property
    def peers(self) -> list[str]:
        """The labels of those that were timed."""
        return [label for label in self.taken if label not in (OURS, BY_HAND, BACKGROUND)]

    def ratio(self, other: str) -> float:
        """Our time over another's, in the same round."""
        return self.taken[OURS].ratio_to(self.taken[other])

    @property
    def best(self) -> str | None:
        """The peer that takes the least time."""
        return max(self.peers, key=self.ratio, default=None)

    @property
    def goals(self) -> dict[str, bool]:
        """Return each goal of the row, and whether it is met.

        Ratios are rounded to two decimals before, because smaller differences are noise.
        """
        goals = {}
        if self.best is not None:
            goals["not slower than the best peer"] = round(self.ratio(self.best), 2) <= 1.0
        if self.name == "EMAHook":
            goals[f"at most {EMA_GOAL:.0f}x bare foreach"] = self.ratio(BY_HAND) <= EMA_GOAL
        if self.name.startswith(hook_numbers.PUT) and not self.name.startswith(hook_numbers.PUT_AND_LOG):
            goals[f"at most {PUT_GOAL_US} µs"] = self.taken[OURS].ns <= PUT_GOAL_US * 1e3
        return goals


def measure_row(name: str, options: argparse.Namespace) -> Row:
    """Build the cases of a row and time them in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peers = [peer for peer in PEERS if peer.row == name]
    absent = [peer.label for peer in peers if version_of(peer.distribution) == NOT_INSTALLED]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bench = Bench(Path(directory), stack, options.number)
        cases = ROWS[name](bench)
        for peer in peers:
            if peer.label in absent:
                continue
            try:
                cases.append(peer.make(bench, peer.label))
            except ImportError:  # of what that hook needs besides: psutil, say
                absent.append(peer.label)
        with pinned():  # threads that were started before, the background's among them, stay free
            return Row(name, measure(cases, rounds=options.rounds), absent)


# --- the report --------------------------------------------------------------------------------------------


def micro(taken: Taken | None) -> str:
    """A time in µs, or nothing."""
    return "" if taken is None else f"{taken.ns / 1e3:.2f}"


def table_row(row: Row) -> list[str]:
    """A line of the main table."""
    best, goals = row.best, row.goals
    peer = ["", NOT_INSTALLED if row.absent else "none", "", ""]
    if best is not None:
        low, high = row.taken[OURS].interval_to(row.taken[best])
        peer = [micro(row.taken[best]), best, f"{row.ratio(best):.2f}", f"{low:.2f} to {high:.2f}"]
    return [
        row.name,
        micro(row.taken[OURS]),
        micro(row.taken.get(BY_HAND)),
        f"{row.ratio(BY_HAND):.2f}" if BY_HAND in row.taken else "",
        *peer,
        micro(row.taken.get(BACKGROUND)),
        yes_no(all(goals.values())) if goals else "no goal",
    ]


def peer_rows(rows: list[Row]) -> list[list[str]]:
    """Every peer of every row."""
    lines = []
    for row in rows:
        lines += [[row.name, p, micro(row.taken[p]), f"{row.ratio(p):.2f}"] for p in row.peers]
        lines += [[row.name, label, NOT_INSTALLED, ""] for label in row.absent]
    return lines


def missed(rows: list[Row]) -> str:
    """The goals that are not met."""
    lines = [f"- {row.name}: {goal}" for row in rows for goal, met in row.goals.items() if not met]
    return "\n".join(lines) or "All goals are met."


def report(about: dict[str, str], rows: list[Row]) -> str:
    """The whole page."""
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.hook_cost')}",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "## Each hook alone, µs an iteration\n\n" + markdown_table(COLUMNS, map(table_row, rows)),
        GOALS,
        "## Goals not met\n\n" + missed(rows),
        "## Every peer\n\n" + markdown_table(PEER_COLUMNS, peer_rows(rows)),
        "## Without a row\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in WITHOUT_ROW.items()),
    ]
    return "\n\n".join(parts)


def goals(rows: dict[str, Any]) -> list[dict[str, str]]:
    """The goals of all rows, of the record that is kept, beside what was measured."""
    found = []
    for name, row in rows.items():
        over = {label: ratio for label, ratio in row["ours_over"].items() if label != BY_HAND}
        measured = {
            "not slower": f"{max(over.values(), default=0):.2f}x",
            "at most 2x": f"{row['ours_over'].get(BY_HAND, 0):.2f}x",
            "at most 1.": f"{row['figures'][OURS]['median_ns'] / 1e3:.2f} µs",
        }
        found += [
            {"goal": name, "wanted": goal, "measured": measured[goal[:10]], "met": yes_no(met)}
            for goal, met in row["goals"].items()
        ]
    return found


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    rows = record["rows"]
    nearest: dict[str, tuple[float, str]] = {}
    for name, row in rows.items():
        peers = [(ratio, label) for label, ratio in row["ours_over"].items() if label != BY_HAND]
        if peers:
            nearest[name] = max(peers)
    faster = sum(round(ratio, 2) <= 1.0 for ratio, _ in nearest.values())
    closest = sorted(nearest, key=lambda name: -nearest[name][0])[:3]
    beside = {name: f"{nearest[name][0]:.2f}x {nearest[name][1].split()[0]}" for name in closest}
    listed = "; ".join(f"{name} ({beside[name]})" for name in closest)
    return section(
        f"{len(rows)} hooks and uses of metrics, each alone, beside the same work by hand and the peers' hooks.",
        [
            f"{len(nearest)} of them have a counterpart in another system; in {faster} ours is not slower than the fastest.",
            f"The closest: {listed}.",
            *(
                f"{name} takes {rows[name]['ours_over'][BY_HAND]:.2f} times the same work by hand."
                for name in ("EMAHook",)
                if name in rows
            ),
        ],
        goals(rows),
        record["environment"],
    )


def record(row: Row) -> dict[str, Any]:
    """What the JSON keeps of a row."""
    others = [label for label in row.taken if label not in (OURS, BACKGROUND)]
    return {
        "figures": {label: taken.record() for label, taken in row.taken.items()},
        "ours_over": {label: round(row.ratio(label), 4) for label in others},
        "ours_over_interval": {
            label: [round(end, 4) for end in row.taken[OURS].interval_to(row.taken[label])]
            for label in others
        },
        "not_installed": row.absent,
        "goals": row.goals,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="rounds the medians are over")
    parser.add_argument(
        "--number", type=int, default=2000, help="iterations in a block of the cheapest hooks"
    )
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    if not any(options.only in name for name in ROWS):
        parser.error(f"no row has {options.only!r} in its name; there are: {', '.join(ROWS)}")
    return options


def main() -> None:
    """Measure, print, keep.

    Raises:
        SystemExit: a public hook has neither a row nor a reason for having none, or a peer has no row.
    """
    options = arguments()
    if wrong := complaints(ROWS, PEERS):
        raise SystemExit("\n".join(wrong))
    with ProcessPoolExecutor(1, get_context("forkserver"), max_tasks_per_child=1) as own_process:
        rows = [
            *own_process.map(
                partial(measure_row, options=options), (name for name in ROWS if options.only in name)
            )
        ]
    about = environment(*VERSIONS)
    about["rounds"] = (
        f"{options.rounds}, medians; up to {options.number} iterations in a block; one torch thread"
    )
    kept = {"environment": about, "rows": {row.name: record(row) for row in rows}}
    publish(report(about, rows), kept, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
