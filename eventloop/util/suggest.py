"""Suggest the known name that is nearest to a misspelled one, as the end of an error message."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return ": did you mean NAME?" with the known name that is nearest to `word`; "" if no name is near.

    Args:
        least: the least similarity of a name that counts as near, from 0 to 1.
    """
    matches = get_close_matches(word, [*known], n=1, cutoff=least)
    return f": did you mean {matches[0]!r}?" if matches else ""


def suggest(word: str, known: list[str]) -> str:
    """Return ": did you mean NAME?" with the nearest known name, or the list of all names if none is near."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"


def unreported(metric: str, reported: Iterable[str]) -> str:
    """Return the end of an error message about a metric that a validation does not report."""
    known = [*reported]
    names = suggest(metric, known) if known else ": it returned no metrics"
    return f"which the validation does not report{names}{need_of(metric)}"


def need_of(metric: str) -> str:
    """Return a sentence that says what the trainer needs to compute accuracy; "" for other metrics."""
    if metric.rpartition("/")[2] != "accuracy":
        return ""
    return ". For accuracy the targets must be class indices; else give evaluator={'accuracy': ...}"
