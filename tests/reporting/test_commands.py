"""The commands that were applied to a run are in its report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventloop import cli
from eventloop.commands.messages import Applied
from eventloop.commands.record import NAME, write_record
from tests.cli.reported_runs import make_run

Capture = pytest.CaptureFixture[str]
STEERED = [
    Applied(iter=12, epoch=1, id="1-00000001", command="set", arguments={"lr*": "0.5"}, source="anna@login"),
    Applied(
        iter=1500, epoch=2, id="2-00000002", command="note", arguments={"text": "<b>ok</b>"}, source="bo@x"
    ),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run to which two commands were applied."""
    run = make_run(tmp_path / "run")
    write_record(run / NAME, STEERED)
    return run


def test_the_text_has_a_row_for_each(run: Path, capsys: Capture) -> None:
    """With its arguments, its sender, and the iteration after which it was applied."""
    assert cli.main(["report", str(run), "--all"]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["set", "lr*=0.5", "anna@login", "12"] in lines
    assert ["note", "text=<b>ok</b>", "bo@x", "1,500"] in lines


def test_the_document_has_them_in_their_order(run: Path, capsys: Capture) -> None:
    """As the record has them."""
    assert cli.main(["report", str(run), "--json"]) == 0

    document = msgspec.json.decode(capsys.readouterr().out)
    assert msgspec.convert(document["commands"], list[Applied]) == STEERED


def test_a_damaged_record_is_named(run: Path, capsys: Capture) -> None:
    """The error has the path and the line, and what was expected."""
    (run / NAME).write_text("no command\n")

    assert cli.main(["report", str(run)]) == 2
    assert f"{run / NAME}, line 1: expected an applied command" in capsys.readouterr().err
