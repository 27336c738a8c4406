"""plotly.js on a page has the core and the traces that the charts draw."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from eventloop.reporting.page.charts import handler_charts, name_runs, phase_charts, scalar_charts
from eventloop.reporting.page.plotly_js import TRACES, with_traces
from eventloop.reporting.report import load_report
from tests.cli.reported_runs import make_run


@pytest.fixture(scope="module")
def source() -> str:
    """The whole plotly.js that is installed."""
    return str(get_plotlyjs())


def test_lines_and_bars_are_all_that_is_left(source: str) -> None:
    """The license, at the head and at the end, stays, and the result is as small as plotly's own basic bundle."""
    taken = with_traces(source)

    assert re.findall(r'moduleType:"trace",name:"(\w+)"', taken) == ["scatter", "bar"]
    assert taken[:200] == source[:200]
    assert taken[-1000:] == source[-1000:]
    assert len(taken.encode()) < 1.36e6


def test_the_charts_need_no_other_traces(tmp_path: Path) -> None:
    """Each chart of a page draws lines, which belong to the core, and the traces that are taken."""
    runs = name_runs(["run"], [load_report(make_run(tmp_path / "run"))])

    charts = [*phase_charts(runs), *handler_charts(runs), *scalar_charts(runs)]

    assert {trace.type for chart in charts for trace in chart.figure.data} == {"scatter", *TRACES}


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (".register([", ".registerAll(["),
        ("={exports:{}}", "={exports:Object()}"),
        ("=0))", "=1))"),
        ('name:"bar",', 'name:"bars",'),
    ],
    ids=["no list", "no modules", "no lazy modules", "no bars"],
)
def test_a_file_of_another_shape_stays_whole(part: str, other: str, source: str) -> None:
    """A later release that is made otherwise gives a larger page, not one without charts."""
    changed = source.replace(part, other)
    assert changed != source

    assert with_traces(changed) == changed
