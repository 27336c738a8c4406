"""Test what a resumed run gets from each loader of the catalog, and that the table in the docs says so."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.loaders.catalog import ANOTHER, COUNT, LINES, PER_EPOCH, PERSISTENT, READ_AGAIN, ROWS, Row
from tests.loaders.catalog_ranks import RANK_ROWS, RANKS
from tests.loaders.program import EPOCHS, PARTS, SAVED_AT, STOPPED_AT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/loaders.md"
TABLES = {"loader": ROWS, "loader, two ranks": RANK_ROWS}
"""The rows by the first cell of the table's header."""
PADDED = 2
"""The samples that two ranks may share, so that each gets as many."""


def seen(folder: Path, part: str, rank: int = 0) -> dict[Any, Any]:
    """Return the digest and the samples of each batch of a part by iteration, and the digest of its weights."""
    lines = (folder / f"{part}.{rank}.jsonl").read_text().splitlines()
    return dict(map(json.loads, lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run(tmp_path: Path, name: str) -> None:
    """Parts of a run, in fresh processes, one of them killed, see the batches of the whole run and end with its
    weights, or the log of each part that begins in mid-epoch says what is not exact."""
    check(tmp_path, name, ROWS[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_ROWS)
def test_a_resumed_run_of_two_ranks(tmp_path: Path, name: str) -> None:
    """So they do on each of two ranks, which see different samples, in each epoch all of them."""
    row = RANK_ROWS[name]

    check(tmp_path, name, row, RANKS)

    whole = [seen(tmp_path, "whole", rank) for rank in range(RANKS)]
    assert whole[0]["weights"] == whole[1]["weights"]
    if "resampled" in name:
        return
    for epoch in range(EPOCHS):
        drawn = [samples(rank, epoch) for rank in whole]
        assert {*drawn[0], *drawn[1]} >= {*range(COUNT)}
        assert len({*drawn[0]} & {*drawn[1]}) <= PADDED
    if "Sampler" in name:  # its epoch is set
        assert len({tuple(samples(whole[0], epoch)) for epoch in range(EPOCHS)}) == EPOCHS


def samples(whole: dict[Any, Any], epoch: int) -> list[int]:
    """Return the numbers of the samples of an epoch of a whole run, in its order."""
    return [number for i in range(PER_EPOCH) for number in whole[epoch * PER_EPOCH + i][1]]


def check(folder: Path, name: str, row: Row, ranks: int) -> None:
    """Train the parts, and compare those of each rank with its whole run, and what they log with the row."""
    for package in (row.package, row.also):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'torch-eventloop[{package}]'")

    ran = forked.run(["-m", "tests.loaders.program", name, folder, str(ranks)], cwd=ROOT, timeout=300)

    assert ran.returncode == 0, ran.stderr
    for rank in range(ranks):
        whole, *parts = (seen(folder, part, rank) for part in PARTS)
        assert len(whole) == EPOCHS * PER_EPOCH + 1
        assert [min(part.keys() - {"weights"}) for part in parts] == [0, STOPPED_AT, SAVED_AT, 2 * PER_EPOCH]
        assert all(part.items() <= whole.items() for part in parts) is row.exact
    first, second = (logged_lines(folder, part) for part in ("killed", "at the end of an epoch"))
    assert second == expected(row)
    assert first == second or (
        first < second and not row.exact
    )  # a first epoch may be exact where others are not


def logged_lines(folder: Path, part: str) -> set[str]:
    """Return which of the lines the ranks of a part have logged."""
    log = "".join(path.read_text() for path in folder.glob(f"{part}.*.log"))
    return {name for name, line in LINES.items() if re.search(line, log)}


def expected(row: Row) -> set[str]:
    """Return the lines that the resumes of a row log."""
    read_again = {READ_AGAIN} if row.says in (PERSISTENT, ANOTHER) else set()
    return read_again | ({row.says} if row.says else set())


def table(header: str, count: int) -> dict[str, list[str]]:
    """Return the rows of one of the page's tables: by the loader, the other cells."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    start = next(i for i, row in enumerate(cells) if row[0] == header) + 1
    return {name: others for name, *others in cells[start : start + count]}


@pytest.mark.parametrize(("header", "expected_rows"), TABLES.items(), ids=TABLES)
def test_the_table_is_what_was_tested(header: str, expected_rows: dict[str, Row]) -> None:
    """Each row of a table is a case of its test, in the same order, and says what that asserts."""
    rows = table(header, len(expected_rows))

    assert [*rows] == [*expected_rows]
    for name, row in expected_rows.items():
        assert rows[name][1:] == ["exact" if row.exact else "**not exact**", row.says or ""], name


@pytest.mark.parametrize(("header", "expected_rows"), TABLES.items(), ids=TABLES)
def test_versions_are_those_of_the_constraints(header: str, expected_rows: dict[str, Row]) -> None:
    """The tables name the versions that the tests of the repository are run with."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

    for name, (version, *_) in table(header, len(expected_rows)).items():
        package = expected_rows[name].package
        assert version == f"{package} {pinned[package]}", name
