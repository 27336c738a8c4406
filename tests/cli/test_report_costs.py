"""What `eventloop report` makes of a cost record: what is usual and what is rare, handlers in and out of the iterations,
and what was not delivered."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.costs.records import TrendPoint, write_costs
from eventloop.reporting.comparison import compare, comparison_tables
from eventloop.reporting.facts import OUTSIDE_HANDLERS, facts
from eventloop.reporting.report import load_report
from eventloop.reporting.run_tables import handlers_table, phases_table, subscribers_table
from tests.cli.reported_runs import (
    TIMES,
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


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The report of a run as text."""
    assert report(run, "--all") == 0
    return capsys.readouterr().out


# --- what is usual -----------------------------------------------------------------------------------------


def test_one_long_iteration_does_not_make_the_headline(tmp_path: Path) -> None:
    """Nine of ten stretches have hooks of 0.1 ms, one of them 3 ms: the first figure is the median's, with the mean
    beside it."""
    trend = [
        TrendPoint(first_iter=10 * i, phases=phases(10, hooks=3e-3 if i == 1 else 1e-4)) for i in range(10)
    ]
    run = make_run(tmp_path / "run", phases=phases(100, hooks=3.9e-4), trend=trend)

    found = {fact.name: fact.value for fact in facts(load_report(run))}

    assert found["an iteration"] == "p50 4.10 ms, mean 4.39 ms"


def test_mean_and_median_of_each_phase(tmp_path: Path) -> None:
    """Both columns say which they are; a line says what the median is of."""
    trend = [
        TrendPoint(first_iter=10 * i, phases=phases(10, hooks=3e-3 if i == 1 else 1e-4)) for i in range(10)
    ]

    table = phases_table(costs(phases=phases(100, hooks=3.9e-4), trend=trend))

    assert table.header == ["phase", "mean ms", "share", "median ms", "share"]
    assert table.rows[4] == ["hooks", "0.390", "8.9 %", "0.100", "2.4 %"]
    assert table.note.startswith(
        "The median is over the means of 10 iterations each: what is long but rare is in the mean"
    )


def test_without_a_trend_there_are_means_alone() -> None:
    """And they are called so."""
    table = phases_table(costs(trend=[]))

    assert table.header == ["phase", "mean ms", "share"]
    assert table.note == ""


def test_how_long_the_run_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, and its three parts, which add up to it."""
    run = make_run(tmp_path / "run", seconds=5.9, evaluation=0.8)

    assert "took           5.90 s: iterations 410 ms, evaluation 800 ms, the rest 4.69 s\n" in shown(
        run, capsys
    )


# --- how it ended ------------------------------------------------------------------------------------------


def test_the_record_says_how_the_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no log does."""
    write_costs(tmp_path, costs(outcome="error: ValueError: no"))

    assert "state          error: ValueError: no\n" in shown(tmp_path, capsys)
    assert [fact.bad for fact in facts(load_report(tmp_path)) if fact.name == "state"] == [True]


def test_costs_that_end_before_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed has written them some seconds earlier."""
    run = make_run(tmp_path / "run", complete=False, first_iter=10)
    write_lines(run, scalars(3, loss=1.0), scalars(3232, loss=0.5), scalars(9999, "val", loss=0.5))

    assert "The costs go up to iteration 110, the log goes to 3,232.\n" in shown(run, capsys)


# --- what was not delivered --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("complete", "value", "bad"),
    [(True, "2 dropped, 1,000 left", True), (False, "2 dropped, 1,000 waiting", True)],
)
def test_what_is_left_in_a_queue_counts(complete: bool, value: str, bad: bool, tmp_path: Path) -> None:
    """After the end nobody will deliver it; in a run under way it waits."""
    write_costs(
        tmp_path, costs(complete=complete, subscribers=[subscriber(queued=1000), subscriber("b", dropped=2)])
    )

    (fact,) = [fact for fact in facts(load_report(tmp_path)) if fact.name == "not delivered"]

    assert (fact.value, fact.bad) == (value, bad)


def test_only_what_waits_is_no_alarm() -> None:
    """A run under way has something in its queues."""
    waits = [subscriber(queued=5)]

    assert subscribers_table(costs(complete=False, subscribers=waits)).bad == frozenset()
    assert subscribers_table(costs(complete=True, subscribers=waits)).bad == {0}


def test_wait_says_what_it_is() -> None:
    """It begins with the emit, and is long without anything being wrong."""
    note = subscribers_table(costs()).note

    assert "Wait is from the emit of an event to the begin of its delivery: 0.1 to 0.2 s are normal" in note


# --- handlers ----------------------------------------------------------------------------------------------


def test_an_estimate_is_marked() -> None:
    """And a line says why; exact times have no mark and no such line."""
    table = handlers_table(costs(handlers=[handler("guess", estimated=True), handler("exact")]))
    rows = {row[0]: row[5] for row in table.rows}

    assert (rows["guess"][0], rows["exact"][0] == "~") == ("~", False)
    assert "~: estimated" in table.note
    assert "estimated" not in handlers_table(costs(handlers=[handler("exact")])).note


def test_a_rare_call_has_its_own_mean() -> None:
    """Of one each ten iterations the mean of a call is ten times what an iteration pays."""
    table = handlers_table(costs(handlers=[handler(calls=10, filter="every=10")]))

    assert table.header[5:8] == ["µs/iteration", "share", "a call"]
    assert table.rows[-1][5:8] == ["25.0", "0.60 %", "250 µs"]


def test_the_time_outside_of_handlers_is_the_first_row() -> None:
    """Of 10 ms of hooks the handlers took 4.5 ms: the optimizer's hook 2 ms beside the phases that it runs.

    A handler of an event within that hook is part of its time.
    """
    optimizer = handler("OptimizerHook.after_train_iter", seconds=0.252, includes=["backward", "optimizer"])
    clip = handler("clip", event="after_backward", seconds=1e-3, over_budget=True)

    for nested in ([], [clip]):
        table = handlers_table(costs(handlers=[optimizer, handler(), outside(seconds=7.0), *nested]))

        assert (table.rows[0][0], table.rows[0][5]) == (OUTSIDE_HANDLERS, "55.0")
        assert [table.rows[i][0] for i in table.bad] == [cost.name for cost in nested]


@pytest.mark.parametrize("seconds", [0.0099, 0.0100, 0.0150])
def test_a_small_rest_and_none_have_no_row(seconds: float) -> None:
    """Up to 2 % of the hooks phase."""
    (row,) = handlers_table(costs(handlers=[handler(seconds=seconds)])).rows
    assert row[0] != OUTSIDE_HANDLERS


def test_handlers_outside_of_the_iterations() -> None:
    """They have a table of their own, with calls, total and mean, and nothing of an iteration."""
    record = costs(handlers=[handler(), outside()])

    (row,) = handlers_table(record, inside=False).rows
    assert [row[0] for row in handlers_table(record).rows[1:]] == ["EMAHook.after_train_iter"]
    assert handlers_table(record, inside=False).header == [
        "handler",
        "event",
        "filter",
        "priority",
        "calls",
        "in all",
        "a call",
        "max",
    ]
    assert row == [
        "CheckpointHook.after_val_epoch",
        "after_val_epoch",
        "",
        "45",
        "10",
        "30.0 ms",
        "3.00 ms",
        "1.00 ms",
    ]


def test_those_are_compared_by_the_call(tmp_path: Path) -> None:
    """A run with twice the epochs has twice the calls, and no dearer handler."""
    runs = [
        load_report(
            make_run(tmp_path / name, handlers=[handler(), outside(calls=calls, seconds=calls * 3e-3)])
        )
        for name, calls in (("short", 10), ("long", 20))
    ]

    tables = {table.title: table for table in comparison_tables(compare(runs), ["short", "long"])}

    assert tables["Handlers, mean µs/iteration"].rows == [["EMAHook.after_train_iter", "25.0", "25.0", "≈"]]
    assert tables["Handlers outside of the iterations, mean of a call"].rows == [
        ["CheckpointHook.after_val_epoch", "3.00 ms", "3.00 ms", "≈"]
    ]


def test_handlers_that_were_never_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are named in one line and not listed; in JSON they are."""
    idle = handler("idle", calls=0, seconds=0.0)
    run = make_run(tmp_path / "run", handlers=[handler(), idle, outside(calls=0, seconds=0.0)])

    text = shown(run, capsys)

    assert "\n2 handlers were never called: idle, after_train_iter; CheckpointHook.after_val_epoch.\n" in text
    assert not any(line.startswith("idle") for line in text.splitlines())
    assert len(load_report(run).costs.handlers) == 3  # type: ignore[union-attr]


def test_a_row_with_other_phases_in_it_says_so(tmp_path: Path) -> None:
    """In the table, and beside another run."""
    run = load_report(make_run(tmp_path / "run"))
    name = "OptimizerHook.after_train_iter (backward, optimizer in it)"

    assert name in [row[0] for row in handlers_table(costs()).rows]
    assert [
        row[0] for table in comparison_tables(compare([run, run]), ["a", "b"]) for row in table.rows
    ].count(name) == 1


def test_subscribers_side_by_side(tmp_path: Path) -> None:
    """With what is left; rows that are zero in all runs tell nothing."""
    first = load_report(make_run(tmp_path / "first"))
    second = load_report(make_run(tmp_path / "second", subscribers=[subscriber(queued=4)]))

    (table,) = [
        t
        for t in comparison_tables(compare([first, second]), ["first", "second"])
        if t.title.startswith("Background")
    ]

    assert [row[0].partition(": ")[2] for row in table.rows] == ["delivered", "left", "backlog", "busy, s"]
    assert table.rows[1][1:] == ["0", "4"]


# --- without iterations ------------------------------------------------------------------------------------


def test_a_run_that_only_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no iteration that anything could be of: no phases, no shares, no bars; the handlers' totals are told."""
    run = tmp_path / "run"
    run.mkdir()
    write_costs(
        run, costs(phases=phases(0), trend=[], handlers=[handler(), outside()], seconds=2.0, evaluation=1.5)
    )

    text = shown(run, capsys)

    assert "Step time" not in text
    assert "took           2.00 s: evaluation 1.50 s, the rest 500 ms\n" in text
    (ema,) = [line.split() for line in text.splitlines() if line.startswith("EMAHook")]
    assert ema[4:6] == ["-", "-"]
    assert report(run, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text("utf-8").replace("<wbr>", "")
    assert "CheckpointHook.after_val_epoch" in page
    assert "What each handler adds" not in page
    assert report(run, make_run(tmp_path / "other"), "--html", tmp_path / "page.html") == 0


# --- extremes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e306, -1.0])
def test_impossible_times_are_shown_all_the_same(seconds: float, tmp_path: Path) -> None:
    """Whatever a record says, there is a page and a text."""
    times = type(TIMES)(1, *[seconds] * 4)
    record = costs(
        phases=phases(100, hooks=seconds),
        seconds=seconds,
        trend=[TrendPoint(first_iter=0, phases=phases(100, hooks=seconds))] * 3,
        handlers=[handler(seconds=seconds, times=times), outside(seconds=seconds)],
        subscribers=[subscriber(seconds=seconds, wait=times, busy=times)],
    )
    write_costs(tmp_path, record)

    assert report(tmp_path) == 0
    assert report(tmp_path, tmp_path, "--json", "--html", tmp_path / "page.html") == 0
