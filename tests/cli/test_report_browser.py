"""The page of `eventloop report --html` in a real browser: it draws everything, and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Page

from eventloop.costs.records import Times, WaitCost
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
from tests.conftest import DEADLINE

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.cli.browsers"]

ALL_DRAWN = (
    "() => [...document.querySelectorAll('.plotly-graph-div')].every(c => c.querySelector('.main-svg'))"
)


STEPS = Times(samples=100, mean=5e-3, p50=4e-3, p90=9e-3, p99=30e-3, max=31e-3)


class Opened(NamedTuple):
    """A page in the browser, and what it did that it should not."""

    page: Page
    requests: list[str]
    errors: list[str]

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

    def open_page(*runs: Path, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Opened:
        target = tmp_path_factory.mktemp("page") / "page.html"
        assert report(*runs, "--html", target) == 0
        context = browser.new_context(
            offline=True, viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        contexts.append(context)
        found = Opened(context.new_page(), [], [])
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("console", lambda message: found.errors.append(message.text))
        found.page.goto(target.as_uri())
        found.wait(ALL_DRAWN)
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
        seconds=10.0,
        phases=replace(phases(100), checkpoint=0.2),
        waits=[WaitCost("checkpoint", "iterations", "the last of several checkpoints", 3, 0.2, 0.1)],
        iteration=STEPS,
        histogram=[(4e-3, 90), (9e-3, 9), (30e-3, 1)],
        handlers=[handler(budget=5e-5, over_budget=True), handler("x", seconds=1.0)],
    )
    write_lines(first, *TRAINED, begins(100), *long, scalars(5001, loss="NaN"))
    second = make_run(
        directory / "second",
        subscribers=[subscriber(dropped=5), subscriber("Other", failed=2)],
        phases=phases(100, hooks=2e-3),
        iteration=STEPS,
        histogram=[(5e-3, 80), (30e-3, 20)],
    )
    return [first, second]


@pytest.mark.parametrize("number", [1, 2])
def test_every_chart_is_drawn_and_nothing_is_loaded(number: int, opened: Open, runs: list[Path]) -> None:
    """Of one run and of two: there is no error, and no request but the one for the page itself. No chart is wider
    than a screen or a telephone; a button gives it a logarithmic axis, and none sends the data away, as plotly's do."""
    shown = opened(*runs[:number])

    for width in (390, 1280):
        shown.page.set_viewport_size({"width": width, "height": 900})
        shown.wait(f"() => document.documentElement.scrollWidth <= {width}")
    titles = shown.page.evaluate(
        "() => [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
    )
    assert titles
    assert not shown.page.get_by_text("could not draw").is_visible()
    shown.page.locator("figure[aria-label=grad_norm] .updatemenu-button", has_text="log").click(force=True)
    chart = "document.querySelector('[aria-label=grad_norm] .plotly-graph-div')"
    shown.wait(f"() => {chart}.layout.yaxis.type === 'log'")
    assert not [title for title in titles if "cloud" in title.lower() or "edit" in title.lower()]
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [shown.page.url]
    assert shown.page.url.startswith("file://")


def test_nothing_of_a_run_becomes_a_part_of_the_page(opened: Open, tmp_path: Path) -> None:
    """No script of it runs, and no tag of it is made; the hover over a handler shows its name as it is."""
    nasty = "<img src=http://127.0.0.1/x onerror=document.title='bad'><a href='javascript:1'>y</a>"
    values: dict[str, Any] = {nasty: 1.0}
    run = make_run(
        tmp_path / "run",
        handlers=[handler("<b>&amp;</b>%{x}", event="<i>"), handler(nasty, event=nasty, seconds=1e-4)],
        subscribers=[subscriber(nasty, error=nasty, failed=1)],
    )
    write_lines(run, scalars(1, nasty, **values), scalars(1, "val", **values))

    shown = opened(run)

    bars = shown.page.locator("figure", has_text="What each handler adds").locator(".point path")
    bars.first.hover(force=True)
    hover = shown.page.locator(".hoverlayer .hovertext").first
    hover.wait_for()
    said = hover.text_content() or ""
    for part in ("25.00 µs an iteration", "p50 10.0 µs, p99 100 µs, max 1.00 ms", "<b>&amp;</b>%{x}, <i>"):
        assert part in said
    assert shown.page.title() == "run · eventloop report"
    assert shown.page.locator("img").count() == 0
    assert shown.page.locator("body a:not(.modebar-btn), .main-svg a").count() == 0
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [shown.page.url]


def test_a_browser_that_runs_no_scripts(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    """The tables are there."""
    assert report(*runs, "--html", tmp_path / "page.html") == 0
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())

    assert page.get_by_role("cell", name="OptimizerHook.after_train_iter").first.is_visible()
    page.get_by_text("As a table").nth(1).click()  # that of the curves is the first
    assert page.get_by_role("cell", name="JSONLWriter: dropped").is_visible()
    context.close()


def test_a_browser_that_cannot_draw(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    """A sentence says so, above the tables, if plotly.js is of a syntax that the browser does not know."""
    assert report(*runs, "--html", tmp_path / "page.html") == 0
    source = (tmp_path / "page.html").read_text("utf-8")
    (tmp_path / "page.html").write_text(source.replace('"use strict";', "of a later year;", 1), "utf-8")
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())

    assert page.get_by_text("This browser could not draw every chart; the tables say the same.").is_visible()
    assert page.get_by_role("cell", name="OptimizerHook.after_train_iter").first.is_visible()
    context.close()


# --- looks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_a_telephone_reaches_every_column(number: int, opened: Open, runs: list[Path]) -> None:
    """The page itself never scrolls sideways; a table does in its own box, with the names in sight."""
    shown = opened(*runs[:number], width=390)

    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    shown.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    boxes = shown.page.evaluate(SCROLLED)
    assert any(box["hidden"] > 0 for box in boxes)
    assert [
        box for box in boxes if box["right"] > 390 or box["last"] > box["right"] + 1 or box["name"] < 0
    ] == []


SCROLLED = """[...document.querySelectorAll('.table')].map(box => {
  box.scrollLeft = 1e6
  const cells = box.querySelectorAll('thead th')
  const right = each => each.getBoundingClientRect().right
  return {hidden: box.scrollWidth - box.clientWidth, right: right(box), last: right(cells[cells.length - 1]),
          name: cells[0].getBoundingClientRect().left}
})"""


@pytest.mark.parametrize("width", [390, 1280])
def test_no_legend_is_under_a_button(width: int, opened: Open, runs: list[Path]) -> None:
    """Neither plotly's own buttons nor those of an axis are over the legend of their chart."""
    shown = opened(*runs, width=width)

    covered = shown.page.evaluate(COVERED)

    assert len(covered) > 5
    assert [title for title, under in covered if under] == []


COVERED = """[...document.querySelectorAll('figure')].filter(each => each.querySelector('.infolayer .legend')).map(each => {
  const box = part => part.getBoundingClientRect()
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top
  const legend = box(each.querySelector('.infolayer .legend'))
  const buttons = [...each.querySelectorAll('.modebar-group, .updatemenu-button')].map(box)
  return [each.getAttribute('aria-label'), buttons.some(button => !apart(button, legend))]
})"""


def test_several_runs_are_one_table_with_the_best_and_the_worst_marked(
    opened: Open, runs: list[Path]
) -> None:
    """In words, not by a colour alone."""
    shown = opened(*runs)

    first = shown.page.locator("table").first
    assert first.locator("tbody tr").count() == 2
    assert shown.page.locator("h1").all_text_contents() == ["2 runs"]
    assert [
        first.locator("tbody tr").nth(0).locator(f".{mark}").count() > 0 for mark in ("best", "worst")
    ] == [True, False]
    assert [
        first.locator("tbody tr").nth(1).locator(f".{mark}").count() > 0 for mark in ("best", "worst")
    ] == [False, True]
    after = "getComputedStyle(document.querySelector('.worst'), '::after').content"
    assert shown.page.evaluate(after) == '" worst"'


def test_step_times_have_their_percentiles(opened: Open, runs: list[Path]) -> None:
    """In a histogram of each run."""
    shown = opened(*runs)

    chart = shown.page.get_by_label("How long single iterations take")
    labels = chart.locator(".annotation-text").all_text_contents()
    assert labels == ["first", "second", *["p50 4.00 ms", "p90 9.00 ms", "p99 30.0 ms"] * 2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_the_colours_of_the_browser(
    scheme: Literal["light", "dark"], opened: Open, runs: list[Path]
) -> None:
    """The texts of charts have the colour of the page's own text."""
    shown = opened(*runs, scheme=scheme)

    ground = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    text = shown.page.evaluate("getComputedStyle(document.body).color")
    fills = (
        "[...new Set([...document.querySelectorAll('.ytick text, .x2tick text, .infolayer .legendtext')]"
        ".map(each => getComputedStyle(each).fill))]"
    )
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    assert shown.page.evaluate(fills) == [text]
