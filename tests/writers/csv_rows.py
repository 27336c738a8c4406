"""The rows of a file of `CSVWriter`, as csv reads them."""

from __future__ import annotations

import csv
from pathlib import Path

Row = dict[str, str]


def rows(path: Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))
