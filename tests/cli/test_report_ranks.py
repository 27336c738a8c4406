"""What `eventloop report` says of a run of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eventloop.cli import main
from eventloop.costs.records import RunCosts, TrendPoint, costs_path, write_costs
from eventloop.reporting.page.html import as_page
from eventloop.reporting.report import load_report
from eventloop.reporting.run_tables import RANKS, run_tables
from tests.cli.reported_runs import costs, handler, make_run, phases, report


def rank_record(rank: int, world_size: int, **longer: float) -> RunCosts:
    """Return the record of a rank; each of its iterations takes so many seconds more in a phase."""

    def slower(iterations: int) -> Any:
        usual = phases(iterations)
        return replace(
            usual, **{name: getattr(usual, name) + each * iterations for name, each in longer.items()}
        )

    trend = [TrendPoint(first_iter=i, phases=slower(4)) for i in range(0, 100, 4)]
    own = [handler(), handler("Slow.after_train_iter", seconds=longer.get("hooks", 0.0) * 100)]
    return costs(rank=rank, world_size=world_size, phases=slower(100), trend=trend, handlers=own)


def write_ranks(run: Path, *ranks: dict[str, float] | None) -> Path:
    """Write a run whose ranks take longer in some phases; None leaves a rank out."""
    make_run(run)
    for rank, longer in enumerate(ranks):
        if longer is not None:
            write_costs(run, rank_record(rank, len(ranks), **longer))
    return run


SLOW = ({"backward": 0.02}, {"hooks": 0.02}, {"backward": 0.02})


def test_a_table_has_min_median_and_max_of_each_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the waits for other ranks, which have a row of their own; with the ranks of least and most."""
    run = write_ranks(tmp_path / "run", *SLOW)

    (table,) = (table for table in run_tables(load_report(run)) if table.title == RANKS)

    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header == [
        "phase, ms/iteration",
        "min",
        "median",
        "max",
        "min on",
        "max on",
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    assert rows["hooks"] == ["0.100", "0.100", "20.1", "rank 0", "rank 1", "0.100", "20.1", "0.100"]
    assert rows["backward"][:3] == rows["backward"][5:] == ["2.00", "2.00", "2.00"]
    assert rows["waiting for other ranks"][:5] == ["0.000", "20.0", "20.0", "rank 1", "rank 0"]
    assert [table.rows[i][0] for i in table.bad] == ["hooks"]
    assert report(run, "--all") == 0
    assert "!  rank 1 is slow in this phase" in capsys.readouterr().out


def test_the_short_report_has_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 25 lines it names the slow rank and has the waits of the ranks."""
    run = write_ranks(tmp_path / "run", *SLOW)

    assert main(["report", str(run)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert "rank 1 is slow" in lines[1]
    assert any(line.startswith("  waiting for other ranks") for line in lines)


def test_the_first_line_names_the_slow_rank_its_phase_and_the_handler(tmp_path: Path) -> None:
    """The others' backward passes, which are as long, are not mentioned."""
    found = load_report(write_ranks(tmp_path / "run", *SLOW))

    assert found.slow_rank is not None
    assert (found.slow_rank.rank, found.slow_rank.phase) == (1, "hooks")
    assert found.advice[0] == (
        "rank 1 is slow in hooks: 20.1 ms of an iteration of 24.1 ms; it takes 20.0 ms longer than the usual rank, "
        "and all wait for it; most of it is in Slow.after_train_iter"
    )


@pytest.mark.parametrize(
    ("phase", "todo"),
    [("data", "look at its loader"), ("forward", "look at its device"), ("optimizer", "device")],
)
def test_each_phase_has_a_remedy(tmp_path: Path, phase: str, todo: str) -> None:
    """What to look at on that rank."""
    run = write_ranks(tmp_path / "run", {"backward": 0.02}, {phase: 0.02})

    assert todo in load_report(run).advice[0]


def test_even_ranks_have_a_table_and_no_advice(tmp_path: Path) -> None:
    """A run of one rank has neither."""
    even = load_report(write_ranks(tmp_path / "even", {}, {}))
    alone = load_report(write_ranks(tmp_path / "alone", {}))

    assert (even.slow_rank, even.advice, [each.rank for each in even.ranks]) == (None, alone.advice, [0, 1])
    assert alone.ranks == []
    assert RANKS not in [table.title for table in run_tables(alone)]


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        (
            ({"backward": 0.02}, None),
            "The record of rank 1 of 2 is missing, such as costs.rank1.json: the rank",
        ),
        (
            ({"backward": 0.02}, None, {"hooks": 0.02}, None),
            "The records of ranks 1, 3 of 4 are missing, such as costs.rank1",
        ),
        (({}, *[None] * 8), "ranks 1, 2, 3, 4, 5 and 3 more of 9 are missing"),
    ],
)
def test_a_missing_rank_is_one_line_and_exit_code_2(
    tmp_path: Path, ranks: tuple[Any, ...], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has all else, and calls no rank slow, because the missing one may be."""
    run = write_ranks(tmp_path / "run", *ranks)

    assert report(run) == 2

    shown = capsys.readouterr()
    assert shown.err.startswith(f"eventloop: {run}: The ")
    assert note in shown.err
    assert shown.err.count("\n") == 1
    assert "is slow" not in shown.out


def test_a_record_of_an_earlier_run_is_missing(tmp_path: Path) -> None:
    """That of a run with another number of ranks."""
    run = write_ranks(tmp_path / "run", {}, {}, {})
    write_costs(run, rank_record(0, 2))

    assert any("rank 1 of 2 is missing" in note for note in load_report(run).missing)


def test_a_torn_record_of_a_rank_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of rank 0 is."""
    run = write_ranks(tmp_path / "run", {}, {})
    costs_path(run, 1).write_text('{"version": 1, "pha')

    assert report(run) == 2

    assert capsys.readouterr().err.startswith(
        f"eventloop: {run}/costs.rank1.json is truncated or not a cost record"
    )


def test_programs_and_the_page_have_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the seconds of each rank and the slow one; the page has the table."""
    run = write_ranks(tmp_path / "run", *SLOW)

    assert report(run, "--json") == 0

    document = json.loads(capsys.readouterr().out)
    assert [each["own"]["hooks"] for each in document["ranks"]] == pytest.approx([1e-4, 20.1e-3, 1e-4])
    assert document["slow_rank"]["phase"] == "hooks"
    assert f"<h3>{RANKS}</h3>" in as_page([load_report(run)])
