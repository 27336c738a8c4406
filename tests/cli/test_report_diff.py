"""`eventloop report A B --diff`: what it prints, and `--fail-above` as a gate in CI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.costs.records import TrendPoint, write_costs
from eventloop.description.record import Begin, RunRecord, write_record
from eventloop.reporting.diff.comparing import compare
from eventloop.reporting.diff.text import diff_lines
from eventloop.reporting.report import load_report
from eventloop.util.terminal import print_lines
from tests.cli.reported_runs import TRAINED, costs, handler, make_run, phases, report, scalars, write_lines
from tests.support.trainers import batches, tiny_model

LONG = "AHookWithAVeryLongNameThatNoTerminalShows.after_train_iter"
POINTS = range(0, 500, 10)


def compared(run: Path, hooks: float = 1e-4, **changes: object) -> Path:
    """A run of 500 iterations in 50 points, of 4 ms and the time of the hooks, with two handlers."""
    handlers = [
        handler(trend=[25e-6 * 40] * 12),
        handler(LONG, seconds=5e-3, trend=[(hooks - 50e-6) * 40] * 12),
    ]
    trend = [TrendPoint(first_iter=i, phases=phases(10, hooks)) for i in POINTS]
    return make_run(run, **{"phases": phases(500, hooks), "trend": trend, "handlers": handlers, **changes})


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """A run."""
    return compared(tmp_path / "a", handlers=[handler(trend=[1e-3] * 12), handler("gone", seconds=4e-3)])


@pytest.fixture
def b(tmp_path: Path) -> Path:
    """Another one: its hooks take 0.4 ms more, 9.8 % of an iteration of A."""
    return compared(tmp_path / "b", hooks=5e-4)


def test_text_of_80_columns(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs, handlers of one of them, then the largest difference; noise is named, and what is compared."""
    assert report(a, b, "--diff") == 0

    said = capsys.readouterr()
    assert said.err == ""
    first, second, _, header, _, *rows = said.out.splitlines()
    assert (first, second) == (f"A  {a}  500 iterations", f"B  {b}  500 iterations")
    assert re.split(r"  +", header) == ["phase or handler", "A", "B", "B - A, %", "95 % interval"]
    cells = [re.split(r"  +", row.strip()) for row in rows[:5]]
    assert cells[0][1:] == ["-", "10.0 µs", "+0.2", "-", "only in B"]
    assert cells[1] == ["gone, after_train_iter", "8.00 µs", "-", "-0.2", "-", "only in A"]
    assert cells[2] == ["an iteration", "4.10 ms", "4.50 ms", "+9.8", "+9.8 to +9.8", "slower"]
    assert cells[3] == ["hooks", "100 µs", "500 µs", "+9.8", "+9.8 to +9.8", "slower"]
    assert cells[4][-1] == "noise"
    assert "…" in cells[0][0]
    assert max(map(len, [header, *rows])) <= 80
    assert "the lower decile" in said.out


def test_json_has_the_same(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with whole names, and seconds instead of texts."""
    assert report(a, b, "--diff", "--json", "--fail-above", "5%") == 3

    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows[LONG]["verdict"] == "only in B"
    assert rows["hooks"]["difference"] == pytest.approx(4e-4)
    assert rows["hooks"]["ratio"] == pytest.approx(5.0)
    assert (found["a"]["run"], found["b"]["iterations"], found["iteration"]) == (
        str(a),
        500,
        pytest.approx(4.1e-3),
    )
    assert (found["fail_above"], found["failed"]) == (5.0, ["an iteration", "hooks"])


def test_scores_follow_the_times(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the values of the last step of both, the mean of the pairs, and what is left out."""
    losses = [scalars(step, loss=1 / step) for step in range(10, 101, 10)]
    write_lines(a, *losses, scalars(50, "val", accuracy=0.5), scalars(100, "val", accuracy=0.9))
    write_lines(
        b,
        *losses,
        scalars(50, "val", accuracy="NaN"),
        scalars(100, "val", accuracy=0.8),
        scalars(150, "val", accuracy=0.9),
    )

    assert report(a, b, "--diff", "--json") == 0
    found = json.loads(capsys.readouterr().out)["scores"]["rows"]
    assert report(a, b, "--diff") == 0
    lines = capsys.readouterr().out.splitlines()

    at = next(i for i, line in enumerate(lines) if line.startswith("score "))
    assert re.split(r"  +", lines[at]) == ["score", "A", "B", "mean B - A", "95 % interval", "pairs"]
    assert [re.split(r"  +", line) for line in lines[at + 2 : at + 4]] == [
        ["val accuracy", "0.9", "0.8", "-0.1", "-", "1", "unknown"],
        ["train loss", "0.01", "0.01", "+0", "-", "10", "equal"],
    ]
    assert lines[-2:] == [
        "Steps of one run only, not compared: 1 of B (val accuracy).",
        "NaN or infinite, left out: val accuracy of B (1, first at step 50).",
    ]
    assert [(row["name"], row["last_step"], row["verdict"]) for row in found] == [
        ("accuracy", 100, "unknown"),
        ("loss", 100, "equal"),
    ]


def test_an_output_without_these_characters(a: Path, b: Path) -> None:
    """They are replaced by as many others, so that the columns stay."""
    found = compare(load_report(a), load_report(b))

    plain = [line.text for line in diff_lines(found, "ascii")]

    assert "".join(plain).isascii()
    assert [*map(len, plain)] == [len(line.text) for line in diff_lines(found)]
    assert "10.0 us" in plain[5]


class Terminal:
    """A standard output that is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.mark.parametrize(("no_color", "dim"), [(None, True), ("", True), ("1", False)])
def test_noise_is_dimmed_on_a_terminal(
    no_color: str | None, dim: bool, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines, and no others; not if `NO_COLOR` has a value."""
    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)

    with redirect_stdout(terminal):
        assert report(a, b, "--diff") == 0

    lines = terminal.written.splitlines()
    quiet = "  noise", "  equal", " more handlers differ by noise"
    noise = [line for line in lines if any(word in line for word in quiet)]
    assert len(noise) == 9
    assert all(line.startswith("\x1b[2m") is line.endswith("\x1b[0m") is dim for line in noise)
    assert not any("\x1b" in line for line in lines if line not in noise)


def test_what_comes_from_a_run_does_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its escapes are shown; those that dim a line are not."""
    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)

    with redirect_stdout(terminal):
        print_lines([("a\x1b]0;b", True), ("c\x1bd", False)])

    assert terminal.written == "\x1b[2ma\\x1b]0;b\x1b[0m\nc\\x1bd\n"


def test_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What trainings leave is compared as it is, handlers with intervals too; one that is new comes first."""
    for name in ("a", "b"):
        model = tiny_model()
        trainer = Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=F.cross_entropy,
            train_loader=batches(12),
            max_epochs=5,
            work_dir=tmp_path / name,
            writers=[],
        )
        if name == "b":
            trainer.bus.subscribe(lambda event: None, "after_train_iter", name="new")
        trainer.train()
        trainer.close()

    assert report(tmp_path / "a", tmp_path / "b", "--diff", "--json") == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["name"] == "new, after_train_iter"
    (timer,) = [row for row in rows if row["name"] == "IterTimerHook.after_train_iter"]
    assert timer["low"] <= timer["high"]


# --- the gate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "code", "line"),
    [
        (
            "5%",
            3,
            "slower by more than 5 % of an iteration: an iteration by +9.8 % (+9.8 to +9.8); hooks by +9.8 % (+9.8 to +9.8)",
        ),
        ("5", 3, "slower by more than 5 % of an iteration: an iteration by"),
        (" 9.7 % ", 3, "slower by more than 9.7 % of an iteration: an iteration by"),
        ("0.5%", 3, "slower by more than 0.5 % of an iteration: an iteration by"),
        ("10%", 0, "no row is slower by more than 10 % of an iteration\n"),
    ],
)
def test_the_gate_says_in_one_line_which_row_failed(
    limit: str, code: int, line: str, a: Path, b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with exit code 3; what was faster passes."""
    assert report(a, b, "--diff", "--fail-above", limit) == code

    err = capsys.readouterr().err
    assert err.startswith(f"eventloop: --fail-above: {line}")
    assert err.count("\n") == 1
    assert report(b, a, "--diff", "--fail-above", limit) == 0


def test_the_gate_warns_if_it_could_not_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It passes, and says below which difference iterations are noise, if that is more than the limit."""
    loud = [compared(tmp_path / name) for name in ("a", "b")]

    assert report(*loud, "--diff", "--fail-above", "1%") == 0

    assert (
        "but a slower iteration could not be told: differences below 1.5 % are noise"
        in capsys.readouterr().err
    )


def test_rows_of_noise_share_a_line(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers that differ by noise below 1 % of an iteration have rows with `--all` alone."""
    assert report(a, a, "--diff") == 0
    short = capsys.readouterr().out
    assert report(a, a, "--diff", "--all") == 0
    long = capsys.readouterr().out

    assert "more handlers differ by noise below 1% of an iteration (--all shows them)" in short
    assert len(long.splitlines()) > len(short.splitlines())


# --- bad input ---------------------------------------------------------------------------------------------------

HERE = "{run}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--diff compares two runs: expected two directories, got 1"),
        ([HERE, HERE], "--diff compares two runs: expected two directories, got 3"),
        (
            [HERE, "--html", "page.html"],
            "--diff prints text or --json, and --html is a page without it: give one of the two",
        ),
        ([HERE, "--fail-above", "fast"], "--fail-above must be a percentage such as 5%, got 'fast'"),
        ([HERE, "--fail-above", "nan"], "--fail-above must be a percentage such as 5%, got 'nan'"),
        ([HERE, "--fail-above=-5%"], "--fail-above must be a percentage such as 5%, got '-5%'"),
        ([HERE, "--fail-above", "5%%"], "--fail-above must be a percentage such as 5%, got '5%%'"),
        ([HERE, "--fail-above", ""], "--fail-above must be a percentage such as 5%, got ''"),
        (
            [HERE, "--fail-above", "0.05"],
            "--fail-above 0.05 may mean 5% or 0.05%: expected a percentage, write it with %",
        ),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    options: list[str], message: str, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a file is read."""
    assert report(a, *(option.format(run=a) for option in options), "--diff") == 2
    assert_one_line(capsys, message)


def test_a_limit_needs_a_comparison(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --diff there is nothing to fail."""
    assert report(a, b, "--fail-above", "5%") == 2
    assert_one_line(capsys, "--fail-above is the limit of a comparison: expected --diff and two runs with it")


def without_costs(run: Path) -> None:
    """A run that has curves alone."""
    write_lines(run, *TRAINED)


def record(**changes: object) -> Callable[[Path], None]:
    """A run with such a record."""

    def make(run: Path) -> None:
        run.mkdir()
        write_costs(run, costs(**changes))

    return make


def of_another_schema(run: Path) -> None:
    """A run that a later version wrote."""
    path = make_run(run) / "costs.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 7'))


def torn(run: Path) -> None:
    """A run whose record is cut short."""
    path = make_run(run) / "costs.json"
    path.write_bytes(path.read_bytes()[:-9])


def test_runs_of_different_units_are_refused(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An iteration is a batch in one of them, and several in the other."""
    for run, unit in ((a, "batch"), (b, "update")):
        begin = Begin(time=1e9, iter=0, host="node1")
        write_record(
            run,
            RunRecord(
                begins=[begin],
                model="Net",
                parameters=1,
                trainable=1,
                device="cpu",
                ranks=1,
                python="3.11",
                torch="2.13",
                eventloop="0.1.0",
                config={},
                options={"trainer": {"unit": unit}},
            ),
        )

    assert report(a, b, "--diff") == 2

    assert_one_line(capsys, "--diff compares iterations: expected runs of one unit, got 'batch' and 'update'")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            without_costs,
            "{run} has no costs to compare: expected costs.json, which a run writes after some seconds, got a run without it",
        ),
        (of_another_schema, "{run}/costs.json has version 7, newer than this eventloop reads (1)"),
        (torn, "{run}/costs.json is truncated or not a cost record: "),
        (Path.mkdir, "{run} has nothing to report: expected a run's directory with costs.json"),
        (
            record(phases=phases(0), trend=[]),
            "{run} has no iterations to compare: expected a training, got a run without one",
        ),
        (
            record(phases=phases(9), trend=[]),
            "{run} is too short to compare: expected at least 12 iterations, got 9, with 0 points in the trend",
        ),
        (
            record(),
            "{run} is too short to compare: expected at least 12 iterations, got 100, with 10 points in the trend",
        ),
        (
            lambda run: compared(run, hooks=-1.0),
            "{run} has no times to compare: expected iterations of more than 0 s, got -0.996 s",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_cannot_be_compared_is_one_line_and_exit_code_2(
    make: Callable[[Path], object],
    message: str,
    first: bool,
    a: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It names the run, also with a limit; nothing is printed."""
    bad = tmp_path / "bad"
    make(bad)

    assert report(*((bad, a) if first else (a, bad)), "--diff", "--fail-above", "5%") == 2

    assert_one_line(capsys, message.format(run=bad))


def test_other_handlers_are_no_error(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if not one is in both; a run under way says so."""
    other = compared(tmp_path / "other", handlers=[handler("quite", seconds=1e-3)], complete=False)

    assert report(a, other, "--diff") == 0

    out = capsys.readouterr().out
    assert (out.count("only in A"), out.count("only in B")) == (2, 1)
    assert f"B  {other}  500 iterations, under way or killed\n" in out


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    """The command wrote this line, and nothing else."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"eventloop: {message}")
    assert (said.err.count("\n"), said.err.endswith(" (--traceback shows where)\n")) == (1, True)


@pytest.mark.parametrize("seconds", [1e-300, 1e300])
def test_impossible_times_are_compared_all_the_same(seconds: float, tmp_path: Path) -> None:
    """Whatever a record says."""
    made = [compared(tmp_path / name, hooks=seconds) for name in ("a", "b")]

    assert report(*made, "--diff", "--fail-above", "5%") == 0
    assert report(*made, "--diff", "--json") == 0
