"""What `eventloop report` prints without `--all`: few lines, as wide as the terminal, and those that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import HandlerCost, RunCosts, Times, WaitCost, write_costs
from eventloop.description.record import Begin, RunRecord, write_record
from eventloop.reporting.comparison import compared_by_time, extremes, runs_table
from eventloop.reporting.facts import OUTSIDE_HANDLERS
from eventloop.reporting.report import Report, load_report
from eventloop.reporting.text import LINES, as_text, handler_lines
from tests.cli.reported_runs import (
    TRAINED,
    begins,
    costs,
    handler,
    make_run,
    outside,
    phases,
    report,
    scalars,
    subscriber,
    write_lines,
)

WIDTHS = (80, 120, 200)
WALL = 0.41
"""Seconds of the 100 iterations of `costs()`."""


def of(name: str, share: float, **changes: Any) -> HandlerCost:
    """A handler with a share of the iterations."""
    return handler(name, seconds=share * WALL, share=share, **changes)


WAITS = [
    WaitCost("checkpoint", "between", "CheckpointHook", 9, 1.0, 0.5),
    WaitCost("background", "evaluations", "JSONLWriter", 9, 1.0, 0.5),
]
"""Two causes of waits: a line of advice and a fact each."""


def troubled(run: Path, name: str = "slow", **changes: Any) -> Path:
    """A run with more of everything than fits: long names, three lines of advice, notes, losses, NaN."""
    path = run / f"a_run_with_quite_a_long_name_of_{name}"
    long = [of(f"{name}_handler_with_a_very_long_name_number_{i}", 0.2, calls=100) for i in range(20)]
    rest = [outside(f"{'Very' * 20}Long{i}.after_val_epoch", seconds=3.0) for i in range(20)]
    rows = [subscriber(f"{'Writer' * 9}{i}", dropped=5, error="it failed " * 30) for i in range(9)]
    fields = {"subscribers": rows, "seconds": 9.0, "outcome": "error: " + "no " * 99, **changes}
    make_run(path, handlers=[*long, *rest], **fields)
    many = {f"{name}_metric_{i}": "NaN" for i in range(30)}
    write_lines(path, *TRAINED[:-1], scalars(999, **many), begins(50), torn=b"{")
    return path


# --- lines -------------------------------------------------------------------------------------------------


@pytest.mark.representative(2)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("number", [1, 2, 5, 30])
def test_every_line_fits_and_there_are_25_at_most(width: int, number: int, tmp_path: Path) -> None:
    """Of one run and of many, whatever they are called and whatever went wrong in them."""
    reports = [load_report(troubled(tmp_path, f"run{i}")) for i in range(number)]

    lines = as_text(reports, width=width).splitlines()

    assert max(map(len, lines)) <= width
    assert 10 < len(lines) <= LINES


@pytest.mark.parametrize("waits", [[], WAITS], ids=["", "waits"])
def test_each_table_has_its_first_rows_whatever_does_not_fit(waits: list[WaitCost], tmp_path: Path) -> None:
    """The times of a run decide how many lines of advice and facts there are, not whether it has tables."""
    lines = as_text([load_report(troubled(tmp_path, waits=waits))], width=80).splitlines()

    begins = ("-> ", "took ", "phase ", "forward ", "handler ", "slow_handler_wit", "subscriber ", "! Writer")
    assert [begin for begin in begins if not any(line.startswith(begin) for line in lines)] == []
    assert (len(lines), lines[-1]) == (LINES, "--all shows the rest")


@pytest.mark.parametrize("waits", [[], WAITS], ids=["", "waits"])
def test_the_begin_and_the_model_are_there_whatever_does_not_fit(
    waits: list[WaitCost], tmp_path: Path
) -> None:
    """They follow the advice, also three pieces of it, and leave room for the duration and four tables."""
    run = troubled(tmp_path, waits=waits)
    write_record(run, RunRecord(begins=[Begin(time=1e9, iter=0, host="node1")], model="Net"))

    lines = as_text([load_report(run)], width=80).splitlines()

    begins = ("-> ", "begun ", "model ", "took ", "phase ", "handler ", "outside of the ", "subscriber ")
    places = [next(i for i, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert places == sorted(places)
    assert any(line.endswith(" on node1") for line in lines)
    assert (len(lines), lines[-1]) == (LINES, "--all shows the rest")


def test_many_runs_leave_lines_for_the_differences(tmp_path: Path) -> None:
    """The advice on 30 runs is cut."""
    reports = [load_report(troubled(tmp_path, f"run{i}")) for i in range(30)]

    lines = as_text(reports, width=80).splitlines()

    assert any(line.startswith("what differs ") for line in lines)


def test_a_wider_terminal_shows_more_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of COLUMNS characters; 80 where the output is not a terminal. The share and the time of a call are always there."""
    handlers = [of("a_handler_with_a_very_long_name_of_its_own", 0.5, filter="every=10", budget=1.0)]
    run = make_run(tmp_path / "run", handlers=handlers)
    headers = {}
    for width in (None, *WIDTHS):
        monkeypatch.delenv("COLUMNS", raising=False)
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        assert report(run) == 0
        headers[width] = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("handler"))

    assert headers[None] == headers[80]
    assert [*map(len, map(headers.get, WIDTHS))] == sorted({len(headers[width]) for width in WIDTHS})  # type: ignore[arg-type]
    for column in ("share", "a call", "calls"):
        assert all(column in header for header in headers.values())
    assert ("priority" in headers[80], "priority" in headers[200]) == (False, True)


def test_all_shows_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names whole, and rows that share a line otherwise."""
    name = "x" * 100
    run = make_run(tmp_path / "run", handlers=[of(name, 0.001), of("other", 0.001)])

    assert report(run) == 0
    few = capsys.readouterr().out
    assert report(run, "--all") == 0

    assert name not in few
    assert "(--all shows every table)" in few
    assert "\n2 below 1% " in few
    assert name in capsys.readouterr().out


def test_the_lines_begin_with_the_advice(tmp_path: Path) -> None:
    """Then come facts, phases, handlers, subscribers and the last values."""
    run = make_run(tmp_path / "run", handlers=[of("draw", 0.5)], seconds=8.0)

    lines = as_text([load_report(run)], width=80).splitlines()

    begins = (
        "Run run: completed",
        "-> draw takes",
        "took ",
        "phase ",
        "handler ",
        "draw ",
        "JSONLWriter",
        "scalars ",
    )
    found = [next(i for i, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert found == sorted(found)
    assert lines[-1] == "scalars       train/loss 0.1, val/loss 0.2, val/accuracy 0.9"


# --- what is folded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "row"),
    [
        (of("mine", 0.02), "mine"),
        (of("mine", 0.009), "1 below 1%"),
        (of("mine", 0.009, over_budget=True), "! mine"),
        (of("EMAHook", 0.02, built_in=True), "1 built-in"),
        (of("EMAHook", 0.06, built_in=True), "EMAHook"),
        (of("OptimizerHook", 0.63, built_in=True, includes=["backward", "optimizer"]), "1 built-in"),
        (of("mine", 0.0, calls=0), ""),
    ],
    ids=["1 %", "less", "over its budget", "built in", "built in, 5 %", "runs phases", "never called"],
)
def test_a_handler_that_matters_has_a_row(cost: HandlerCost, row: str) -> None:
    """From 1 % of the iterations, without the phases that it runs; from 5 % if it is part of eventloop."""
    lines = handler_lines(costs(handlers=[cost], phases=phases(100, hooks=0.0)), 80, 9)

    assert [line[: len(row)] for line in lines[1:]] == ([row] if row else [])


def test_the_rows_add_up_to_the_hooks_phase() -> None:
    """Handlers without a row share the last one, without the phases that they run; the time outside of handlers is a row."""
    optimizer = of("OptimizerHook", 0.62, built_in=True, includes=["backward", "optimizer"])
    ours = [of("LoggerHook", 0.02, built_in=True), optimizer, outside(seconds=1e-3, built_in=True)]
    own = [of(f"mine{i}", 0.1) for i in range(3)] + [of("small", 0.001)]
    record = costs(phases=phases(100, hooks=3e-3), handlers=own + ours)

    lines = handler_lines(record, 80, 2, least=0.0)

    assert lines[1].startswith("(outside of hand")
    assert [line.split()[0] for line in lines if line.startswith("mine")] == ["mine0", "mine1"]
    rest = next(line for line in lines if line.startswith("1 more, 2 built-in, 1 below 1%"))
    figures = [
        line[: lines[0].index("µs/iteration") + 12].split()[-1].replace(",", "")
        for line in (*lines[1:4], rest)
    ]
    assert sum(map(float, figures)) == pytest.approx(3000, abs=2)
    assert lines[-1].split() == ["1", "built-in", "10", "1.00", "ms"]


def test_the_time_outside_of_handlers_has_a_row_from_1_percent() -> None:
    """It is of all handlers, not of those that have a row."""
    record = costs(phases=phases(100, hooks=1e-3), handlers=[of("mine", 0.1), of("small", 0.001)])

    lines = handler_lines(record, 120, 9)

    assert lines[1].startswith(OUTSIDE_HANDLERS)
    assert " 586 " in lines[1]  # of 1,000 µs: all but 410 and 4.1


def test_subscribers_in_need_of_a_look_have_a_row(tmp_path: Path) -> None:
    """Those that lost events, failed, or were busy half of the run; the others share a line."""
    rows = [subscriber("fine"), subscriber("busy", seconds=5.0), subscriber("lossy", dropped=3)]
    run = make_run(tmp_path / "run", subscribers=rows, seconds=8.0)

    lines = as_text([load_report(run)], width=80).splitlines()

    assert [line.split()[0] for line in lines if line.lstrip("! ").startswith(("busy", "lossy"))] == [
        "busy",
        "!",
    ]
    assert "fine: no event lost, busy 2.5 % of the run at most" in lines


def test_without_costs_there_are_scalars(tmp_path: Path) -> None:
    """The report names what is missing."""
    write_lines(tmp_path / "run", *TRAINED)

    report = load_report(tmp_path / "run")
    text = as_text([report], width=80)

    assert [line[:18] for line in report.missing] == ["There are no costs"]
    assert "val/accuracy 0.9" in text


# --- several runs ------------------------------------------------------------------------------------------


def loaded(run: Path, **changes: Any) -> Report:
    run.mkdir()
    write_costs(run, costs(**changes))
    return load_report(run)


def test_handlers_of_one_run_come_first_then_the_largest_difference_in_time(tmp_path: Path) -> None:
    """14.9 times of 4 µs is no cause; a handler of 20 µs that took ten times as long is below one that took 1 ms more."""
    first = [of("big", 0.25), of("small", 0.01), of("tiny", 0.0001)]
    second = [of("big", 0.5), of("small", 0.1), of("tiny", 0.00149), of("new", 0.02)]
    reports = [loaded(tmp_path / "a", handlers=first), loaded(tmp_path / "b", handlers=second)]

    rows = [row for row in compared_by_time([report.costs for report in reports]) if row.matters]

    assert [row.name.partition(",")[0] for row in rows] == ["new", "big", "small"]
    assert [row.ratio(1) for row in rows] == ["-", "2.00×", "10.00×"]
    text = as_text(reports, width=80)
    assert "14.9" not in text
    lines = text.splitlines()
    first_row = next(i for i, line in enumerate(lines) if line.startswith("what differs")) + 1
    assert lines[first_row].split() == ["new,", "after_train_iter", "-", "82.0", "µs"]


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (
            {"handlers": [outside("check.after_val_epoch", seconds=0.1)], "seconds": 1.0},
            ["check.after_val_epoch, a call"],
        ),
        (
            {"subscribers": [subscriber(), subscriber("Slow", seconds=0.5)], "seconds": 1.0},
            ["Slow, a delivery"],
        ),
        ({"phases": phases(100, hooks=5e-4)}, ["an iteration", "phase hooks"]),
        ({}, []),
    ],
    ids=["outside", "background", "phase", "alike"],
)
def test_one_table_has_whatever_differs(made: dict[str, Any], rows: list[str]) -> None:
    """Handlers outside of the iterations and deliveries by their calls, phases by the iteration."""
    plain: dict[str, Any] = {"handlers": [], "subscribers": [subscriber()], "seconds": 1.0}

    found = compared_by_time([costs(**plain), costs(**{**plain, **made})])

    assert sorted(row.name for row in found if row.matters) == rows


def test_runs_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """The first ones have a column."""
    reports = [
        loaded(tmp_path / f"run_number_{i}", handlers=[of("mine", 0.1 + 0.1 * i)], seconds=1.0)
        for i in range(6)
    ]

    assert "of 6 runs do not fit in 80 characters: --all shows them" in as_text(reports, width=80)


@pytest.mark.parametrize(
    ("numbers", "high", "marks"),
    [
        ([1.0, 2.0, None, 1.5], False, {0: "best", 1: "worst"}),
        ([1.0, 2.0, 1.0], True, {0: "worst", 1: "best", 2: "worst"}),
        ([1.0, 1.04], False, {}),
        ([1.0, None], False, {}),
        ([0, 3], False, {0: "best", 1: "worst"}),
        ([0, 0], False, {}),
    ],
)
def test_best_and_worst(numbers: list[float | None], high: bool, marks: dict[int, str]) -> None:
    """None where they differ by less than 5 %, or where one run alone has a number."""
    assert extremes(numbers, high=high) == marks


def test_more_iterations_a_second_are_better_and_more_lost_events_worse() -> None:
    """Of a run without iterations there is neither."""
    times = [Times(100, 4e-3, p50, 9e-3, 9e-3, 9e-3) for p50 in (4e-3, 8e-3)]
    records = [
        costs(iteration=times[0]),
        costs(iteration=times[1], phases=phases(100, hooks=9e-3), subscribers=[subscriber(dropped=1)]),
        RunCosts(),
    ]
    reports = [Report(run=str(i), costs=each, log=None, notes=[]) for i, each in enumerate(records)]

    table = runs_table(reports, ["a", "b", "c"])

    marks = {(row, table.header[column]): mark for (row, column), mark in table.marks.items()}
    assert {name for _, name in marks} == {"a second", "p50", "mean", "not delivered"}
    assert {row for (row, _), mark in marks.items() if mark == "best"} == {0}
    assert {row for (row, _), mark in marks.items() if mark == "worst"} == {1}
