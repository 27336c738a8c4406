"""What `eventloop report` says of what is no run, or not a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.reported_runs import make_run, report, write_lines


def files(*names: str) -> Callable[[Path], None]:
    """A directory with empty files, and empty folders where a name ends in a slash."""

    def make(run: Path) -> None:
        run.mkdir()
        for name in names:
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).mkdir() if name.endswith("/") else (run / name).touch()

    return make


def lines(content: bytes) -> Callable[[Path], object]:
    """A run whose `metrics.jsonl` is this."""
    return lambda run: write_lines(run, torn=content)


def costs(before: bytes, after: bytes) -> Callable[[Path], None]:
    """A run with a changed record of costs."""

    def make(run: Path) -> None:
        path = make_run(run) / "costs.json"
        whole = path.read_bytes()
        assert before in whole
        path.write_bytes(whole.replace(before, after, 1))

    return make


NOTHING = (
    "{{run}} has nothing to report: expected a run's directory with costs.json or lines in metrics.jsonl, got {}; a run "
    "writes its first costs after some seconds"
)
NO_LINE = "{run}/metrics.jsonl has no line that JSONLWriter writes: expected JSON objects with `event`, or with `mode` and `step`, got the first line "
NO_RECORD = "{run}/costs.json is truncated or not a cost record: "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: None, f"{NOTHING.format('no directory')} (--tr"),
        (Path.touch, f"{NOTHING.format('a file')}; is it {{up}}? (--tr"),
        (files(), f"{NOTHING.format('nothing')} (--tr"),
        (files("notes.txt"), f"{NOTHING.format('notes.txt')} (--tr"),
        (lambda run: make_run(run / "digits"), f"{NOTHING.format('digits')}; there are runs in digits (--tr"),
        (
            files("events.evl"),
            f"{NOTHING.format('events.evl')}; `eventloop replay {{run}} --to jsonl --out {{run}}` makes metrics.jsonl",
        ),
        (
            files("traces/"),
            f"{NOTHING.format('traces')}; `eventloop trace {{run}}` lists its traces (--traceback",
        ),
        (
            files("epoch_1/manifest.json"),
            f"{NOTHING.format('epoch_1')}; `eventloop checkpoints {{run}}` lists its checkpoints (--traceback",
        ),
        (files("manifest.json"), f"{NOTHING.format('manifest.json')}; is it {{up}}? (--tr"),
        (files("metrics.jsonl"), f"{NOTHING.format('metrics.jsonl')} (--tr"),
        (lines(b'{"mode":"tra'), NO_LINE + 'b\'{{"mode":"tra\''),
        (lines(b'{"time":1.0}\n{"time":2.0}\n'), NO_LINE + 'b\'{{"time":1.0}}'),
        (lines(b"[1, 2]\n[3, 4]\n"), NO_LINE + "b'[1, 2]"),
        (costs(b"true\n}", b""), NO_RECORD),
        (
            costs(b'"version": 1', b'"version": 7'),
            "{run}/costs.json has version 7, newer than this eventloop reads (1): update torch-eventloop",
        ),
        (costs(b"JSONL", b"\xff"), NO_RECORD + "'utf-8' codec can't decode byte 0xff"),
        (
            costs(b"{", b'{"more": ' + b"[" * 9999 + b"]" * 9999 + b","),
            NO_RECORD + "maximum recursion depth exceeded",
        ),
        (
            costs(b'"dropped": 0', b'"dropped": -3'),
            "{run}/costs.json is not a cost record: dropped -3 cannot be a count (--traceback",
        ),
        (
            costs(b'"calls": 100', b'"calls": 18446744073709551616'),
            "{run}/costs.json is not a cost record: calls 18446744073709551616 cannot be a count",
        ),
        (costs(b'"calls": 100', b'"calls": ' + b"9" * 9999), NO_RECORD),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    make: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which of them it is, whatever the path is; nothing is printed, also beside a good run."""
    good, run = make_run(tmp_path / "good"), tmp_path / "a\nrun"
    make(run)

    assert report(good, run) == 2

    said = capsys.readouterr()
    assert said.out == ""
    shown = str(run).replace("\n", " ")
    assert said.err.startswith("eventloop: " + message.format(run=shown, up=tmp_path))
    assert (said.err.count("\n"), said.err.endswith(" (--traceback shows where)\n")) == (1, True)


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file system may have it: tables, JSON and the page are made."""
    run = make_run(tmp_path / "run\udcff")

    assert report(run) == 0
    assert report(run, "--json", "--html", tmp_path / "page.html") == 0

    assert '/run?"' in capsys.readouterr().out
