"""`eventloop watch`, run as a user runs it: text, lines of JSON, and the live view on a terminal."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.cli import main
from eventloop.cli.watch.chart import LABEL, chart
from eventloop.cli.watch.text import view_lines
from eventloop.ownership.owner import records_in
from eventloop.watching import RunReader, RunView
from tests.cli.conftest import ENVIRONMENT
from tests.cli.test_terminal import SHOW_CURSOR, plain
from tests.ownership.conftest import forge
from tests.ownership.trainings import KILL, training
from tests.watching.conftest import add_rows, heartbeat, row

__all__ = ["forge", "heartbeat"]

LEAVE_SCREEN = "\x1b[?1049l"


def watch(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "eventloop", "watch", *map(str, arguments)],
        env={**ENVIRONMENT, "COLUMNS": "100", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Run the command in this process; return its exit code, its lines, and its errors."""
    code = main(["watch", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out.splitlines(), output.err


# --- text --------------------------------------------------------------------------------------------------


def test_once_prints_a_run_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State, progress, checkpoints with the best and the newest one, and the phases; exit code 0."""
    code, lines, errors = lines_of(capsys, "--once", run)

    text = "\n".join(lines)
    assert (code, errors) == (0, "")
    assert lines[:2] == [str(run), "ended: completed"]
    assert "iter 12/12  epoch 4/4" in lines[2]
    assert re.search(r"^checkpoint  best_acc_epoch_2: iter 6, .* durable, best acc$", text, re.MULTILINE)
    assert re.search(r"^checkpoint  epoch_4: iter 12, .* durable, newest$", text, re.MULTILINE)
    assert re.search(r"^iteration   .*: data ", text, re.MULTILINE)
    assert "no metrics.jsonl and no events.evl here" in text


@pytest.mark.parametrize("width", [40, 53, 200])
def test_no_line_is_wider_than_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Long ones are cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    many = {f"metric {number}": 1.0 for number in range(30)}
    add_rows(run, *(row(step, "train", **many, loss=1 / step) for step in range(1, 50)))

    _, lines, _ = lines_of(capsys, "--once", run)

    assert max(map(len, lines)) <= width
    assert any(line.startswith("train/loss") for line in lines)


def test_an_output_without_block_characters_gets_plainer_ones(run: Path) -> None:
    """In ASCII nothing is an escape."""
    add_rows(run, *(row(step, loss=1 / step) for step in range(1, 50)))

    ran = watch("--once", run, PYTHONIOENCODING="ascii")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\\u" not in ran.stdout
    assert "train/loss" in ran.stdout
    assert "#" in ran.stdout


def test_without_a_terminal_one_look_is_printed(run: Path) -> None:
    """As with `--once`: nothing waits in a pipe, and there are no colours."""
    ran = watch(run)

    assert (ran.returncode, ran.stderr, "\x1b" in ran.stdout) == (0, "", False)
    assert ran.stdout == watch("--once", run).stdout


def test_chosen_metrics_are_curves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, separated by commas; a misspelled one is named."""
    add_rows(run, *(row(step, loss=1 / step, lr=0.5) for step in range(1, 50)))

    _, lines, _ = lines_of(capsys, "--once", "--metrics", "lr,los", run)

    assert any(re.match(r"train/lr +0\.5 ", line) for line in lines)
    assert any("No scalar 'los' so far, there are: train/loss, train/lr." in line for line in lines)


@pytest.mark.parametrize("height", [None, 24])
def test_a_name_without_a_scalar_is_named_where_its_curve_would_be(run: Path, height: int | None) -> None:
    """Before all details, with the names that there are, also on a low terminal."""
    add_rows(run, *(row(step, loss=1 / step, lr=0.5) for step in range(1, 50)))
    view = RunReader(run, metrics=["nosuch"]).read()

    lines = [line.text for line in view_lines(view, 100, height, "utf-8")]

    (note,) = [number for number, line in enumerate(lines) if "No scalar 'nosuch' so far" in line]
    assert lines[note].endswith("there are: train/loss, train/lr.")
    assert lines[note + 1].startswith("last  ")


def test_several_runs_are_printed_one_after_the_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an empty line between."""
    other = shutil.copytree(run, tmp_path / "other")

    _, lines, _ = lines_of(capsys, "--once", run, other)

    assert lines.index(str(other)) == lines.index("") + 1


def test_once_fails_for_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script sees it by exit code 1, a person by the sentence."""
    with training(tmp_path / "run", iters=20, holds=[8]) as one:
        one.reach("holding")
        one.send(KILL)
        one.process.wait()

        code, lines, _ = lines_of(capsys, "--once", tmp_path / "run")

    assert code == 1
    assert lines[1].startswith("killed at iteration ")


def test_long_lines_are_wrapped_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a note or an advice is lost, and a second line stands below the begin of the text."""
    add_rows(run, row(1, **{f"metric{number}": 1.0 for number in range(30)}))  # type: ignore[arg-type]

    _, lines, _ = lines_of(capsys, "--once", run)

    begin = next(index for index, line in enumerate(lines) if line.startswith("last "))
    assert lines[begin + 1].startswith(" " * 12 + "train/metric") or lines[begin + 1].startswith(
        " " * 12 + "1 "
    )
    assert all(f"metric{number} 1" in " ".join(" ".join(lines).split()) for number in range(30))


# --- bad input ---------------------------------------------------------------------------------------------


def test_files_among_several_runs_are_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the shell's `*` gives is named on one line, and the runs are shown."""
    notes = tmp_path / "notes.txt"
    notes.write_text("")

    code, lines, errors = lines_of(capsys, "--once", run, notes)

    assert (code, lines[0]) == (0, str(run))
    assert errors == (
        f"eventloop: expected directories of runs, got files as well, which are left out: {notes}\n"
    )


def test_files_alone_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a run among them, the first file is one line and exit code 2."""
    names = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for name in names:
        name.write_text("")

    code, lines, errors = lines_of(capsys, "--once", *names)

    assert (code, lines, errors.count("\n")) == (2, [], 1)
    assert re.search(r"a\.txt is no run to watch: expected a directory with .* got a file", errors)


def test_a_directory_that_is_no_run_is_one_line_and_code_2(tmp_path: Path) -> None:
    """With what was expected; `--traceback` shows where."""
    ran = watch("--once", tmp_path)

    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert re.search(
        r"is no run to watch: expected a directory with heartbeat.json .* got nothing", ran.stderr
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", "must be above 0 seconds, got 0"),
        ("inf", "must be above 0 seconds, got inf"),
        ("x", "must be a number of seconds, got 'x'"),
    ],
)
def test_an_interval_must_be_a_number_above_0(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So must the other seconds."""
    for option in ("--interval", "--hung-after"):
        with pytest.raises(SystemExit, match="2"):
            main(["watch", option, given, str(tmp_path)])
        assert f"argument {option}: {message}" in capsys.readouterr().err


def test_a_live_view_without_rich_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the options that need nothing."""
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    code, _, errors = lines_of(capsys, run)

    assert (code, errors.count("\n")) == (2, 1)
    assert "the live view needs rich: pip install 'torch-eventloop[watch]', or use --once or --json" in errors


# --- JSON --------------------------------------------------------------------------------------------------


def test_json_prints_the_fields_of_a_view(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for a run that has ended; it is a `RunView`, without curves unless they are chosen."""
    add_rows(run, row(1, loss=float("nan")), row(2, loss=1.0))
    code, (line,), errors = lines_of(capsys, "--json", run)

    view = msgspec.json.decode(line, type=RunView)
    assert (code, errors) == (0, "")
    assert (view.run, view.state, view.iter, view.curves) == (str(run), "ended", 12, [])
    assert [*json.loads(line)] == [*RunView.__struct_fields__]

    _, (line,), _ = lines_of(capsys, "--json", "--metrics", "loss", run)
    assert [curve["mean"] for curve in json.loads(line)["curves"]] == [[None, 1.0]]


def test_json_has_a_line_for_each_change_of_a_run_until_its_end(tmp_path: Path) -> None:
    """The first at once; the counters go up; the last one says how it ended, and the command ends with 0."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        watching = subprocess.Popen(
            [sys.executable, "-m", "eventloop", "watch", "--json", "--interval", "0.05", run],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        views = [json.loads(watching.stdout.readline())]
        while views[-1]["iter"] != 7:
            views.append(json.loads(watching.stdout.readline()))
        one.go()
        one.end()
        views += map(json.loads, watching.stdout)
        watching.stdout.close()
        assert watching.wait(60) == 0

    iterations = [view["iter"] or 0 for view in views]
    assert iterations == sorted(iterations)
    assert ("training", 7) in [(view["state"], view["iter"]) for view in views]
    assert [(view["state"], view["iter"], view["reason"]) for view in views[-1:]] == [
        ("ended", 20, "completed")
    ]
    changing = ("time", "age", "still", "eta", "sentence")
    kept = [{name: value for name, value in view.items() if name not in changing} for view in views]
    assert all(one != next for one, next in pairwise(kept))


def test_a_reader_that_leaves_ends_the_command(tmp_path: Path) -> None:
    """With the code of a broken pipe, 141, and without an error."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        watching = subprocess.Popen(
            [sys.executable, "-m", "eventloop", "watch", "--json", "--interval", "0.05", run],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        watching.stdout.close()
        one.go()  # what changes is printed
        one.end()

        assert (watching.wait(60), watching.stderr.read()) == (141, "")
        watching.stderr.close()


# --- the live view -----------------------------------------------------------------------------------------

ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its Ctrl-C is ours
os.execv(sys.executable, [sys.executable, "-m", "eventloop", "watch", *sys.argv[1:]])
"""


class Terminal:
    """The command on a terminal, and all that the screen was sent."""

    def __init__(self, *arguments: object, columns: int = 100, lines: int = 40, **environment: str) -> None:
        self._keyboard, screen = os.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        own = {name: value for name, value in ENVIRONMENT.items() if name not in hidden}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *map(str, arguments)],
            env={**own, "TERM": "xterm-256color", **environment},
            stdin=screen,
            stdout=screen,
            stderr=screen,
        )
        os.close(screen)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character

    def press_ctrl_c(self) -> None:
        """Press the keys."""
        os.write(self._keyboard, b"\x03")

    def read_until(self, text: str) -> None:
        """Read until the screen has shown a text."""
        while text not in plain(self.seen):
            assert self._read(), f"it ended without {text!r}: {self.seen}"

    def read_to_end(self) -> str:
        """What the screen was sent, until nobody has it any more."""
        while self._read():
            pass
        return self.seen

    def frames(self) -> list[list[str]]:
        """Each complete drawing of the screen, as its lines."""
        shown, _, _ = self.seen.partition(LEAVE_SCREEN)
        return [plain(frame).splitlines() for frame in shown.split("\x1b[H")[2:]]

    def _read(self) -> bool:
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.seen += self._decoder.decode(data)
        return bool(data)

    def close(self) -> None:
        """Hang up."""
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A run that holds within its iteration 8, and the training."""
    with training(tmp_path / "run", iters=20, holds=[8]) as one:
        one.reach("holding")
        yield tmp_path / "run", one


def test_the_live_view_follows_a_run_to_its_end(held: tuple[Path, Any]) -> None:
    """It shows the counters and charts in place, and leaves the last view below what the terminal had before."""
    run, one = held
    with closing(Terminal(run, "--interval", "0.05")) as terminal:
        terminal.read_until("iter 7/20")
        one.go()
        one.end()
        seen = terminal.read_to_end()
        assert terminal.process.wait(60) == 0

    rest = plain(seen[seen.rindex(LEAVE_SCREEN) :])
    assert "ended: completed" in rest
    assert "iter 20/20" in rest
    assert seen.rindex(SHOW_CURSOR) > seen.rindex("\x1b[?25l")
    last = terminal.frames()[-1]
    assert any(line.startswith("train/loss  ") for line in last)
    assert any(re.search("[\u2801-\u28ff]", line) for line in last)


def test_ctrl_c_ends_it_quietly(held: tuple[Path, Any]) -> None:
    """With 130, without a traceback, and with the terminal as it was; the training goes on."""
    run, one = held
    with closing(Terminal(run)) as terminal:
        terminal.read_until("iter 7/20")
        terminal.press_ctrl_c()
        seen = terminal.read_to_end()
        assert terminal.process.wait(60) == 130

    assert "Traceback" not in seen
    assert LEAVE_SCREEN in seen
    assert seen.rindex(SHOW_CURSOR) > seen.rindex("\x1b[?25l")
    one.go()
    assert one.run()["trained"] == 20


@pytest.mark.parametrize(("columns", "lines"), [(40, 20), (40, 5), (61, 40)])
def test_a_small_terminal_is_not_overrun(run: Path, columns: int, lines: int) -> None:
    """No line is wider than it and no drawing is higher, and without colour there is none."""
    add_rows(run, *(row(step, loss=1 / step, lr=0.5) for step in range(1, 50)))
    with closing(Terminal(run, "--metrics", "*", columns=columns, lines=lines, NO_COLOR="1")) as terminal:
        seen = terminal.read_to_end()
        assert terminal.process.wait(60) == 0

    frames = terminal.frames()
    assert frames
    assert max(len(line) for frame in frames for line in frame) <= columns
    assert max(map(len, frames)) <= lines
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen)


def test_two_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    """Each in its column, if each has 40 characters."""
    other = shutil.copytree(run, tmp_path / "other")
    for name, count in ((run, 10), (other, 20)):
        add_rows(name, *(row(step, loss=float(count)) for step in range(1, count)))
    with closing(Terminal(run, other, columns=100)) as terminal:
        terminal.read_to_end()
        assert terminal.process.wait(60) == 0

    frame = terminal.frames()[-1]
    assert any(line.count("ended: completed") == 2 for line in frame)


# --- a chart -----------------------------------------------------------------------------------------------


def test_a_chart_goes_through_its_points() -> None:
    """A straight line down is the diagonal of the dots: with its greatest value, its least one, and its steps."""
    lines = chart([0, 7], [3.0, 0.0], LABEL + 1 + 4, 3)

    assert lines[0] == f"{3:>{LABEL}} ⠑⢄"
    assert lines[1] == f"{0:>{LABEL}}   ⠑⢄"
    assert lines[2] == f"{'':>{LABEL}} 0  7"


def test_a_chart_of_one_value_is_flat() -> None:
    """In the middle, and without an error."""
    lines = chart([5, 6], [2.0, 2.0], LABEL + 5, 4, braille=False)

    assert [line.strip().removeprefix("2").strip() for line in lines[:3]] == ["", "****", ""]


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf"), float("nan")]])
def test_a_chart_of_nothing_is_empty(values: list[float]) -> None:
    """No finite value has no place."""
    assert chart([*range(len(values))], values, 40, 5) == []


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e-300, 1e-300], [0.0, float("nan"), 1.0]])
def test_a_chart_of_odd_values_keeps_its_size(values: list[float]) -> None:
    """The largest floats too, whose difference is infinite."""
    lines = chart([*range(len(values))], values, 40, 5)

    assert (len(lines), max(map(len, lines)) <= 40) == (5, True)


def test_the_runs_are_only_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, sizes and times in the directory are as before."""

    def state() -> dict[str, tuple[int, int]]:
        paths = sorted(run.rglob("*"))
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()}

    before = state()
    lines_of(capsys, "--once", run)
    lines_of(capsys, "--json", run)

    assert (state(), records_in(run)) == (before, [])
