"""End an error message with the known name that is nearest to a wrong name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that lists the known names already: the nearest one, or ""."""
    found = get_close_matches(word, [*known], n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def suggest(word: str, known: list[str]) -> str:
    """Return the end of an error message: the nearest known name, or all known names if no name is near."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"
