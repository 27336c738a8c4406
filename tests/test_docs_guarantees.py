"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!guarantee|---)(.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)`")


def test_every_guarantee_has_a_test_that_exists() -> None:
    """The second cell of each row is a list of test files and nothing else."""
    assert len(ROWS) >= 13
    for guarantee, cell in ROWS:
        files = cell.split(", ")
        assert all(NAMED.fullmatch(file) for file in files), guarantee
        assert [file for file in files if not (ROOT / file.strip("`")).is_file()] == [], guarantee


def test_the_files_hold_tests() -> None:
    """Each file that is named has a test function."""
    for file in sorted(set(NAMED.findall(PAGE))):
        assert re.search(r"^(async )?def test_", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (
            file
        )
