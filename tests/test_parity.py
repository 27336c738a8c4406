"""docs/dev/parity.md names tests that exist, one at least a row, and everything public in hooks and writers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from eventloop import hooks, writers

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "dev" / "parity.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
COMPARED, _, ABSENT = TEXT.partition("\n## Not here, and why\n")


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables, their heads left out."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [row for line in lines if (row := cells(line))[0] != "theirs"]


def cells(line: str) -> list[str]:
    """What stands between the bars of a row."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def functions_of(path: Path) -> set[str]:
    """The tests of a file; those of a class as `Class::test`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + n.name for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.slow
def test_every_test_that_is_named_exists() -> None:
    """File and function, as pytest would select them."""
    named = sorted(set(NAMED.findall(TEXT)))
    files = {file: functions_of(ROOT / file) if (ROOT / file).exists() else set() for file, _ in named}

    assert named
    assert [f"{file}::{test}" for file, test in named if test not in files[file]] == []


def test_every_row_says_what_shows_it() -> None:
    """Four cells, none empty; the last is a list of tests and nothing else."""
    for row in rows(COMPARED):
        assert len(row) == 4, row
        assert all(row), row
        assert all(NAMED.fullmatch(test) for test in row[3].split(", ")), row


def test_what_is_not_here_is_said_with_its_substitute() -> None:
    """Two cells, none empty."""
    absent = rows(ABSENT)

    assert absent
    assert [row for row in absent if len(row) != 2 or not all(row)] == []


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", [*hooks.__all__, *writers.__all__])
def test_every_public_name_is_compared(name: str) -> None:
    """As code, in a row about what it stands for."""
    spans = [span for row in rows(COMPARED) for cell in row[:3] for span in re.findall(r"`([^`]+)`", cell)]

    assert any(re.search(rf"\b{name}\b", span) for span in spans)
