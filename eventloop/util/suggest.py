"""End an error message with the known name that is nearest to a wrong name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return the end of an error message that lists the known names already: the nearest one, or "".

    Args:
        least: the least similarity of a name that counts as near, from 0 to 1.
    """
    found = get_close_matches(word, [*known], n=1, cutoff=least)
    return f": did you mean {found[0]!r}?" if found else ""


def suggest(word: str, known: list[str]) -> str:
    """Return the end of an error message: the nearest known name, or all known names if no name is near."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"


def unreported(metric: str, reported: Iterable[str]) -> str:
    """Return the end of an error message about a metric that a validation does not report."""
    known = [*reported]
    names = suggest(metric, known) if known else ": it returned no metrics"
    return f"which the validation does not report{names}{need_of(metric)}"


def need_of(metric: str) -> str:
    """Return what the trainer's own accuracy needs, as the end of an error message; "" for other metrics."""
    if metric.rpartition("/")[2] != "accuracy":
        return ""
    return ". For accuracy the targets must be class indices; else give evaluator={'accuracy': ...}"
