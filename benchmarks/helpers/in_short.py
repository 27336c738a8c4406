"""Write the section that opens each page of results, at most ten short lines for a person in a hurry.

Each script has a function `short`, which makes the section of the record that its JSON file keeps. So the sections of
all committed pages can be written again without measuring anything:

    python -m benchmarks.helpers.in_short
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

HEADING, AFTER = "## In short", "## How it was measured"
MOST_LINES, WIDEST = 10, 200
"""Lines below the heading, and characters of a line."""
RESULTS = Path(__file__).parents[1] / "results"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def section(
    measured: str,
    answers: Sequence[str],
    goals: Sequence[Mapping[str, str]],
    environment: Mapping[str, str],
) -> str:
    """Return the section: what was measured, the answer, the goals that are met and not met, and the machine.

    A goal has the keys `goal`, `wanted`, `measured` and `met` ("yes", "NO", or why that is not known). Goals that do
    not fit into ten lines share the last of their lines.
    """
    torch = f", torch {environment['torch']}" if "torch" in environment else ""
    opening = [HEADING, "", f"- Measured: {measured}", *(f"- {answer}" for answer in answers)]
    count, *open_goals = goal_lines(goals)
    room = max(1, MOST_LINES - len(opening[2:]) - 2)
    if len(open_goals) > room:  # a run is never lost because many goals are not met
        open_goals[room - 1 :] = [" ".join(open_goals[room - 1 :])]
    machine = f"Machine: {environment['system']}, no GPU is used; {environment['python']}{torch}."
    return "\n".join([*opening, *(f"- {line}" for line in (count, *open_goals, machine))])


def goal_lines(goals: Sequence[Mapping[str, str]]) -> list[str]:
    """Return how many goals are met, and a line for each that is not, or of which that is not known."""
    if not goals:
        return ["Goals: none is set."]
    met = sum(goal["met"] == "yes" for goal in goals)
    lines = [f"Goals: {met} of {len(goals)} met."]
    for goal in goals:
        limits = f"{goal['goal']}: wanted {goal['wanted']}, measured {goal['measured']}"
        if goal["met"] == "NO":
            lines.append(f"**NOT met:** {limits}{distance(goal['wanted'], goal['measured'])}.")
        elif goal["met"] != "yes":
            lines.append(f"**Not decided:** {limits} ({goal['met']}).")
    return lines


def distance(wanted: str, measured: str) -> str:
    """Return how far the first number of `measured` is from that of `wanted`, as text to append; "" if there is none."""
    found = [match.group().replace(",", "") for text in (wanted, measured) if (match := NUMBER.search(text))]
    if len(found) < 2 or not float(found[0]):
        return ""
    ratio = float(found[1]) / float(found[0])
    if (ratio > 1) is wanted.startswith(
        ">"
    ):  # the goal is missed for another reason, a peer that is absent say
        return ""
    if ratio >= 2:
        return f", {ratio:.0f} times the limit"
    return f", {abs(ratio - 1) * 100:.2g} % {'above' if ratio > 1 else 'below'} the limit"


def insert(page: str, section: str) -> str:
    """Return `page` with `section` after its title, in place of the section that it may have there."""
    title, rest = page.split("\n\n", 1)
    if rest.startswith(HEADING):
        rest = rest.split(f"{AFTER}\n\n", 1)[1]
    return f"{title}\n\n{section}\n\n{AFTER}\n\n{rest}"


def short_of(results: Path) -> str:
    """Return the section of a JSON file of results, which has the name of its script or begins with that and "_"."""
    scripts = [
        path.stem for path in RESULTS.parent.glob("*.py") if f"{results.stem}_".startswith(f"{path.stem}_")
    ]
    if not scripts:
        raise ValueError(f"{results.name} has no script: expected benchmarks/{results.stem}.py")
    script: Any = import_module(f"benchmarks.{max(scripts, key=len)}")
    found: str = script.short(msgspec.json.decode(results.read_bytes()))
    return found


def main() -> None:
    """Write the section of every committed page."""
    for results in sorted(RESULTS.glob("*.json")):
        page = results.with_suffix(".md")
        page.write_text(insert(page.read_text(encoding="utf-8"), short_of(results)), encoding="utf-8")
        print(f"{page.name}\n\n{short_of(results)}\n")


if __name__ == "__main__":
    main()
