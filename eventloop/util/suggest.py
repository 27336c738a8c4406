"""End an error message with the known name that is nearest to the name that came."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str]) -> str:
    """The tail of an error message that has said what is known: the near name, if there is one."""
    found = get_close_matches(word, [*known], n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def suggest(word: str, known: list[str]) -> str:
    """The tail of an error message: the near name if there is one, else where to look."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"
