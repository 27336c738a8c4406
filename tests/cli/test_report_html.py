"""The page of `eventloop report --html`: what is in the file, what its charts show, and what it replaces."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import Times, TrendPoint, write_costs
from eventloop.reporting.facts import RUN_COLOURS
from eventloop.reporting.page.charts import (
    BAD,
    BIN,
    NamedRun,
    handler_charts,
    name_runs,
    phase_charts,
    scalar_charts,
)
from eventloop.reporting.report import load_report
from tests.cli.reported_runs import (
    TRAINED,
    costs,
    handler,
    make_run,
    phases,
    report,
    scalars,
    subscriber,
    write_lines,
)

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>%{x}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run."""
    return make_run(tmp_path / "first")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another one, with more expensive hooks."""
    return make_run(tmp_path / "second", phases=phases(100, hooks=3e-4))


class Page(HTMLParser):
    """The texts of a page, its tags, and the addresses in them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the tag and its addresses."""
        if tag == "wbr":  # a name goes on in the next line of the page
            self.text = self.text.removesuffix("\n")
            return
        self.tags.append(tag)
        self._inside, found = tag, dict(attrs)
        self.addresses += [str(found[name]) for name in ("src", "href", "action", "data") if name in found]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        """End a script or a style."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Keep scripts apart from the texts."""
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data + "\n"


def write(tmp_path: Path, *runs: Path, code: int = 0) -> Page:
    """The page of these runs."""
    assert report(*runs, "--html", tmp_path / "page.html") == code
    return Page(tmp_path / "page.html")


def named(*runs: Path) -> list[NamedRun]:
    """The runs as the charts take them."""
    return name_runs([run.name for run in runs], [load_report(run) for run in runs])


def drawn(figure: Any) -> dict[str, Any]:
    """The traces of a figure by name."""
    return {trace.name: trace for trace in figure.data if trace.name}


# --- the page ----------------------------------------------------------------------------------------------


def test_one_file_that_needs_no_other(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """plotly.js is in it, once, and the page has at most 1.5 MB; no tag has an address; the policy forbids to load; an
    older page is replaced."""
    (tmp_path / "page.html").write_text("<!doctype html>old")

    page = write(tmp_path, run)

    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"eventloop: \S+/page\.html is written, \d\.\d MB\n", said.err)
    assert page.addresses == ["data:,"]
    assert sum("plotly.js v" in script[:100] for script in page.scripts) == 1
    assert (tmp_path / "page.html").stat().st_size <= 1.5e6
    source = (tmp_path / "page.html").read_text("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    assert "http" not in policy[1]
    assert "old" not in source[:100]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "page.html"}


def test_headings_facts_and_tables(tmp_path: Path) -> None:
    """They are text, so that the page can be read without its charts; rows over a budget, and rows that lost events,
    are red, with the reason below the table."""
    run = make_run(
        tmp_path / "run",
        handlers=[handler(budget=5e-5, over_budget=True), handler("fine", budget=5e-5)],
        subscribers=[subscriber(budget=5e-5, over_budget=True), subscriber("lossy", dropped=3)],
    )

    page = write(tmp_path, run)

    for heading in ("Step time", "Handlers", "Background subscribers", "Scalars"):
        assert f"\n{heading}\n" in page.text
    for cell in (
        "p50 4.10 ms, mean 4.10 ms",
        "an iteration",
        "EMAHook.after_train_iter",
        "25.0",
        "JSONLWriter",
        "accuracy",
    ):
        assert cell in page.text
    assert page.tags.count("table") == 5  # the handlers that matter, and of each section all
    assert page.tags.count("figure") == 7
    assert sum("Plotly.newPlot(" in script[:500] for script in page.scripts) == 6
    assert (tmp_path / "page.html").read_text("utf-8").count("<tr class=bad>") == 4
    assert "Red: its p99 went over its budget, as slow_handler said." in page.text


def test_runs_side_by_side(run: Path, other: Path, tmp_path: Path) -> None:
    """One table has a row for each run, others a column for each, with ratios to the first. A run with costs alone, and one with curves alone,
    say what is not there, also on a page of their own."""
    write_lines(tmp_path / "curves", *TRAINED)
    (tmp_path / "costs").mkdir()
    write_costs(tmp_path / "costs", costs(handlers=[], trend=[], subscribers=[]))

    page = write(tmp_path, run, other, tmp_path / "curves", tmp_path / "costs", code=2)

    assert page.text.count("\nfirst\n") > 3
    assert page.tags.count("h1") == 1
    for text in ("\n4 runs\n", "\n3.00×\n", "There are no costs", "There are no curves"):
        assert text in page.text
    assert "There are no costs" in write(tmp_path, tmp_path / "curves", code=2).text


# --- the charts --------------------------------------------------------------------------------------------


def test_phases_are_stacked(run: Path, other: Path) -> None:
    """Each run has a bar of means and a bar of medians; a remark says that medians need not add up."""
    bars, *over_time = phase_charts(named(run, other))

    traces = drawn(bars.figure)
    assert [*traces] == ["data", "forward", "backward", "optimizer", "hooks", "unaccounted"]
    assert traces["hooks"].x == pytest.approx((0.1, 0.1, 0.3, 0.1))
    names = [f"{name}, {what}" for name in ("first", "second") for what in ("mean", "median")]
    assert bars.figure.layout.yaxis.ticktext == tuple(names)
    assert bars.figure.layout.barmode == "stack"
    assert "A bar of medians may be shorter" in bars.note
    assert [chart.title.split(":")[0] for chart in over_time] == ["first", "second"]
    assert drawn(over_time[0].figure)["data"].x == tuple(range(0, 100, 10))


def test_a_slow_run_beside_a_fast_one_is_not_cut_off(tmp_path: Path) -> None:
    """The axis is the same for all, and goes as far as what is usual for each; what is rare is beyond."""
    slow = [TrendPoint(first_iter=0, phases=phases(1, hooks=0.1))]
    long = [TrendPoint(first_iter=i, phases=phases(1, hooks=9.0 if i == 50 else 1e-4)) for i in range(100)]
    make_run(tmp_path / "slow", phases=phases(1, hooks=0.1), trend=slow)
    make_run(tmp_path / "long", phases=phases(100), trend=long)

    _, long_chart, slow_chart = phase_charts(named(tmp_path / "long", tmp_path / "slow"))

    for chart in (long_chart, slow_chart):
        assert chart.figure.layout.yaxis.range == (0, pytest.approx(104 * 1.06))
    assert "up to 9,004 ms are beyond the axis" in long_chart.note
    assert slow_chart.note == ""


def test_handlers_are_compared(run: Path, tmp_path: Path) -> None:
    """A bar a run, red over its budget, with p50 and p99 in the hover. The most expensive are first; a note points to
    the table for those beyond 20, and names those that run phases, which have no bar."""
    over = make_run(tmp_path / "over", handlers=[handler(seconds=1.0, budget=5e-5, over_budget=True)])
    many = [handler(f"hook {number}", seconds=number * 1e-3) for number in range(1, 26)]

    (chart,) = handler_charts(named(run, over, make_run(tmp_path / "many", handlers=many)))

    one, other, third = chart.figure.data
    assert [one.x, other.x, third.x[0]] == [
        pytest.approx((25.0,)),
        pytest.approx((1e4,)),
        pytest.approx(250.0),
    ]
    assert [one.marker.color, other.marker.color] == [(RUN_COLOURS[0],), (BAD,)]
    assert "p50 10.0 µs, p99 100 µs, max 1.00 ms" in one.hovertext[0]
    assert other.hovertext[0].endswith("<br>its budget for p99: 50.0 µs")
    assert [len(each.x) for each in (one, other, third)] == [1, 1, 19]
    assert chart.note.startswith("6 less expensive ones are in the table alone.")
    assert "Not drawn: OptimizerHook.after_train_iter (backward, optimizer in it)." in chart.note


def test_step_times_are_a_histogram(run: Path, tmp_path: Path) -> None:
    """Each run has its bins, without gaps, and a line at p50, p90 and p99; a file without it has no such chart."""
    times = Times(samples=100, mean=5e-3, p50=4e-3, p90=9e-3, p99=30e-3, max=31e-3)
    fast = make_run(tmp_path / "fast", iteration=times, histogram=[(4e-3, 90), (9e-3, 9), (30e-3, 1)])

    (chart,) = [c for c in phase_charts(named(fast, run)) if c.title == "How long single iterations take"]

    (bins,) = chart.figure.data
    assert (sum(bins.y), max(bins.y), bins.y[0], bins.y[-1]) == (100, 90, 0, 0)
    assert max(high - low for low, high in pairwise(bins.x)) == pytest.approx(log10(BIN))
    lines = {10**shape.x0 for shape in chart.figure.layout.shapes}
    assert sorted(lines) == pytest.approx([4e-3, 9e-3, 30e-3])
    labels = [each.text for each in chart.figure.layout.annotations]
    assert labels == ["fast", "p50 4.00 ms", "p90 9.00 ms", "p99 30.0 ms"]
    lowest = min(each.y for each in chart.figure.layout.annotations[1:])
    height = 16 / 150  # of a label, in that of a chart
    assert chart.figure.layout.yaxis.range[1] * (lowest - height) > max(bins.y), (
        "the labels are above all bars"
    )


def test_subscribers_have_bars(tmp_path: Path) -> None:
    """Of the part of the run that each was busy, its longest queue, and the events that it missed; of waits there is none."""
    rows = [subscriber("calm"), subscriber("lossy", dropped=3, failed=1, queued=2, seconds=4.0)]

    page = write(tmp_path, make_run(tmp_path / "run", subscribers=rows, seconds=8.0))

    assert page.text.count("busy\n") == 2
    said = (
        page.text.partition("Busy, backlog and drops\n")[2].split("Busy: the part of the run")[0].split("\n")
    )
    assert [line.strip() for line in said if line.strip()] == [
        "calm",
        "busy",
        "2.5 %",
        "backlog",
        "7",
        "not delivered",
        "0",
        "lossy",
        "busy",
        "50.0 %",
        "backlog",
        "7",
        "not delivered",
        "6",
    ]


def test_a_chart_for_each_scalar(run: Path, other: Path) -> None:
    """It has the modes of all runs; a run has its colour, a mode its line. Rates and times are the last ones."""
    loss, accuracy, lr = scalar_charts(named(run, other))

    assert (loss.title, lr.title, accuracy.title) == ("loss", "lr", "accuracy")
    assert [(name, t.line.color, t.line.dash) for name, t in drawn(loss.figure).items()] == [
        ("first train", RUN_COLOURS[0], "solid"),
        ("first val", RUN_COLOURS[0], "dash"),
        ("second train", RUN_COLOURS[1], "solid"),
        ("second val", RUN_COLOURS[1], "dash"),
    ]
    assert drawn(accuracy.figure)["first val"].y == (0.9,)


def test_a_curve_has_its_unit_its_spikes_and_its_end(tmp_path: Path) -> None:
    """Times are in seconds; a band holds the spikes that a point stands for; a red line marks the first NaN."""
    rows = [scalars(i, time=9.0 if i == 77 else 0.5) for i in range(1, 5001)]
    write_lines(tmp_path / "run", *rows, scalars(5001, loss="NaN"))

    loss, times = scalar_charts(named(tmp_path / "run"))

    low, high, mean = times.figure.data
    assert times.title == "time, s"
    assert (min(low.y), max(high.y)) == (0.5, 9.0)
    assert len(mean.x) <= 2000
    assert (loss.figure.layout.shapes[0].x0, loss.figure.layout.shapes[0].line.color) == (5001, BAD)
    assert loss.figure.layout.annotations[0].text == "train: 1 NaN or inf"


# --- what a run may have -----------------------------------------------------------------------------------


def test_what_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    """In the tables, in the data of the charts, and in the title: no tag of it becomes one of the page."""
    run = make_run(
        tmp_path / "<b>run",
        handlers=[handler(NASTY, event=NASTY, filter=NASTY)],
        subscribers=[subscriber(NASTY, event=NASTY, runs_on=NASTY, failed=1, error=NASTY)],
    )
    info = {"event": "run_info", "mode": "train", "step": 0, "iter": 0, "info": {NASTY: NASTY}}
    write_lines(run, info, scalars(1, NASTY, **{NASTY: 1.0}))

    page = write(tmp_path, run)

    assert not {"img", "b"} & {*page.tags}
    assert page.text.count(NASTY) >= 8
    charts = [script for script in page.scripts if "Plotly.newPlot(" in script[:500]]
    assert len(charts) == len(page.scripts) - 2  # plotly.js, and what shows that a chart failed
    assert not any("<script" in script or "<img" in script or "alert(1)</" in script for script in charts)
    assert any(r"\u0026lt;\u002fscript\u0026gt;" in s or r"&lt;\u002fscript&gt;" in s for s in charts)


def test_standard_output(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`--html -` writes the page there, and nothing else; a file of that name is `./-`, and leaves it to JSON."""
    monkeypatch.chdir(tmp_path)

    assert report(run, "--html", "-") == 0

    said = capfdbinary.readouterr()
    assert (said.out[:15], said.out.rstrip()[-7:], said.err) == (b"<!DOCTYPE html>", b"</html>", b"")
    assert not (tmp_path / "-").exists()
    assert report(run, "--json", "--html", "./-") == 0
    assert json.loads(capfdbinary.readouterr().out)["run"] == str(run)
    assert (tmp_path / "-").is_file()


def test_a_page_without_a_name(run: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--html` alone writes report.html into the directory of the run, again and again; several runs need a name."""
    assert report(run, "--html") == report(run, "--html") == 0
    assert Page(run / "report.html").scripts
    assert capsys.readouterr().err.startswith(f"eventloop: {run / 'report.html'} is written, ")

    (run / "report.html").unlink()
    assert report("--html", run) == 0  # the run is not the name of the page
    assert (run / "report.html").exists()

    assert report(run, other, "--html") == 2
    assert "expected --html FILE, got 2 runs and no FILE" in capsys.readouterr().err
    assert not (other / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("first", 2, "{path} is a directory, and is not replaced: give the name of a new file"),
        (
            "first/metrics.jsonl",
            2,
            "{path} is not a page of HTML, and is not replaced: give the name of a new file",
        ),
        ("nowhere/page.html", 2, "{path} cannot be written: the folder {path.parent} does not exist"),
        (f"{'x' * 250}.html", 1, "{path} cannot be written: File name too long"),
        ("-", 2, "- and --json would both go to standard output: give --html the name of a file"),
    ],
)
def test_a_page_that_cannot_be_written(
    name: str, code: int, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; what was there stays as it was."""
    before = (run / "metrics.jsonl").read_bytes()
    path = tmp_path / name

    assert report(run, "--html", *(["-", "--json"] if name == "-" else [path])) == code

    said = capsys.readouterr()
    told = f"eventloop: --html {message.format(path=path)} (--traceback shows where)\n"
    assert (said.out, said.err) == ("", told)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_without_plotly(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page needs it, and says how to get it; tables do not."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "plotly" else find(name, *more)
    )

    assert report(run, "--html", tmp_path / "page.html") == 2
    assert "needs plotly, " in (said := capsys.readouterr().err)
    assert "pip install 'torch-eventloop[report]'" in said
    assert report(run) == 0
