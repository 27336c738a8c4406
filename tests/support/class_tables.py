"""Read the tables of classes in the pages about other systems."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "howto"


def classes_named(page: str) -> set[str]:
    """Return the names in the first column of the tables under "Use their classes here" of a page in docs/howto."""
    _, _, section = (PAGES / page).read_text(encoding="utf-8").partition("\n## Use ")
    cells = re.findall(r"^\| (.*?) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
