"""Does `eventloop report --diff` find a planted 5 %, and does it call equal runs equal?

    python -m benchmarks.report_diff --json benchmarks/results/report_diff.json

Each run is a process of its own: a small perceptron and the default hooks. A round has four of them, one after the
other: two that are equal, one with 5 % of an iteration of busy waiting in its forward pass, and one with as much in a
handler. The equal pair is A and B; the others are compared with A. A pair is called equal if no row of the comparison is
slower, faster or in one run only. The constants of the comparison were chosen on other runs, at loads of 6 to 18.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop.reporting.diff.comparing import Diff, DiffRow, compare
from eventloop.reporting.diff.series import ITERATION
from eventloop.reporting.report import Report, load_report

PLANTED = 0.05
LIMIT = 2.0
"""Of `--fail-above`, in percent: the gate is to fail the planted runs, and to pass the equal ones."""
PHASE, HANDLER = "forward", "planted, after_train_iter"
EQUAL, IN_PHASE, IN_HANDLER = "equal", "planted in the forward pass", "planted in a handler"


class Round(NamedTuple):
    """The comparisons of one round."""

    equal: Diff
    phase: Diff
    handler: Diff


def train(directory: Path, iterations: int, **planted: float) -> Report:
    """Train in a process of its own; `planted` are microseconds.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    options = [f"--{name}={microseconds}" for name, microseconds in planted.items()]
    command = [
        sys.executable,
        "-m",
        "benchmarks.helpers.diff_run",
        str(directory),
        f"--iterations={iterations}",
    ]
    root = Path(__file__).parents[1]
    subprocess.run(
        [*command, *options],
        check=True,
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    return load_report(directory)


def measure(directory: Path, rounds: int, iterations: int) -> list[Round]:
    """Train and compare; the planted time is a part of the first run's iteration."""
    first = train(directory / "first", iterations)
    microseconds = PLANTED * compare(first, first).iteration * 1e6
    found = []
    for number in range(rounds):
        a = train(directory / f"a{number}", iterations)
        b = train(directory / f"b{number}", iterations)
        phase = train(directory / f"phase{number}", iterations, forward=microseconds)
        handler = train(directory / f"handler{number}", iterations, handler=microseconds)
        found.append(Round(*(compare(a, other, LIMIT) for other in (b, phase, handler))))
    return found


def row(diff: Diff, name: str) -> DiffRow:
    """One row of a comparison."""
    return next(each for each in diff.rows if each.name == name)


def percent(seconds: float | None, diff: Diff) -> float:
    """Of an iteration of A."""
    return (seconds or 0.0) / diff.iteration * 100


def counts(rounds: list[Round]) -> dict[str, int]:
    """In how many rounds each comparison was right."""
    equal = [all(each.verdict in ("noise", "unknown") for each in one.equal.rows) for one in rounds]
    return {
        "equal pairs called equal": sum(equal),
        "planted 5 % found in its phase": sum(row(one.phase, PHASE).verdict == "slower" for one in rounds),
        "planted 5 % found in its handler": sum(
            row(one.handler, HANDLER).verdict == "slower" for one in rounds
        ),
        f"equal pairs passed by --fail-above {LIMIT:g}%": sum(not one.equal.failed for one in rounds),
        f"planted pairs failed by --fail-above {LIMIT:g}%": sum(
            bool(diff.failed) for one in rounds for diff in (one.phase, one.handler)
        ),
    }


def goals(rounds: list[Round]) -> list[dict[str, str]]:
    """What was wanted, 19 of 20, and what came out."""
    found = []
    for goal, count in counts(rounds).items():
        of = len(rounds) * (2 if goal.startswith("planted pairs") else 1)
        least = -(-of * 19 // 20)
        found.append(
            {
                "goal": f"{goal}, of {of}",
                "wanted": f">= {least}",
                "measured": f"{count}",
                "met": yes_no(count >= least),
            }
        )
    return found


def rows(rounds: list[Round]) -> list[list[str]]:
    """The rows that were planted, and the whole iteration, over the rounds: in percent of an iteration."""
    shown = [
        (f"{EQUAL}: {ITERATION}", [(one.equal, ITERATION) for one in rounds]),
        (f"{EQUAL}: {PHASE}", [(one.equal, PHASE) for one in rounds]),
        (f"{EQUAL}: hooks", [(one.equal, "hooks") for one in rounds]),
        (f"{IN_PHASE}: {PHASE}", [(one.phase, PHASE) for one in rounds]),
        (f"{IN_PHASE}: {ITERATION}", [(one.phase, ITERATION) for one in rounds]),
        (f"{IN_HANDLER}: the handler", [(one.handler, HANDLER) for one in rounds]),
        (f"{IN_HANDLER}: hooks", [(one.handler, "hooks") for one in rounds]),
        (f"{IN_HANDLER}: {ITERATION}", [(one.handler, ITERATION) for one in rounds]),
    ]
    found = []
    for name, of in shown:
        differences = [percent(row(diff, which).difference, diff) for diff, which in of]
        widths = [
            percent((row(diff, which).high or 0.0) - (row(diff, which).low or 0.0), diff)
            for diff, which in of
        ]
        noise = [percent(row(diff, which).noise, diff) for diff, which in of]
        called = sum(row(diff, which).verdict in ("slower", "faster") for diff, which in of)
        found.append(
            [
                name,
                f"{min(differences):+.1f}",
                f"{statistics.median(differences):+.1f}",
                f"{max(differences):+.1f}",
                f"{statistics.median(widths):.1f}",
                f"{statistics.median(noise):.1f}",
                f"{called} of {len(of)}",
            ]
        )
    return found


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    about = record["environment"]
    return section(
        f"{about['rounds']} of real trainings, {about['the run']}.",
        [
            *(_together(goals) for goals in (record["goals"][:3], record["goals"][3:])),
            _whole(record["figures"]),
            f"Load of the machine meanwhile: {about['load']}.",
        ],
        record["goals"],
        about,
    )


def _together(goals: list[dict[str, Any]]) -> str:
    return "; ".join(f"{goal['goal']}: {goal['measured']}" for goal in goals) + "."


def _whole(figures: list[dict[str, Any]]) -> str:
    """Say how often the row of the whole iteration showed what was planted, and why not more often."""
    found = [
        sum(one[kind][ITERATION]["verdict"] == "slower" for one in figures) for kind in ("phase", "handler")
    ]
    noise = statistics.median(one["equal"][ITERATION]["noise"] for one in figures)
    return (
        f"The row of the whole iteration showed the planted 5 % of a phase in {found[0]} and of a handler in {found[1]} "
        f"of {len(figures)} rounds: in the median round up to {noise:.0f} % of an iteration were noise."
    )


HEADER = [
    "B - A, % of an iteration",
    "least",
    "median",
    "greatest",
    "interval's width",
    "noise below",
    "called different",
]


def page(about: dict[str, str], rounds: list[Round]) -> str:
    """The whole page."""
    met = goals(rounds)
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.report_diff')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Goals\n\n" + markdown_table([*met[0]], [[*goal.values()] for goal in met]),
            "## The rows\n\nWidths and noise are medians over the rounds.\n\n"
            + markdown_table(HEADER, rows(rounds)),
        ]
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="of four trainings each")
    parser.add_argument("--iterations", type=int, default=1500, help="of each training")
    parser.add_argument("--runs", type=Path, help="a directory that keeps the runs")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        found = measure(options.runs or Path(name), options.rounds, options.iterations)
    about = environment("torch", "numpy")
    usual = statistics.median(one.equal.iteration for one in found)
    about["the run"] = f"{options.iterations:,} iterations of {usual * 1e3:.2f} ms on one thread"
    about["rounds"] = f"{options.rounds} rounds"
    about["load"] = (
        f"{before:.1f} at the begin, {os.getloadavg()[0]:.1f} at the end, on {os.cpu_count()} CPUs"
    )
    figures = [one._asdict() for one in found]
    record = {"environment": about, "goals": goals(found), "figures": _small(figures)}
    publish(page(about, found), record, short, json=options.json, markdown=options.markdown)


def _small(figures: list[dict[str, Diff]]) -> list[dict[str, Any]]:
    """Keep of each comparison the rows that the page shows, in percent of an iteration."""
    return [
        {
            name: {
                each.name: {
                    "difference": round(percent(each.difference, diff), 2),
                    "low": round(percent(each.low, diff), 2),
                    "high": round(percent(each.high, diff), 2),
                    "noise": round(percent(each.noise, diff), 2),
                    "verdict": each.verdict,
                }
                for each in diff.rows
                if each.name in (ITERATION, PHASE, HANDLER, "hooks")
                or each.verdict not in ("noise", "unknown")
            }
            for name, diff in one.items()
        }
        for one in figures
    ]


if __name__ == "__main__":
    main()
