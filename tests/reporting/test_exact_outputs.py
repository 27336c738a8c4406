"""Every output tells the time that a handler took by its own clock, however seldom it works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eventloop import cli
from eventloop.costs.records import RunCosts, read_costs
from eventloop.reporting.facts import OUTSIDE_HANDLERS
from tests.support.traces import read_windows
from tests.support.worked import ITERATIONS, TOLERANCE, WINDOW, Worked, Worker, train

EVERY = (10, 20, 50, 100)
BUDGET_US = 500
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Worked:
    """Handlers that work in 1 of 10, 20, 50 and 100 iterations; that of 40 ms in 1 of 50 has a budget of 500 us."""
    workers = [
        Worker(10, 3, 0.5e-3),
        Worker(20, 13, 1.5e-3),
        Worker(50, 37, 40e-3, budget=BUDGET_US),
        Worker(100, 71, 20e-3),
    ]
    return train(tmp_path_factory.mktemp("worked") / "run", workers)


# --- what each output says ---------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A time in seconds, and by how much it is rounded."""

    seconds: float
    rounding: float = 0.0


Told = dict[str, Figure]
"""The time of each handler in a whole run, in the order in which an output lists them."""


def of_costs(costs: RunCosts) -> Told:
    return {cost.name: Figure(cost.seconds) for cost in costs.handlers if cost.in_iteration}


def of_json(worked: Worked, capture: Capture) -> Told:
    document = json.loads(printed(worked, capture, "--json"))
    return {cost["name"]: Figure(cost["seconds"]) for cost in document["costs"]["handlers"]}


def of_report(worked: Worked, capture: Capture) -> Told:
    return rows_of(printed(worked, capture, "--all"))


def printed(worked: Worked, capture: Capture, *options: str) -> str:
    """The output of `eventloop report`."""
    assert cli.main(["report", str(worked.directory), *options]) == 0
    return capture.readouterr().out


def rows_of(text: str) -> Told:
    """The figures below the heading `µs/iteration` of the first table that has it; a row begins with the handler's name,
    or with the mark of one that is over its budget."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if "µs/iteration" in line and "handler" in line)
    end = lines[head].index("µs/iteration") + len("µs/iteration")
    found: Told = {}
    for line in lines[head + 1 :]:
        row = re.match(r"[! ]*(\(.*?\)|\S+)", line)
        number = re.search(r"~?([\d,]+(?:\.\d+)?)$", line[:end])
        if not line.strip():  # the table is over
            break
        if row is None:
            continue
        if number is None:
            if line[:end].endswith(" -"):  # called once: its time stands below `a call`
                found[row[1]] = Figure(0.0)
            continue
        digits = number[1].replace(",", "")
        decimals = len(digits.partition(".")[2])
        found[row[1]] = Figure(float(digits) * ITERATIONS / 1e6, 0.5 * 10**-decimals * ITERATIONS / 1e6)
    return found


def of_page(worked: Worked, capture: Capture) -> Told:
    """The lengths of the bars, by the labels of their rows."""
    page = worked.directory / "page.html"
    printed(worked, capture, "--html", str(page))
    (shown,) = [shown for shown in map(of_bars, charts(page.read_text("utf-8"))) if worked.dearest in shown]
    return shown


Chart = tuple[list[dict[str, Any]], dict[str, Any]]
"""The traces and the layout of a chart."""


def charts(page: str) -> list[Chart]:
    """The data of every chart of a page."""
    decode = json.JSONDecoder().raw_decode
    found: list[Chart] = []
    for call in re.finditer(r'Plotly\.newPlot\(\s*"[^"]*",\s*', page):
        traces, end = decode(page, call.end())
        comma = re.compile(r"\s*,\s*").match(page, end)
        assert comma is not None
        found.append((traces, decode(page, comma.end())[0]))
    return found


def of_bars(chart: Chart) -> Told:
    traces, layout = chart
    labels = layout.get("yaxis", {}).get("ticktext", [])
    return {
        labels[row].partition(", ")[0]: Figure(length * ITERATIONS / 1e6)
        for trace in traces
        if trace["type"] == "bar"
        for length, row in zip(trace["x"], trace["y"], strict=True)
        if row < len(labels)
    }


OUTPUTS: dict[str, Callable[[Worked, Capture], Told]] = {
    "trainer.costs()": lambda worked, _: of_costs(worked.trainer.costs()),
    "costs.json": lambda worked, _: of_costs(read_costs(worked.directory)),
    "report --json": of_json,
    "report --all": of_report,
    "report --html": of_page,
    "trainer.summary()": lambda worked, _: rows_of(worked.trainer.summary()),
}
LISTS = [*OUTPUTS][3:]
"""Outputs for people, which have the most expensive handler first."""


def wrong(own: dict[str, Any], shown: Told) -> dict[str, Any]:
    """The figures that are not the truth, beside it."""
    return {
        name: (shown[name], own[name]) for name in own if name in shown and not own[name].agrees(*shown[name])
    }


# --- one training, all outputs -----------------------------------------------------------------------------------


@pytest.mark.representative(2)
@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_has_the_true_time_of_each_handler(output: str, worked: Worked, capsys: Capture) -> None:
    """0.98 to 1.02 of the handler's own clock, for 1 of 10, 20, 50 and 100 iterations."""
    shown = OUTPUTS[output](worked, capsys)

    assert {*worked.own} <= {*shown}
    assert wrong(worked.own, shown) == {}


@pytest.mark.parametrize("output", LISTS)
def test_the_dearest_handler_heads_the_table(output: str, worked: Worked, capsys: Capture) -> None:
    """Of the handlers with a clock of their own it is the first."""
    shown = OUTPUTS[output](worked, capsys)

    assert next(name for name in shown if name in worked.own) == worked.dearest == "works_50_37"


def test_the_short_report_has_the_true_time_of_the_handlers_that_it_shows(
    worked: Worked, capsys: Capture
) -> None:
    """Handlers below 1 % of the iterations share a row."""
    shown = rows_of(printed(worked, capsys))

    assert worked.dearest in shown
    assert wrong(worked.own, shown) == {}


def test_a_trace_has_the_true_time_of_its_window(worked: Worked) -> None:
    """The spans of a handler add up to what its own clock says of these iterations, and each call has one."""
    (window,) = read_windows(worked.directory)
    spans = {
        name: [s for s in window.spans if (s.kind, s.name) == ("handler", name)] for name in worked.traced
    }
    shown = {name: Figure(sum(s.ended - s.began for s in own) / 1e6) for name, own in spans.items()}

    assert [[s.iter for s in own] for own in spans.values()] == [[*range(*WINDOW)]] * len(EVERY)
    assert wrong(worked.traced, shown) == {}


def test_a_budget_sees_40_ms_in_1_of_50_iterations(worked: Worked, capsys: Capture) -> None:
    """`slow_handler` says it once, and every output marks the handler, and no other."""
    (shown,) = worked.slow
    costs = worked.trainer.costs().handlers
    lines = printed(worked, capsys).splitlines()

    assert shown.handler == worked.dearest
    assert shown.cost > 0.95 * 0.04  # a percentile is within 5 %
    assert [cost.name for cost in costs if cost.over_budget] == [worked.dearest]
    assert [line.split()[1] for line in lines if re.match(r"! +\S", line) and "works_" in line] == [
        worked.dearest
    ]


# --- the rows of the hooks phase ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Worked:
    """A handler that does nothing: the loop and the bus take the most of the hooks phase."""
    return train(tmp_path_factory.mktemp("idle") / "run", [Worker(10, 3, 0.0)])


@pytest.mark.parametrize("output", ["report --all", "trainer.summary()"])
@pytest.mark.parametrize("run", ["worked", "idle"])
def test_the_rows_add_up_to_the_hooks_phase(
    run: str, output: str, request: pytest.FixtureRequest, capsys: Capture
) -> None:
    """Within 2 %, less the phases that a handler runs itself: a larger rest is the first row, a smaller one has none."""
    trained: Worked = request.getfixturevalue(run)
    costs = trained.trainer.costs()
    shown = OUTPUTS[output](trained, capsys)
    listed = [
        cost for cost in costs.handlers if cost.name in shown
    ]  # the others share a row without their phases
    apart = sum(getattr(costs.phases, phase) for cost in listed for phase in cost.includes)
    once = sum(cost.seconds for cost in listed if cost.in_iteration and cost.calls == 1)
    rows = sum(figure.seconds for figure in shown.values()) + once - apart

    assert rows == pytest.approx(
        costs.phases.hooks, rel=TOLERANCE, abs=sum(f.rounding for f in shown.values())
    )
    assert OUTSIDE_HANDLERS not in [*shown][1:]
    assert run == "worked" or next(iter(shown)) == OUTSIDE_HANDLERS


# --- every phase -------------------------------------------------------------------------------------------------


PHASES = [(every, range(first, min(first + 10, every))) for every in EVERY for first in range(0, every, 10)]
"""Ten handlers at a time: the page draws twenty, those of eventloop among them."""


@pytest.mark.slow
@pytest.mark.parametrize(("every", "phases"), PHASES)
def test_at_every_phase(every: int, phases: range, tmp_path: Path, capsys: Capture) -> None:
    """A handler for each phase: all outputs have the true time of each."""
    worked = train(tmp_path / "run", [Worker(every, phase, every * 0.05e-3) for phase in phases])

    for output, figures in OUTPUTS.items():
        shown = figures(worked, capsys)
        assert {*worked.own} <= {*shown}, output
        assert wrong(worked.own, shown) == {}, output
