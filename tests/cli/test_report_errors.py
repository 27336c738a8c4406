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
    return run


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no directory at {run}: expected a run's directory, with costs.json or metrics.jsonl in it"),
        ("file", "{run} is a file: expected a run's directory, with costs.json or metrics.jsonl in it; is it {up}?"),
        ("empty", "{run} is empty: expected a run's directory"),
        ("other", "{run} is not a run: expected a run's directory, with costs.json or metrics.jsonl in it (--tr"),
        ("parent", "{run} is not a run: expected a run's directory, with costs.json or metrics.jsonl in it; there are runs in digits"),
        ("log", "{run} is not a run: expected a run's directory, with costs.json or metrics.jsonl in it; `eventloop replay {run}"),
        ("checkpoint", "{run} is a checkpoint: expected a run's directory, with costs.json or metrics.jsonl in it; is it {up}?"),
        ("torn costs", "{run}/costs.json is torn or no cost record: "),
        ("newer costs", "{run}/costs.json has version 7, newer than this eventloop reads (1): update torch-eventloop"),
        ("torn metrics", "{run}/metrics.jsonl holds no whole line: it is torn"),
        ("other metrics", "{run}/metrics.jsonl holds no line that JSONLWriter writes"),
        ("no metrics", "{run} has nothing to tell yet: metrics.jsonl is empty, and there is no costs.json"),
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
    with pytest.raises(ValueError, match="is empty: expected a run's directory"):
        report(tmp_path, "--traceback")


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them."""
    with pytest.raises(SystemExit, match="0"):
        report("--help")

    words = " ".join(capsys.readouterr().out.split())
    assert "exit codes: 0 done, 1 the page could not be written, 2 bad input (one line), 130" in words
