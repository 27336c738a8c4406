"""End an error message with the known name that is nearest to the name that came."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that has listed the known names: the nearest name, or ""."""
    found = get_close_matches(word, [*known], n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def suggest(word: str, known: list[str]) -> str:
    """Return the end of an error message: the nearest name, or else all known names."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"
