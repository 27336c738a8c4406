"""Check that every benchmark keeps its results, and that their page opens with what its record says."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.helpers.in_short import (
    HEADING,
    MOST_LINES,
    WIDEST,
    distance,
    goal_lines,
    insert,
    section,
    short_of,
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))
PAGES = sorted((BENCHMARKS / "results").glob("*.md"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_page_opens_with_the_section_of_its_record(record: Path) -> None:
    pytest.importorskip("torch")
    page = record.with_suffix(".md").read_text(encoding="utf-8")
    opens = short_of(record)
    title, opening = page.split("\n\n", 1)
    assert title.startswith("# ")
    assert title.endswith("?")
    assert opening.startswith(opens)
    assert opens.startswith(HEADING)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_opens_with_ten_lines_for_a_person(page: Path) -> None:
    """They fit a screen, begin with what was measured, and end with the goals and the machine."""
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    heading, _, *lines = rest.partition("\n\n## ")[0].splitlines()

    assert page.with_suffix(".json") in RECORDS
    assert title.endswith("?")
    assert heading == HEADING
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if not line.startswith("- ") or len(line) > WIDEST] == []
    assert lines[0].startswith("- Measured: ")
    assert any(line.startswith("- Goals: ") for line in lines)
    assert lines[-1].startswith("- Machine: ")


@pytest.mark.parametrize("name", ["digits_overhead", "peers", "scaling"])
def test_a_page_can_be_written_again(name: str) -> None:
    """From its record alone, whatever is installed here."""
    pytest.importorskip("torch")
    script: Any = import_module(f"benchmarks.{name}")
    record = msgspec.json.decode((BENCHMARKS / "results" / f"{name}.json").read_bytes())

    page = insert(script.page_of(record), script.short(record))

    assert page + "\n" == (BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_asks_one_question_and_has_results(script: Path) -> None:
    question = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()[0]
    assert question.endswith("?")
    assert script.stem in {path.stem for path in RECORDS}


def test_goals_that_are_not_met_are_named_with_their_distance() -> None:
    goal = {"goal": "step", "wanted": "<= 1.00x", "measured": "1.10x"}
    assert goal_lines([goal | {"met": "yes"}]) == ["Goals: 1 of 1 met."]
    assert goal_lines([goal | {"met": "NO"}])[1].endswith("measured 1.10x, 10 % above the limit.")
    assert distance("<= 0.1", "1.3") == ", 13 times the limit"
    assert distance("<= 0", "3") == ""
    assert distance("> 1x", "ignite 0.99x") == ", 1 % below the limit"
    assert distance("> 1x", "ignite 2.1x, 1 not measured") == ""


def test_a_section_of_many_missed_goals_names_them_all_in_ten_lines() -> None:
    goals = [{"goal": f"step {n}", "wanted": "<= 1x", "measured": "2x", "met": "NO"} for n in range(12)]
    text = section("a step.", ["Slow."], goals, {"system": "Linux", "python": "CPython"})
    assert len(text.splitlines()[2:]) == MOST_LINES
    assert all(f"step {n}:" in text for n in range(12))


@pytest.mark.parametrize(
    ("medians", "text"),
    [
        ([10, 20, 30, 40, 50], "10 ns / handler, straight (R² 1.000)"),
        ([100, 104, 97, 99, 101], "100 ns, level within 4 %"),
        ([100, 104, 97, 99, 140], "97 to 140 ns, no straight line"),
        ([1, 10, 100, 1_000, 360_000], "1 to 360,000 ns, no straight line"),
        ([1, 4, 9, 16, 25], "1 to 25 ns, no straight line"),
    ],
)
def test_only_what_is_straight_is_called_so(medians: list[float], text: str) -> None:
    """A slope is quoted of a straight line alone; R² of a level one says nothing."""
    pytest.importorskip("numpy")
    from benchmarks.helpers.straight_lines import Series

    series = Series("dispatch", "ns", "handler")
    for x, median in enumerate(medians):
        series.add(x, median)

    assert series.text == text
