"""What `eventloop report` says of what is no run, or not a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.reported_runs import make_run, report, write_lines


def spoil(tmp_path: Path, how: str) -> Path:
    """A directory that cannot be reported on."""
    run = tmp_path / "run"
    if how not in ("missing", "file"):
        run.mkdir()
    match how:
        case "file":
            run.touch()
        case "other":
            (run / "notes.txt").touch()
        case "parent":
            make_run(run / "digits")
        case "log":
            (run / "events.evl").touch()
        case "checkpoint":
            (run / "manifest.json").touch()
        case "torn costs":
            make_run(run)
            (run / "costs.json").write_bytes((run / "costs.json").read_bytes()[:200])
        case "newer costs":
            make_run(run)
            (run / "costs.json").write_text('{"version": 7, "more": []}')
        case "torn metrics":
            write_lines(run, torn=b'{"mode":"tra')
        case "other metrics":
            write_lines(run, {"time": 1.0}, {"time": 2.0})
        case "no metrics":
            write_lines(run)
        case "trace":
            (run / "traces").mkdir()
        case "checkpoints":
            (run / "epoch_1").mkdir()
            (run / "epoch_1" / "manifest.json").touch()
        case "text":
            write_lines(run, torn=b"hello\nworld\n")
        case "arrays":
            write_lines(run, torn=b"[1, 2]\n[3, 4]\n")
        case "empty" | "missing":
            pass
        case _:
            spoil_costs(make_run(run) / "costs.json", how)
    return run


def spoil_costs(path: Path, how: str) -> None:
    """Change a whole record."""
    whole = path.read_bytes()
    before, after = {
        "flipped costs": (b"JSONL", b"\xff"),
        "deep costs": (b"{", b'{"more": ' + b"[" * 9999 + b"]" * 9999 + b","),
        "negative costs": (b'"dropped": 0', b'"dropped": -3'),
        "huge costs": (b'"calls": 100', b'"calls": 18446744073709551616'),
        "endless costs": (b'"calls": 100', b'"calls": ' + b"9" * 9999),
    }[how]
    assert before in whole
    path.write_bytes(whole.replace(before, after, 1))


NOTHING = (
    "{{run}} has nothing to report: expected a run's directory with costs.json or lines in metrics.jsonl, got {}; a run "
    "writes its first costs after some seconds"
)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", f"{NOTHING.format('no directory')} (--tr"),
        ("file", f"{NOTHING.format('a file')}; is it {{up}}? (--tr"),
        ("empty", f"{NOTHING.format('nothing')} (--tr"),
        ("other", f"{NOTHING.format('notes.txt')} (--tr"),
        ("parent", f"{NOTHING.format('digits')}; there are runs in digits (--tr"),
        ("log", f"{NOTHING.format('events.evl')}; `eventloop replay {{run}} --to jsonl --out {{run}}` makes metrics.jsonl"),
        ("trace", f"{NOTHING.format('traces')}; `eventloop trace {{run}}` lists its traces (--traceback"),
        ("checkpoints", f"{NOTHING.format('epoch_1')}; `eventloop checkpoints {{run}}` lists its checkpoints (--traceback"),
        ("checkpoint", f"{NOTHING.format('manifest.json')}; is it {{up}}? (--tr"),
        ("no metrics", f"{NOTHING.format('metrics.jsonl')} (--tr"),
        ("torn costs", "{run}/costs.json is truncated or not a cost record: "),
        ("newer costs", "{run}/costs.json has version 7, newer than this eventloop reads (1): update torch-eventloop"),
        ("torn metrics", '{run}/metrics.jsonl has no line that JSONLWriter writes: expected JSON objects with `event`, or with `mode` and `step`, got the first line b\'{{"mode":"tra\''),
        ("other metrics", "{run}/metrics.jsonl has no line that JSONLWriter writes"),
        ("text", "{run}/metrics.jsonl has no line that JSONLWriter writes: expected JSON objects with `event`, or"),
        ("arrays", "{run}/metrics.jsonl has no line that JSONLWriter writes: expected JSON objects with `event`, or"),
        ("flipped costs", "{run}/costs.json is truncated or not a cost record: 'utf-8' codec can't decode byte 0xff"),
        ("deep costs", "{run}/costs.json is truncated or not a cost record: maximum recursion depth exceeded"),
        ("negative costs", "{run}/costs.json is not a cost record: dropped -3 cannot be a count (--traceback"),
        ("huge costs", "{run}/costs.json is not a cost record: calls 18446744073709551616 cannot be a count (--traceback"),
        ("endless costs", "{run}/costs.json is truncated or not a cost record: "),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    how: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which of them it is; nothing is printed, also beside a good run."""
    good, run = make_run(tmp_path / "good"), spoil(tmp_path, how)

    assert report(good, run) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("eventloop: " + message.format(run=run, up=tmp_path))
    assert (said.err.count("\n"), said.err.endswith(" (--traceback shows where)\n")) == (1, True)


def test_traceback_shows_where_bad_input_was_found(tmp_path: Path) -> None:
    """Asked for, the error itself is raised."""
    with pytest.raises(ValueError, match=r"expected a run's directory .*, got nothing"):
        report(tmp_path, "--traceback")


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them."""
    with pytest.raises(SystemExit, match="0"):
        report("--help")

    words = " ".join(capsys.readouterr().out.split())
    assert "exit codes: 0 done, 1 the page could not be written, 2 bad input (one line), 130" in words


def test_a_message_is_one_line_whatever_the_path_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name may have a line end."""
    assert report(tmp_path / "a\nb") == 2

    said = capsys.readouterr().err
    assert f"{tmp_path}/a b has nothing to report: expected a run's directory" in said
    assert said.count("\n") == 1


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file system may have it: tables, JSON and the page are made."""
    run = make_run(tmp_path / "run\udcff")

    assert report(run) == 0
    assert report(run, "--json", "--html", tmp_path / "page.html") == 0

    assert '/run?"' in capsys.readouterr().out
