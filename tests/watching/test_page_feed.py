"""What a page lacks: changes of curves, and one reader for all pages."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.watching import RunReader, RunView
from eventloop.watching.curves import Curve
from eventloop.watching.view import CurveView
from eventloop.watching.web.curve_changes import CurveChanges, changes, whole
from eventloop.watching.web.feed import Feed
from eventloop.watching.web.sent import AT_ONCE, Busy, Request
from eventloop.watching.web.watched import WatchedRun
from tests.watching.conftest import DEADLINE, add_rows, row

# --- curves ------------------------------------------------------------------------------------------------

Shown = dict[tuple[str, str], dict[str, list[Any]]]


def use(shown: Shown, found: CurveChanges | None) -> None:
    """Change what a page shows, as its script does."""
    if found is None:
        return
    decoded = json.loads(msgspec.json.encode(found))
    if decoded["all"]:
        shown.clear()
    for change in decoded["curves"]:
        curve = shown.setdefault((change["mode"], change["name"]), {})
        for name in ("steps", "mean", "low", "high"):
            curve[name] = curve.get(name, [])[: change["start"]] + change[name]


def all_of(curves: list[CurveView]) -> Shown:
    """What a page that was just opened shows."""
    shown: Shown = {}
    use(shown, whole(curves))
    return shown


@pytest.mark.parametrize("seed", range(20))
def test_changes_add_up_to_the_whole(seed: int) -> None:
    """Whatever is logged, merged and logged again after a resume: a page that was open has what a new one gets."""
    chance = random.Random(seed)
    curves = {("train", "loss"): Curve(8), ("val", "loss"): Curve(4), ("train", "lr"): Curve(8)}
    shown: Shown = {}
    before: list[CurveView] = []
    step = 0
    for _ in range(60):
        for _ in range(chance.randrange(6)):
            step = max(1, step + (1 if chance.random() < 0.97 else -chance.randrange(20)))
            for curve in chance.sample([*curves.values()], chance.randrange(4)):
                curve.add(step, chance.choice([math.nan, math.inf, 1.0, chance.random()]))
        if chance.random() < 0.05:
            for curve in curves.values():
                curve.cut(step := chance.randrange(step + 1))
        now = [curve.view(name, mode) for (mode, name), curve in curves.items() if not curve.empty]
        use(shown, changes(before, now))
        before = now

        assert shown == all_of(now)


def test_nothing_new_is_no_change() -> None:
    """A second look at the same records sends nothing, with NaN among them as well."""
    curve = Curve(8)
    for step, value in enumerate([1.0, math.nan, 2.0, math.nan], 1):
        curve.add(step, value)

    assert changes([curve.view("loss", "train")], [curve.view("loss", "train")]) is None


# --- the feed ----------------------------------------------------------------------------------------------


class GatedReader(RunReader):
    """A reader that reads as often as the test allows, and counts."""

    def __init__(self, run: Path) -> None:
        super().__init__(run, metrics=["*"])
        self.gate, self.reads = threading.Semaphore(0), 0

    def read(self) -> RunView:
        assert self.gate.acquire(timeout=DEADLINE)
        self.reads += 1
        return super().read()


@pytest.fixture
def reader(run: Path) -> Iterator[GatedReader]:
    """Of a run that has one record."""
    add_rows(run, row(1, loss=1.0))
    reader = GatedReader(run)
    yield reader
    reader.gate.release(1000)  # for a thread that waits


@pytest.fixture
def live_feed(run: Path, reader: GatedReader) -> Feed:
    """A feed of the run that reads it as often as it can."""
    return Feed([WatchedRun(reader, "run", "#000000")], [run], 0.001)


async def test_pages_share_a_reader(live_feed: Feed, reader: GatedReader) -> None:
    """Twenty pages cause as many reads as one, and get the same messages."""
    pages = [live_feed.messages() for _ in range(20)]
    for number in range(1, 6):
        reader.gate.release()
        received = await asyncio.gather(*map(anext, pages))

        assert len({*received}) == 1
        assert reader.reads == number
    live_feed.close()


async def test_without_a_page_nothing_is_read(live_feed: Feed, reader: GatedReader) -> None:
    """Not before the first one, and not after the last one has gone."""
    reader.gate.release(1000)
    assert reader.reads == 0
    page = live_feed.messages()
    await anext(page)
    await page.aclose()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task  # the reading ends by itself
    reads = reader.reads
    page = live_feed.messages()
    await anext(page)
    live_feed.close()

    assert reads <= 2
    assert reader.reads > reads


async def test_the_server_reads_once_before_the_first_page(live_feed: Feed, reader: GatedReader) -> None:
    """A long log is read by the time that a page is opened, which then reads what was added."""
    reader.gate.release(1000)
    live_feed.begin()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task  # the reading ends by itself
    assert reader.reads == 1

    assert b'"curves"' in await anext(live_feed.messages())
    live_feed.close()
    assert reader.reads >= 2


async def test_a_slow_page_gets_all_again(live_feed: Feed, reader: GatedReader, run: Path) -> None:
    """Nothing is queued for a page that does not read its messages."""
    slow, fast = live_feed.messages(), live_feed.messages()
    first: bytes
    reader.gate.release()
    first, _ = await asyncio.gather(anext(slow), anext(fast))
    for step in (2, 3):
        add_rows(run, row(step, loss=0.5))
        reader.gate.release()
        await anext(fast)
    missed = await anext(slow)
    live_feed.close()

    for message in (first, missed):
        assert "interval" in json.loads(message[len(b"data: ") :])
    assert json.loads(missed[len(b"data: ") :])["runs"][0]["curves"]["curves"][0]["steps"] == [1, 2, 3]


async def test_an_unforeseen_error_ends_the_messages(
    live_feed: Feed, reader: GatedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page gets the error, and the next one that is opened reads again."""
    reader.gate.release(1000)
    substitute = RuntimeError("the disk speaks Greek")

    def fail() -> RunView:
        raise substitute

    page = live_feed.messages()
    await anext(page)
    monkeypatch.setattr(reader, "read", fail)
    with pytest.raises(RuntimeError, match="the disk speaks Greek"):
        async for _ in page:
            pass
    monkeypatch.undo()

    assert b'"head"' in await anext(live_feed.messages())
    live_feed.close()


async def test_commands_that_wait_are_limited(live_feed: Feed) -> None:
    """A page cannot start threads without end."""
    request = Request(run=0, command="note", words=["x"])
    for _ in range(AT_ONCE):
        live_feed.commands.begin(request)

    with pytest.raises(Busy, match="8 commands wait for their answers already"):
        live_feed.send(request)
