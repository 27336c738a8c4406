"""Check that every benchmark keeps its results, and that their page opens with what its record says."""

import ast
from pathlib import Path

import pytest

from benchmarks.helpers.in_short import HEADING, MOST_LINES, distance, goal_lines, section, short_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))


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
    assert len(opens.splitlines()) <= MOST_LINES


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
    assert len(text.splitlines()) == MOST_LINES
    assert all(f"step {n}:" in text for n in range(12))
