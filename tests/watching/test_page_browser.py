"""The live page in a real browser, while real runs train."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from eventloop.ownership.status import write_status
from tests.ownership.conftest import Forge
from tests.ownership.trainings import KILL, steps, training
from tests.watching.conftest import DEADLINE, Write, add_rows, row, scalar, status
from tests.watching.page_server import page_server

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.cli.browsers"]


class Opened(NamedTuple):
    """The page in a browser, and what it did that it should not."""

    page: Page
    origin: str
    requests: list[str]
    errors: list[str]

    def wait(self, condition: str) -> None:
        """Until it is true; playwright's own way evaluates a string, which the page forbids."""
        end = monotonic() + DEADLINE
        while not self.page.evaluate(condition):
            assert monotonic() < end, (condition, self.page.locator("body").inner_text(), self.errors)
            self.page.wait_for_timeout(20)

    def wait_for(self, selector: str, text: str) -> None:
        """Until an element has a text in it."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].some(e => e.textContent.includes({json.dumps(text)}))"
        self.wait(f"() => {found}")


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Open the page of some runs; afterwards it has asked its own server alone, and had no error."""
    pages: list[Opened] = []
    with ExitStack() as stack:

        def open_page(*runs: Path, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Opened:
            server = stack.enter_context(page_server(*runs))
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            stack.callback(context.close)
            found = Opened(context.new_page(), server.origin, [], [])
            found.page.on("request", lambda request: found.requests.append(request.url))
            found.page.on("pageerror", lambda error: found.errors.append(str(error)))
            found.page.on("console", lambda message: found.errors.append(message.text))
            found.page.goto(server.url)
            pages.append(found)
            return found

        yield open_page
        for found in pages:
            assert found.errors == []
            assert [url for url in found.requests if not url.startswith((f"{found.origin}/", "data:"))] == []


@contextmanager
def started(run: Path, **options: Any) -> Iterator[Any]:
    """A training that has begun."""
    with training(run, **options) as one:
        one.reach("holding")
        yield one


POINTS = "document.querySelector('[data-name=loss] .plot')?.data?.[0]?.x"


# --- a run that trains -------------------------------------------------------------------------------------


def test_a_curve_grows_while_a_run_trains(tmp_path: Path, opened: Open) -> None:
    """Points come without a reload, up to the last step that the run has logged; then the page says that it ended."""
    run = tmp_path / "run"
    with started(run, iters=12, holds=[6]) as one:
        shown = opened(run)
        shown.wait(f"() => {POINTS}?.includes(5)")
        assert shown.page.locator(".state").inner_text() == "training"
        before = shown.page.evaluate(POINTS)
        one.run()
    shown.wait(f"() => {POINTS}.includes(12)")
    shown.wait_for(".state", "ended")

    assert max(before) < 12
    assert shown.page.evaluate(POINTS) == [step for mode, step in steps(run) if mode == "train"]
    assert shown.page.locator(".progress").get_attribute("aria-valuenow") == "100"


def test_a_button_saves_a_checkpoint(tmp_path: Path, opened: Open) -> None:
    """It is applied by the run, the answer has its path, and the table has it as durable."""
    run = tmp_path / "run"
    with started(run, iters=10**6, interval=10**6, holds=[6]) as one:  # no later one replaces it
        shown = opened(run)
        shown.page.get_by_role("button", name="Checkpoint").click()
        shown.wait_for(".answers", "waiting")
        one.go()
        shown.wait_for(".answers", "applied")
        answer = shown.page.locator(".answers .text").first.inner_text()

    saved = Path(answer.partition(": ")[2])
    assert (saved / "manifest.json").is_file()
    shown.wait_for("[data-table=checkpoints] tr", saved.name)


def test_a_run_is_paused_noted_and_stopped(tmp_path: Path, opened: Open) -> None:
    """By the buttons and the dialog; a paused run has a button to go on, and one that has ended takes no command."""
    run = tmp_path / "run"
    with started(run, iters=10**6, holds=[6]) as one:
        shown = opened(run)
        one.go()
        shown.page.get_by_role("button", name="Pause").click()
        shown.wait_for(".state", "paused")
        shown.page.get_by_role("button", name="Note").click()
        shown.page.keyboard.type("looks <b>good</b>")
        shown.page.keyboard.press("Enter")
        shown.wait_for(".notices", "looks <b>good</b>")
        shown.page.get_by_role("button", name="Go on").click()
        shown.wait_for(".state", "training")
        shown.page.get_by_role("button", name="Stop").click()
        shown.page.keyboard.type("seen enough")
        shown.page.keyboard.press("Enter")
        shown.wait_for(".sentence", "ended: seen enough")
        one.run()

    assert shown.page.locator(".run .actions button:enabled").count() == 0


def test_a_dialog_that_is_cancelled_sends_nothing(tmp_path: Path, opened: Open) -> None:
    """By Escape and by its button."""
    run = tmp_path / "run"
    with started(run, iters=12, holds=[6]) as one:
        shown = opened(run)
        for cancel in ("Escape", "Tab+Enter"):
            shown.page.get_by_role("button", name="Stop").click()
            for key in cancel.split("+"):
                shown.page.keyboard.press(key)
            shown.wait("() => !document.getElementById('dialog').open")
        trained = one.run()["trained"]

    assert trained == 12
    assert [url for url in shown.requests if url.endswith("/command")] == []


def test_a_refused_command_names_what_exists(tmp_path: Path, opened: Open) -> None:
    """The run's own refusal."""
    run = tmp_path / "run"
    with started(run, iters=10**6, holds=[6]) as one:
        shown = opened(run)
        one.go()
        shown.page.get_by_role("button", name="Other").click()
        shown.page.locator("#dialog-value").fill("prun 0.3")
        shown.page.keyboard.press("Enter")
        shown.wait_for(".answers", "refused")
        answer = shown.page.locator(".answers .text").first.inner_text()

    assert "unknown command 'prun'" in answer


def test_a_run_that_is_resumed_goes_on_in_the_page(tmp_path: Path, opened: Open) -> None:
    """A killed run is said to be, and its curve goes on from the checkpoint, without the steps that are repeated."""
    run = tmp_path / "run"
    with started(run, iters=12, interval=4, holds=[10]) as one:
        shown = opened(run)
        shown.wait(f"() => {POINTS}?.includes(9)")
        one.send(KILL)
        one.process.wait()
        shown.wait_for(".state", "killed")
    with training(run, iters=12, interval=4, resume=True) as one:
        one.next_line()
        one.go()
        one.run()
    shown.wait_for(".state", "ended")
    shown.wait(f"() => {POINTS}.includes(12)")

    assert shown.page.evaluate(POINTS) == [*range(1, 13)]


# --- states ------------------------------------------------------------------------------------------------


def test_a_run_that_hangs_is_said_to(run: Path, forge: Forge, heartbeat: Write, opened: Open) -> None:
    """With the command that shows where it stands."""
    forge()
    heartbeat(moved=1000.0, time=1090.0)
    shown = opened(run)

    shown.wait_for(".state", "hung")
    assert "no iteration has ended for" in shown.page.locator(".sentence").inner_text()
    assert shown.page.title().startswith("⚠ ")


def test_runs_are_side_by_side(tmp_path: Path, opened: Open) -> None:
    """Each with its own state, and their curves in one chart in the colours of the runs."""
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, state in zip(runs, ("training", "ended"), strict=True):
        run.mkdir()
        write_status(run, status(state=state, reason="completed" if state == "ended" else None))
        add_rows(run, *(row(step, loss=1 / step) for step in range(1, 20)))
    shown = opened(*runs)

    shown.wait("() => document.querySelector('[data-name=loss] .plot')?.data?.length === 2")
    assert [*map(str.strip, shown.page.locator(".state").all_inner_texts())] == ["unknown", "ended"]
    boxes = [shown.page.locator(".run").nth(number).bounding_box() for number in (0, 1)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    colours = shown.page.evaluate(
        "document.querySelector('[data-name=loss] .plot')?.data.map(line => line.line.color)"
    )
    assert len({*colours}) == 2


def test_a_wrong_address_says_what_to_open(run: Path, opened: Open) -> None:
    """A page without the token shows nothing of the run."""
    add_rows(run, row(1, loss=1.0))
    shown = opened(run)
    shown.wait_for("#link", "live")
    shown.page.goto("about:blank")
    shown.page.goto(f"{shown.origin}/")

    shown.wait_for("#link", "no access: open the address that eventloop watch has printed")
    assert shown.page.locator(".run").count() == 0


# --- what is drawn -----------------------------------------------------------------------------------------


def test_hostile_names_are_shown_as_text(tmp_path: Path, opened: Open) -> None:
    """Of runs, scalars and notices: nothing that a run logs becomes an element of the page, or runs."""
    hostile = "<img src=x onerror=document.title='owned'>"
    run = tmp_path / hostile
    run.mkdir()
    note = {"event": "text_logged", "mode": "train", "step": 1, "name": "note", "text": hostile}
    add_rows(run, scalar(1, hostile, 1.0), scalar(2, hostile, 2.0), row(3, hostile, loss=1.0), note)
    shown = opened(run)
    shown.wait("() => document.querySelectorAll('.main-svg').length >= 2")

    assert shown.page.locator(".chart h3").first.inner_text() == hostile
    assert shown.page.locator(".name").inner_text() == hostile
    assert hostile in shown.page.locator(".notices").inner_text()
    shown.page.evaluate(
        "() => Plotly.Fx.hover([...document.querySelectorAll('.plot')].find(e => e.data), [{curveNumber: 0, pointNumber: 0}])"
    )
    shown.wait("() => document.querySelector('.hoverlayer > *')")
    assert shown.page.locator("img").count() == 0
    assert "owned" not in shown.page.title().removeprefix("100 %").partition("<img")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(
    tmp_path: Path, opened: Open, width: int, scheme: Literal["light", "dark"]
) -> None:
    """Of a run with something of everything, its names long, on a telephone and on a desk."""
    run = tmp_path / ("a_long_name_of_a_run" * 5)
    with training(run, iters=20) as one:
        one.next_line()
        one.go()
        one.run()
    add_rows(run, *(scalar(step, "a/" + "long_name" * 20, 1.0 / step) for step in range(1, 20)))
    shown = opened(run, width=width, scheme=scheme)
    shown.wait(
        "() => document.querySelector('.main-svg') && document.querySelector('[data-table=checkpoints] tr')"
    )

    assert shown.page.evaluate("document.documentElement.scrollWidth") == width
    for card in shown.page.locator(".card:visible, .run").all():
        box = card.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width


def test_an_update_moves_nothing(tmp_path: Path, opened: Open) -> None:
    """Whatever has been on the screen stays where it is when new records come."""
    run = tmp_path / "run"
    with started(run, iters=12, holds=[6]) as one:
        shown = opened(run)
        shown.wait(f"() => {POINTS}?.includes(5)")
        places = "[...document.querySelectorAll('.run .figures, #curves, .chart, .chart .plot')].map(e => e.getBoundingClientRect().y)"
        shown.wait("() => document.querySelectorAll('.chart').length >= 4")
        before = shown.page.evaluate(places)
        one.run()
        shown.wait(f"() => {POINTS}.includes(12)")

        assert shown.page.evaluate(places)[: len(before)] == before


def test_a_hundred_thousand_records_are_a_chart(run: Path, opened: Open) -> None:
    """As at most 800 points that keep the greatest and the least value, and later records come to them."""
    add_rows(run, *(row(step, loss=5.0 if step == 77_777 else 1.0) for step in range(1, 100_001)))
    shown = opened(run)
    last = "document.querySelector('[data-name=loss] .plot')?.data?.at(-1)?.x"
    shown.wait(f"() => {last}?.at(-1) === 100000")
    count = shown.page.evaluate(f"{last}.length")
    greatest = shown.page.evaluate("Math.max(...document.querySelector('[data-name=loss] .plot')?.data[1].y)")
    add_rows(run, row(100_001, loss=0.5))
    shown.wait(f"() => {last}.at(-1) === 100001")
    shown.wait_for("[data-name=loss] .values b", "0.5")

    assert 400 <= count <= 800
    assert greatest == 5.0


def test_charts_are_found_and_smoothed(run: Path, opened: Open) -> None:
    """The field leaves the charts whose names fit; the slider draws a calmer line over the pale one."""
    add_rows(run, *(row(step, loss=step % 2, acc=1.0) for step in range(1, 200)))
    shown = opened(run)
    shown.wait(f"() => {POINTS}?.length === 199")
    shown.page.locator("#find").fill("LOS")
    assert shown.page.locator(".chart:visible h3").all_inner_texts() == ["loss"]
    shown.page.locator("#smoothing").fill("0.95")
    shown.wait("() => document.querySelector('[data-name=loss] .plot')?.data.length === 2")
    smooth = shown.page.evaluate("document.querySelector('[data-name=loss] .plot')?.data[1].y.slice(-20)")

    assert max(smooth) - min(smooth) < 0.1
    shown.page.locator("#find").fill("nothing")
    assert shown.page.locator("#none").is_visible()
