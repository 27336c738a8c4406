"""The page of `eventloop report --html` in a real browser: it draws everything, and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from eventloop.costs.records import TrendPoint
from tests.cli.reported_runs import (
    TRAINED,
    begins,
    handler,
    make_run,
    phases,
    report,
    scalars,
    subscriber,
    write_lines,
)

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.cli.browsers"]

DEADLINE = 60.0
"""Seconds; no test waits as long while all is well."""


VALIDATE = """() => [...document.querySelectorAll('.chart')]
    .flatMap(chart => Plotly.validate(chart.data, chart.layout) || [])
    .filter(found => found.code !== 'unused')  // an attribute without an effect in this chart
    .map(found => found.msg)"""


ALL_DRAWN = "() => [...document.querySelectorAll('.chart')].every(chart => chart.querySelector('.main-svg'))"


TICKS = """() => [...document.querySelectorAll('.xtick text, .x2tick text')].map(tick => tick.textContent)"""


class Opened(NamedTuple):
    """A page in the browser, and what it did that it should not."""

    page: Page
    requests: list[str]
    errors: list[str]

    def draw_all(self) -> None:
        """Make the window as high as the page, so that every chart is drawn, and wait until it is."""
        height = self.page.evaluate("() => document.documentElement.scrollHeight")
        self.page.set_viewport_size({"width": 1280, "height": height})
        self.wait(ALL_DRAWN)

    def wait(self, condition: str) -> None:
        """Until it is true; playwright's own way evaluates a string, which the page forbids."""
        end = monotonic() + DEADLINE
        while not self.page.evaluate(condition):
            assert monotonic() < end, condition
            self.page.wait_for_timeout(20)


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open the page of some runs, without a network."""
    contexts = []

    def open_page(*runs: Path, scheme: Literal["light", "dark"] = "light", before: str = "") -> Opened:
        target = tmp_path_factory.mktemp("page") / "page.html"
        assert report(*runs, "--html", target) == 0
        context = browser.new_context(
            offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 800}
        )
        contexts.append(context)
        found = Opened(context.new_page(), [], [])
        found.page.add_init_script(before)
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("console", lambda message: found.errors.append(message.text))
        found.page.goto(target.as_uri())
        return found

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of them, with something of everything."""
    directory = tmp_path_factory.mktemp("runs")
    long = [scalars(i, grad_norm=1.0 + i % 7, lr=0.1) for i in range(1, 5001)]
    first = make_run(
        directory / "first",
        device=phases(10),
        handlers=[handler(budget=5e-5, over_budget=True), handler("x", seconds=1.0)],
    )
    write_lines(first, *TRAINED, begins(100), *long, scalars(5001, loss="NaN"))
    second = make_run(
        directory / "second", subscribers=[subscriber(dropped=5), subscriber("Other", failed=2)]
    )
    return [first, second]


@pytest.fixture(scope="module")
def one(opened: Open, runs: list[Path]) -> Opened:
    """The page of the first, all of it drawn."""
    shown = opened(runs[0])
    shown.draw_all()
    return shown


@pytest.fixture(scope="module")
def two(opened: Open, runs: list[Path]) -> Opened:
    """The page of both."""
    shown = opened(*runs)
    shown.draw_all()
    return shown


@pytest.mark.parametrize("number", ["one", "two"])
def test_every_chart_is_drawn_and_nothing_is_loaded(number: str, request: pytest.FixtureRequest) -> None:
    """Of one run and of two: plotly finds nothing wrong with any chart, there is no error, and no request but the one
    for the page itself."""
    shown: Opened = request.getfixturevalue(number)

    wrong = shown.page.evaluate(VALIDATE)
    assert wrong == []
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [shown.page.url]
    assert shown.page.url.startswith("file://")


def test_no_chart_is_wider_than_the_window(two: Opened) -> None:
    """Neither on a screen nor on a telephone; wide tables scroll by themselves."""
    for width in (420, 1280):
        two.page.set_viewport_size({"width": width, "height": 900})
        two.wait(f"() => document.documentElement.scrollWidth <= {width}")


def test_light_and_dark(opened: Open, runs: list[Path]) -> None:
    """As the system is, also when that changes while the page is open: the page and the charts in it."""
    shown = opened(runs[0], scheme="dark")
    colours = "() => [getComputedStyle(document.body).backgroundColor, document.querySelector('.chart').layout.paper_bgcolor]"
    shown.wait("() => document.querySelector('.chart .main-svg')")
    assert shown.page.evaluate(colours) == ["rgb(18, 21, 27)", "#1a1f28"]

    shown.page.emulate_media(color_scheme="light")

    shown.wait("() => document.querySelector('.chart').layout.paper_bgcolor === '#ffffff'")
    assert shown.page.evaluate(colours) == ["rgb(246, 247, 249)", "#ffffff"]


READS = """(() => {
    const read = Object.getOwnPropertyDescriptor(MediaQueryList.prototype, "matches").get;
    window.reads = 0;
    Object.defineProperty(MediaQueryList.prototype, "matches", {
        get() { window.reads += this.media.includes("prefers-color-scheme"); return read.call(this); },
    });
})()"""


def test_the_scheme_is_read_once(opened: Open, runs: list[Path]) -> None:
    """However many charts are drawn: Chromium tells of no change that a read saw first, and half a page would stay dark."""
    shown = opened(runs[0], before=READS)

    shown.draw_all()

    assert shown.page.evaluate("() => window.reads") == 1


def test_charts_far_below_come_later(opened: Open, tmp_path: Path) -> None:
    """A run with many scalars opens at once; by itself, and without scrolling, every chart is drawn then: a page that is
    saved or printed has them all."""
    names: dict[str, Any] = {f"layer{i}": 1.0 for i in range(60)}
    write_lines(tmp_path / "run", scalars(1, **names))

    shown = opened(tmp_path / "run")

    drawn = "() => document.querySelectorAll('.chart .main-svg').length"
    shown.wait("() => document.querySelector('.chart .main-svg')")
    assert shown.page.evaluate(drawn) < shown.page.locator(".chart").count()
    shown.wait(ALL_DRAWN)
    assert shown.page.evaluate("() => window.scrollY") == 0


def test_names_are_short_on_a_telephone(opened: Open, tmp_path: Path) -> None:
    """The bars have most of the width; on a wide window the names are whole again."""
    long = handler("ParamSchedulerHookOfALongName.after_train_iter")
    shown = opened(make_run(tmp_path / "run", handlers=[handler(), long]))
    shown.draw_all()
    chart = "document.querySelector('[aria-label^=\"What each handler\"]')"

    shown.page.set_viewport_size({"width": 400, "height": 900})

    shown.wait(f"() => {chart}.layout.yaxis.ticktext[1] === 'ParamSche…LongName<br>.after_train_iter'")
    shown.wait(f"() => {chart}._fullLayout._size.w > 170")
    shown.page.set_viewport_size({"width": 1280, "height": 900})
    shown.wait(f"() => {chart}.layout.yaxis.ticktext[1] === 'ParamSchedulerHookOfALongName.after_train_iter'")


def test_between_two_iterations(opened: Open, tmp_path: Path) -> None:
    """An axis of few of them has ticks like 0.5, and none of thousandths; one of many has 20k."""
    point = [TrendPoint(first_iter=0, phases=phases(1))]
    run = make_run(tmp_path / "one", phases=phases(1), trend=point, subscribers=[subscriber(peak_queued=1)])
    write_lines(run, scalars(1, loss=1.0))
    shown = opened(run)
    shown.draw_all()

    ticks = shown.page.evaluate(TICKS)

    assert {"0.5", "1"} <= {*ticks}
    assert not [tick for tick in ticks if tick.endswith("m")]
    shown.page.evaluate(
        "() => Plotly.relayout(document.querySelectorAll('.chart')[1], {'xaxis.range': [0, 40000]})"
    )
    assert "20k" in shown.page.evaluate(TICKS)


def test_switches_of_the_curves(one: Opened) -> None:
    """Logarithmic axes, and a moving average of what is noisy, which leaves the values where they are."""
    noisy = "document.querySelector('[aria-label=grad_norm]')"
    traces = one.page.evaluate(f"() => {noisy}.data.length")

    one.page.get_by_label("logarithmic").check()
    one.wait(f"() => {noisy}.layout.yaxis.type === 'log'")
    one.page.get_by_label("smooth what is noisy").uncheck()
    one.wait(f"() => {noisy}.data.length === {traces - 1}")


def test_the_hover_says_p50_and_p99(opened: Open, tmp_path: Path) -> None:
    """Of a handler; its own text is shown as it is, whatever it looks like."""
    run = make_run(tmp_path / "run", handlers=[handler("<b>&amp;</b>%{x}", event="<i>")])
    shown = opened(run)
    shown.draw_all()

    bar = shown.page.locator("figure", has_text="What each handler adds").locator(".point path").first
    bar.hover(force=True)

    hover = shown.page.locator(".hoverlayer .hovertext").first
    hover.wait_for()
    said = hover.text_content() or ""
    assert "25.00 µs an iteration" in said
    assert "p50 10.0 µs, p99 100 µs, max 1.00 ms" in said
    assert "<b>&amp;</b>%{x}, <i>" in said


def test_nothing_of_a_run_becomes_a_part_of_the_page(opened: Open, tmp_path: Path) -> None:
    """No script of it runs, and no tag of it is made."""
    nasty = "<img src=http://127.0.0.1/x onerror=document.title='bad'><a href='javascript:1'>y</a>"
    values: dict[str, Any] = {nasty: 1.0}
    run = make_run(
        tmp_path / "run", handlers=[handler(nasty, event=nasty)], subscribers=[subscriber(nasty, error=nasty, failed=1)]
    )  # fmt: skip
    write_lines(run, scalars(1, nasty, **values), scalars(1, "val", **values))

    shown = opened(run)
    shown.draw_all()

    assert shown.page.title() == "run · eventloop report"
    assert shown.page.locator("img").count() == 0
    assert shown.page.locator("main a:not(.modebar-btn), .main-svg a").count() == 0
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [shown.page.url]


def test_no_button_sends_the_data_away(one: Opened) -> None:
    """plotly.js has one that does."""
    titles = one.page.evaluate(
        "() => [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
    )

    assert set(titles) == {"Download plot", "Zoom", "Pan", "Autoscale", "Reset axes"}


def test_a_browser_that_runs_no_scripts(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    """The tables are there."""
    assert report(*runs, "--html", tmp_path / "page.html") == 0
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())

    assert page.get_by_role("cell", name="JSONLWriter: dropped").is_visible()
    context.close()
