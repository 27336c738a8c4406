"""Test what a resumed run gets from each loader of the catalog, and that the table in the docs says so."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.loaders.catalog import ANOTHER, LINES, PER_EPOCH, PERSISTENT, READ_AGAIN, ROWS, Row
from tests.loaders.program import EPOCHS, PARTS, SAVED_AT, STOPPED_AT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/loaders.md"


def seen(folder: Path, part: str) -> dict[Any, str]:
    """Return the digest of each batch of a part by iteration, and that of its weights."""
    lines = (folder / f"{part}.jsonl").read_text().splitlines()
    return dict(map(json.loads, lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run(tmp_path: Path, name: str) -> None:
    """Parts of a run, in fresh processes, one of them killed, see the batches of the whole run and end with its
    weights, or the log of each part that begins in mid-epoch says what is not exact."""
    row = ROWS[name]
    for package in (row.package, *(["torchdata"] if "use_stateful_dataloader" in name else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'torch-eventloop[{package}]'")

    ran = forked.run(["-m", "tests.loaders.program", name, tmp_path], cwd=ROOT, timeout=300)

    assert ran.returncode == 0, ran.stderr
    whole, *parts = (seen(tmp_path, part) for part in PARTS)
    assert len(whole) == EPOCHS * PER_EPOCH + 1
    assert [min(part.keys() - {"weights"}) for part in parts] == [0, STOPPED_AT, SAVED_AT, 2 * PER_EPOCH]
    assert all(part.items() <= whole.items() for part in parts) is row.exact
    first, second = (said(tmp_path, part) for part in ("killed", "at the end of an epoch"))
    assert second == expected(row)
    assert first == second or (
        first < second and not row.exact
    )  # a first epoch may be exact where others are not


def said(folder: Path, part: str) -> set[str]:
    """Return which of the lines a part has logged."""
    log = (folder / f"{part}.log").read_text()
    return {name for name, line in LINES.items() if re.search(line, log)}


def expected(row: Row) -> set[str]:
    """Return the lines that the resumes of a row log."""
    read_again = {READ_AGAIN} if row.says in (PERSISTENT, ANOTHER) else set()
    return read_again | ({row.says} if row.says else set())


def table() -> dict[str, list[str]]:
    """Return the rows of the page's table: by the loader, the other cells."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    start = next(i for i, row in enumerate(cells) if row[0] == "loader") + 1
    return {name: others for name, *others in cells[start : start + len(ROWS)]}


def test_the_table_is_what_was_tested() -> None:
    """Each row of the table is a case of `test_a_resumed_run`, in the same order, and says what that asserts."""
    rows = table()

    assert [*rows] == [*ROWS]
    for name, row in ROWS.items():
        assert rows[name][1:] == ["exact" if row.exact else "**not exact**", row.says or ""], name


def test_versions_are_those_of_the_constraints() -> None:
    """The table names the versions that the tests of the repository are run with."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

    for name, (version, *_) in table().items():
        assert version == f"{ROWS[name].package} {pinned[ROWS[name].package]}", name
