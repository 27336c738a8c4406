"""The page of `eventloop report --html`: what is in the file, and what it replaces."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import TrendPoint, write_costs
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

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{plotly}}@bad"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run."""
    return make_run(tmp_path / "first")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another one, with dearer hooks."""
    return make_run(tmp_path / "second", phases=phases(100, hooks=3e-4))


class Page(HTMLParser):
    """The texts of a page, its tags, and the addresses in them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.text = ""
        self._script: str | None = None
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep them."""
        self.tags.append(tag)
        self._inside, found = tag, dict(attrs)
        self.addresses += [str(found[name]) for name in ("src", "href", "action", "data") if name in found]
        if tag == "script":
            self.scripts.append((found.get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        """A script ends."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Of a script apart."""
        if self._inside == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = kind, before + data
        elif self._inside != "style":
            self.text += data + "\n"

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What is drawn."""
        (data,) = [script for kind, script in self.scripts if kind == "application/json"]
        found: list[dict[str, Any]] = json.loads(data)
        return found


def write(tmp_path: Path, *runs: Path) -> Page:
    """The page of these runs."""
    assert report(*runs, "--html", tmp_path / "page.html") == 0
    return Page(tmp_path / "page.html")


def test_one_file_that_needs_no_other(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """plotly.js is in it, once; no address is; only its own scripts may run. What was written is said."""
    page = write(tmp_path, run)

    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"eventloop: \S+/page\.html is written, \d\.\d MB\n", said.err)
    assert page.addresses == ["data:,"]
    assert [kind for kind, _ in page.scripts] == ["application/json", None, None]
    assert sum("plotly.js v" in script[:100] for _, script in page.scripts) == 1
    policy = re.search(
        r'Content-Security-Policy" content="([^"]*)"', (tmp_path / "page.html").read_text("utf-8")
    )
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    assert policy[1].count("'sha256-") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"first", "page.html"}


def test_headings_facts_and_tables(run: Path, tmp_path: Path) -> None:
    """In the text of the page, so that it can be read and searched without its charts."""
    page = write(tmp_path, run)

    assert [
        page.text.index(f"\n{heading}\n")
        for heading in ("Step time", "Handlers", "Background subscribers", "Scalars")
    ]
    for cell in (
        "4.10 ms",
        "an iteration, median",
        "(mean 4.10 ms)",
        "2.4 %",
        "EMAHook.after_train_iter",
        "25.0",
        "JSONLWriter",
        "accuracy",
    ):
        assert f"\n{cell}\n" in page.text
    assert page.tags.count("table") == 4
    assert "\nThe charts need JavaScript; the tables say the same.\n" in page.text
    assert page.tags.count("figure") == len(page.charts) == 7


def test_charts_of_a_run(run: Path, tmp_path: Path) -> None:
    """The phases stacked, over the iterations too; handlers with p50 and p99 in the hover; the subscribers; a chart a
    scalar with its modes."""
    bars, trend, handlers, kept_up, loss, lr, accuracy = write(tmp_path, run).charts

    assert [trace["name"] for trace in bars["data"]] == [
        "data", "forward", "backward", "optimizer", "hooks", "unaccounted",
    ]  # fmt: skip
    assert [trace["x"] for trace in bars["data"]] == [[n, n] for n in (0.4, 1.0, 2.0, 0.5, 0.1, 0.1)]
    assert bars["layout"]["yaxis"]["ticktext"] == ["first, mean", "first, median"]
    assert bars["layout"]["barmode"] == "stack"
    assert bars["layout"]["xaxis"]["title"]["text"] == "ms an iteration"
    assert {trace["stackgroup"] for trace in trend["data"]} == {"phases"}
    assert trend["data"][0]["x"] == [*range(0, 101, 10)]
    assert {trace["line"]["width"] for trace in trend["data"]} == {0}
    assert handlers["data"][0]["x"] == [25.0]
    assert "p50 10.0 µs, p99 100 µs, max 1.00 ms" in handlers["data"][0]["hovertext"][0]
    assert kept_up["layout"]["xaxis"]["type"] == "log"
    assert [trace["name"] for trace in loss["data"]] == ["train", "val"]
    assert loss["data"][0]["y"] == [1.0, 0.5, 0.333333, 0.25, 0.2, 0.166667, 0.142857, 0.125, 0.111111, 0.1]
    assert (lr["kind"], len(lr["data"]), accuracy["data"][0]["y"]) == ("curve", 1, [0.9])


def test_drops_and_budgets_are_red(tmp_path: Path) -> None:
    """In the charts as in the tables."""
    run = make_run(
        tmp_path / "run",
        handlers=[handler(budget=5e-5, over_budget=True), handler("fine", budget=5e-5)],
        subscribers=[subscriber(dropped=3, queued=2)],
    )

    page = write(tmp_path, run)

    red = [
        trace["name"]
        for chart in page.charts
        for trace in chart["data"]
        if trace.get("marker", {}).get("color") == "@bad"
    ]
    assert red == ["over its budget", "dropped"]
    assert [trace["name"] for trace in page.charts[3]["data"]][-3:] == [
        "longest queue",
        "dropped",
        "left in the queue",
    ]
    assert (tmp_path / "page.html").read_text("utf-8").count('<tr class="bad">') == 2


def test_a_writer_over_its_budget_is_red(tmp_path: Path) -> None:
    """Its deliveries in the chart, with the budget in the hover, and its row."""
    slow = subscriber(budget=5e-5, over_budget=True)
    run = make_run(tmp_path / "run", subscribers=[subscriber("within", budget=5e-4), slow])

    page = write(tmp_path, run)

    spans = {
        trace["name"]: trace
        for trace in page.charts[3]["data"]
        if trace["type"] == "scatter" and "p99" in trace["name"]
    }
    assert {name: (trace["line"]["color"], trace["y"]) for name, trace in spans.items()} == {
        "wait from the emit, p50 to p99": ("@data", [-0.17, -0.17, None, 0.83, 0.83, None]),
        "delivery, p50 to p99": ("@busy", [0.17, 0.17, None]),
        "delivery over its budget, p50 to p99": ("@bad", [1.17, 1.17, None]),
    }
    hover = spans["delivery over its budget, p50 to p99"]["hovertext"][0]
    assert hover.endswith("<br>its budget for p99: 50.0 µs")
    assert "\nRed: its p99 went over its budget, as slow_handler said.\n" in page.text
    assert (tmp_path / "page.html").read_text("utf-8").count('<tr class="bad">') == 1


def test_runs_side_by_side(run: Path, other: Path, tmp_path: Path) -> None:
    """A bar and a colour a run in each chart, and tables with ratios to the first."""
    page = write(tmp_path, run, other)

    assert "\nsecond / first\n" in page.text
    assert "\n3.00×\n" in page.text
    assert [len(trace["x"]) for trace in page.charts[0]["data"]] == [4] * 6
    (loss,) = [
        c
        for c in page.charts
        if any(t["name"] == "first train" for t in c["data"]) and c["data"][1]["name"] == "first val"
    ]
    assert [(trace["name"], trace["line"]["color"], trace["line"]["dash"]) for trace in loss["data"]] == [
        ("first train", "@run0", "solid"), ("first val", "@run0", "dash"),
        ("second train", "@run1", "solid"), ("second val", "@run1", "dash"),
    ]  # fmt: skip


def test_a_bar_of_medians_says_that_it_is_one(run: Path, tmp_path: Path) -> None:
    """The iteration's own median is in the facts, and may be longer; without medians there is nothing to say."""
    said = "A bar of medians may be shorter than the median iteration"
    (tmp_path / "means").mkdir()
    write_costs(tmp_path / "means", costs(trend=[]))

    assert said in write(tmp_path, run).text
    assert said not in write(tmp_path, tmp_path / "means").text


def test_a_slow_run_beside_a_fast_one_is_not_cut_off(run: Path, tmp_path: Path) -> None:
    """The axis is the same for all, and goes as far as what is usual for each; what is rare for it is beyond."""
    slow = [TrendPoint(first_iter=0, phases=phases(1, hooks=0.1))]
    long = [TrendPoint(first_iter=i, phases=phases(1, hooks=9.0 if i == 50 else 1e-4)) for i in range(100)]
    make_run(tmp_path / "slow", phases=phases(1, hooks=0.1), trend=slow)
    make_run(tmp_path / "long", phases=phases(100), trend=long)

    page = write(tmp_path, tmp_path / "long", tmp_path / "slow")

    ranges = [chart["layout"]["yaxis"]["range"] for chart in page.charts[1:4]]
    assert ranges == [[0, pytest.approx(104 * 1.06)]] * 3
    assert page.text.count("1 point is beyond the axis, up to 9,004 ms") == 2


def test_a_long_curve_has_a_band(tmp_path: Path) -> None:
    """Its spikes are in it; the numbers are there once."""
    write_lines(tmp_path / "run", *(scalars(i, loss=9.0 if i == 77 else 0.5) for i in range(1, 5001)))

    (loss,) = write(tmp_path, tmp_path / "run").charts

    band = loss["data"][0]["band"]
    assert (max(band["high"]), min(band["low"])) == (9.0, 0.5)
    assert len(loss["data"][0]["x"]) <= 2000


def test_where_values_ceased_to_be_finite(tmp_path: Path) -> None:
    """A red line with a word; the values are gaps."""
    write_lines(tmp_path / "run", *TRAINED, scalars(110, loss="NaN"))

    (loss,) = [chart for chart in write(tmp_path, tmp_path / "run").charts if chart["layout"].get("shapes")]

    assert (loss["layout"]["shapes"][0]["x0"], loss["data"][0]["y"][-1]) == (110, None)
    assert loss["layout"]["annotations"][0]["text"] == "train: 1 NaN or inf"


def test_a_constant_is_seen_as_what_it_is(tmp_path: Path) -> None:
    """On an axis of its own size."""
    write_lines(
        tmp_path / "run", *(scalars(step, lr=0.001, zero=0.0) for step in (1, 2)), scalars(3, loss="NaN")
    )

    lr, zero, loss = write(tmp_path, tmp_path / "run").charts

    assert lr["layout"]["yaxis"]["range"] == [0.0005, 0.0015]
    assert "yaxis" not in zero["layout"]
    assert "yaxis" not in loss["layout"]


def test_times_have_their_unit(tmp_path: Path) -> None:
    """Those of IterTimerHook, on the axis and in the table."""
    write_lines(tmp_path / "run", scalars(1, time=0.2, loss=1.0))

    page = write(tmp_path, tmp_path / "run")

    assert page.charts[0]["layout"]["yaxis"] == {"title": {"text": "s"}, "range": pytest.approx([0.1, 0.3])}
    assert "\ntime, s\n" in page.text
    assert "\nloss, s\n" not in page.text


def test_handlers_that_run_phases_are_not_drawn(run: Path, tmp_path: Path) -> None:
    """Beside their bars no other would be seen; a line names them."""
    page = write(tmp_path, run)

    assert page.charts[2]["layout"]["yaxis"]["ticktext"] == ["EMAHook.after_train_iter"]
    assert page.charts[2]["narrow"] == ["EMAHook<br>.after_train_iter"]
    assert "Not drawn: OptimizerHook.after_train_iter (backward, optimizer in it)." in page.text


def test_groups_of_names(tmp_path: Path) -> None:
    """Names with one prefix are below a heading."""
    write_lines(tmp_path / "run", scalars(1, loss=1.0) | {"box/AP": 0.5, "box/AP50": 0.7, "alone/x": 1.0})

    page = write(tmp_path, tmp_path / "run")

    assert "\nbox\n" in page.text
    assert "\nalone\n" not in page.text


def test_costs_only_and_curves_only(tmp_path: Path) -> None:
    """Both have a page, which says what is not there; also one run of each kind."""
    write_lines(tmp_path / "curves", *TRAINED)
    (tmp_path / "costs").mkdir()
    write_costs(tmp_path / "costs", costs(handlers=[], trend=[], subscribers=[]))

    assert "There are no costs" in write(tmp_path, tmp_path / "curves").text
    assert "There are no curves" in write(tmp_path, tmp_path / "costs").text
    both = write(tmp_path, tmp_path / "curves", tmp_path / "costs").text
    assert "There are no costs" in both
    assert "There are no curves" in both


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

    assert [kind for kind, _ in page.scripts] == ["application/json", None, None]
    assert not {"img", "b"} & {*page.tags}
    assert page.text.count(NASTY) >= 8
    drawn = json.dumps(page.charts)
    assert "<script" not in drawn
    assert "<img" not in drawn
    assert "&lt;/script&gt;" in drawn


def test_a_page_is_replaced(run: Path, tmp_path: Path) -> None:
    """A report is made again as often as one likes; of a directory that was given with --json, too."""
    write(tmp_path, run)
    page = tmp_path / "page.html"
    page.write_text("<!doctype html>old", encoding="utf-8")

    write(tmp_path, run)

    assert "old" not in page.read_text("utf-8")[:100]


def test_json_beside_the_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are written."""
    assert report(run, "--json", "--html", tmp_path / "page.html") == 0

    assert json.loads(capsys.readouterr().out)["run"] == str(run)
    assert (tmp_path / "page.html").exists()


def test_standard_output(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`--html -` writes the page there, and nothing else; a file of that name is `./-`."""
    monkeypatch.chdir(tmp_path)

    assert report(run, "--html", "-") == 0

    said = capfdbinary.readouterr()
    assert (said.out[:15], said.out.rstrip()[-7:], said.err) == (b"<!DOCTYPE html>", b"</html>", b"")
    assert not (tmp_path / "-").exists()
    assert report(run, "--html", "./-") == 0
    assert capfdbinary.readouterr().out == b""
    assert (tmp_path / "-").is_file()


def test_standard_output_is_for_one_of_both(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page with JSON behind it is neither."""
    assert report(run, "--html", "-", "--json") == 2

    told = "--html - and --json would both go to standard output: give --html the name of a file"
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"eventloop: {told} (--traceback shows where)\n")


def test_the_help_names_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of `eventloop trace` does."""
    with pytest.raises(SystemExit, match="0"):
        report("--help")

    assert '"-" is standard output' in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("first", 2, "--html {path} is a directory, and is not replaced: give the name of a new file (--traceback"),
        ("first/metrics.jsonl", 2, "--html {path} is not a page of HTML, and is not replaced: give the name of a new file"),
        ("nowhere/page.html", 2, "--html {path} cannot be written: the folder {path.parent} does not exist (--traceback"),
        (f"{'x' * 250}.html", 1, "--html {path} cannot be written: File name too long (--traceback"),
    ],
)  # fmt: skip
def test_a_page_that_cannot_be_written(
    name: str, code: int, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; what was there stays as it was."""
    before = (run / "metrics.jsonl").read_bytes()

    assert report(run, "--html", tmp_path / name) == code

    said = capsys.readouterr()
    assert said.err.startswith("eventloop: " + message.format(path=tmp_path / name))
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_without_plotly(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page needs it, and says how to get it; tables and JSON do not."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "plotly" else find(name, *more)
    )

    assert report(run, "--html", tmp_path / "page.html") == 2
    assert capsys.readouterr().err == (
        "eventloop: a page with charts needs plotly, which the extras demo and report bring: "
        "pip install 'torch-eventloop[report]' (--traceback shows where)\n"
    )
    assert report(run) == 0
    assert report(run, "--json") == 0
