"""ConsoleWriter in a notebook: a bar and a table, updated in place."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventloop.events import (
    AfterRun,
    BeforeRun,
    BeforeVal,
    CheckpointSaved,
    HandlerFailed,
    ScalarsLogged,
)
from eventloop.writers import ConsoleWriter, notebook
from tests import forked
from tests.conftest import DEADLINE
from tests.support.internals import substitute
from tests.writers.conftest import Attach, emit


class Page:
    """What a notebook shows, by display: the newest text, and how often it was sent."""

    def __init__(self) -> None:
        self.html: dict[str, str] = {}
        self.text: dict[str, str] = {}
        self.sent: dict[str, int] = {}

    def publish(self, data: dict[str, str], display_id: str, update: bool) -> None:
        """Show or replace a display, as a front end does."""
        assert update is (display_id in self.html)
        self.html[display_id], self.text[display_id] = data["text/html"], data["text/plain"]
        self.sent[display_id] = self.sent.get(display_id, 0) + 1

    def shown(self, part: str) -> list[str]:
        """Return the texts of the bars, or of the tables, in the order in which they appeared."""
        return [text for name, text in self.text.items() if name.endswith(part)]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """A notebook, and standard output as its kernel has it."""
    shown = Page()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    substitute(monkeypatch, "notebook._publish", shown.publish)
    return shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bar's clock; it stands still unless a test moves it."""
    now = [100.0]
    substitute(monkeypatch, "notebook.monotonic", lambda: now[0])
    return now


def train(step: int, *, by_epoch: bool = True, **scalars: float) -> ScalarsLogged:
    values = {"loss": 1 / step, "lr": 1e-3, "time": 0.1, **scalars}
    epochs = 10 if by_epoch else None
    return ScalarsLogged(step=step, epoch=step // 180, max_iters=1800, max_epochs=epochs, scalars=values)


def val(step: int, epoch: int = 1, *, by_epoch: bool = True, **scalars: float) -> ScalarsLogged:
    epochs = 10 if by_epoch else None
    return ScalarsLogged(
        mode="val", step=step, epoch=epoch, max_iters=1800, max_epochs=epochs, scalars=scalars
    )


def ended(step: int) -> AfterRun:
    return AfterRun(iter=step, epoch=1, reason="completed")


def test_a_bar_follows_the_training(attach: Attach, page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """One display has the place in the run, loss, speed, remaining time and rate of the newest event; nothing is
    printed."""
    emit(attach(ConsoleWriter()), BeforeRun(), train(10), train(190))

    assert page.shown("bar") == [
        "epoch  2/10  190/1800 · loss  0.0053 · 10.0 it/s · eta  0:02:41 · lr 1.0e-03"
    ]
    (html,) = page.html.values()
    assert '<progress value="190" max="1800"' in html
    assert capsys.readouterr().out == ""


def test_a_table_has_the_validations(attach: Attach, page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """A row each, with the loss of the training beside; columns that appear later are blank before."""
    emit(
        attach(ConsoleWriter()),
        train(180),
        BeforeVal(),
        val(180, 1, loss=0.5, time=0.1),
        train(360),
        BeforeVal(),
        val(360, 2, loss=0.25, accuracy=0.9),
        ended(360),
    )

    assert page.shown("table") == [
        "epoch  train loss  val loss  val accuracy\n1  0.0056  0.5000  \n2  0.0028  0.2500  0.9000"
    ]
    (table,) = [html for name, html in page.html.items() if name.endswith("table")]
    assert table.count("<tr>") == 3
    assert "<td>0.9000</td>" in table
    assert capsys.readouterr().out == "Run ended at iteration 360: completed\n"


def test_a_run_of_iterations(attach: Attach, page: Page) -> None:
    """It counts iterations, in the bar and in the table."""
    emit(attach(ConsoleWriter()), train(500, by_epoch=False), val(500, by_epoch=False, accuracy=0.5))

    assert page.shown("bar")[0].startswith("iter  500/1800 · ")
    assert page.shown("table") == ["iter  train loss  val accuracy\n500  0.0020  0.5000"]


def test_each_run_has_a_bar_of_its_own(attach: Attach, page: Page) -> None:
    """A run in a later cell begins new displays; the former ones keep their last state."""
    emit(
        attach(ConsoleWriter()),
        BeforeRun(),
        train(180),
        val(180, accuracy=0.5),
        ended(180),
        BeforeRun(),
        train(190),
        val(360, 2, accuracy=0.6),
        ended(190),
    )

    first, second = page.shown("bar")
    assert "180/1800" in first
    assert "190/1800" in second
    assert [table.splitlines()[1:] for table in page.shown("table")] == [
        ["1  0.0056  0.5000"],
        ["2  0.0053  0.6000"],
    ]


def test_the_bar_is_not_drawn_for_every_event(attach: Attach, page: Page, clock: list[float]) -> None:
    """Events that follow at once wait for the next drawing; the last state is drawn in any case."""
    emit(attach(ConsoleWriter()), *(train(step) for step in range(1, 100)), ended(99))

    ((text, sent),) = zip(page.text.values(), page.sent.values(), strict=True)
    assert "99/1800" in text
    assert sent <= 4


def test_a_table_of_rapid_validations(attach: Attach, page: Page, clock: list[float]) -> None:
    """It is not sent for each of them, and keeps the newest ones; the last is there in any case."""
    rows = [event for step in range(1, 200) for event in (train(step), val(step, step, accuracy=0.5))]
    emit(attach(ConsoleWriter()), *rows, ended(199))

    (name,) = [name for name in page.text if name.endswith("table")]
    assert page.sent[name] <= 2
    lines = page.text[name].splitlines()
    assert len(lines) == 1 + notebook.MOST_ROWS
    assert lines[-1].startswith("199")


def test_other_events(attach: Attach, page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved checkpoint is named in the bar; failures and the end of the run are printed lines."""
    saved = CheckpointSaved(path="run/iter_180", bytes=1, seconds=0.1)
    failed = HandlerFailed(handler="mine", error="no", count=1)
    emit(attach(ConsoleWriter()), train(180), saved, failed, ended(180))

    assert page.shown("bar")[0].endswith("lr 1.0e-03 · saved iter_180")
    assert capsys.readouterr().out == "mine FAILED (1x): no\nRun ended at iteration 180: completed\n"


def test_a_validation_alone(attach: Attach, page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a training there is no bar, and the metrics are a line."""
    emit(attach(ConsoleWriter()), BeforeRun(), BeforeVal(), val(180, accuracy=0.5), ended(180))

    assert page.html == {}
    assert capsys.readouterr().out.splitlines()[0].split() == ["Epoch(val)", "[1]", "accuracy:", "0.5000"]


def test_names_are_escaped(attach: Attach, page: Page) -> None:
    """A metric's name is text, and not part of the page."""
    named = ScalarsLogged(mode="val", step=180, scalars={"<b>mean</b>": 0.5})
    emit(attach(ConsoleWriter()), train(180), named)

    assert "<th>val &lt;b&gt;mean&lt;/b&gt;</th>" in "".join(page.html.values())


@pytest.mark.parametrize(
    "options", [{"progress": False}, {"stream": io.StringIO()}], ids=["lines", "a stream"]
)
def test_lines_on_request(
    attach: Attach, page: Page, capsys: pytest.CaptureFixture[str], options: dict[str, object]
) -> None:
    """`progress=False`, or a stream of one's own, has lines as anywhere else."""
    emit(attach(ConsoleWriter(**options)), train(180), ended(180))  # type: ignore[arg-type]

    stream = options.get("stream")
    said = stream.getvalue() if isinstance(stream, io.StringIO) else capsys.readouterr().out
    assert said.startswith("Epoch(train) ")
    assert page.html == {}


NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(code) for code in json.loads(sys.argv[1])]
book = nbformat.v4.new_notebook(cells=cells)
NotebookClient(book, timeout=300, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in book.cells]))
"""
BUILD = """
import torch, torch.nn.functional as F
from eventloop import Trainer
model = torch.nn.Linear(2, 3)
data = [(torch.ones(2, 2), torch.tensor([0, 1]))] * 30
def build(epochs):
    return Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, train_loader=data,
        val_loader=data, work_dir="run", max_epochs=epochs)
trainer = build(2)
"""


@pytest.mark.slow
def test_in_a_real_kernel(tmp_path: Path) -> None:
    """Each cell that trains has one bar and one table below it, in their last state, then the end of the run; a cell
    that trains on has its own."""
    import json

    cells = [
        BUILD,
        "trainer.train()",
        "trainer = build(3); trainer.resume(); trainer.train()",
        "trainer.val()['loss'] > 0",
    ]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": forked.ROOT, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NOTEBOOK, json.dumps(cells)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * DEADLINE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    built, first, second, validated = json.loads(ran.stdout.splitlines()[-1])

    assert built == []
    for outputs, total, epochs in ((first, 60, ["1", "2"]), (second, 90, ["3"])):
        bar, table = [each["data"] for each in outputs if each["output_type"] == "display_data"]
        assert f'<progress value="{total}" max="{total}"' in bar["text/html"]
        assert re.findall(r"<tr><td>(\d+)</td>", table["text/html"]) == epochs
        assert "<th>val accuracy</th>" in table["text/html"]
        said = "".join(each["text"] for each in outputs if each["output_type"] == "stream")
        assert said.endswith(f"Run ended at iteration {total}: completed\n")
    assert {each["output_type"] for each in validated} == {"stream", "execute_result"}
