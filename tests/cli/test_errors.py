"""What the command says when something is wrong, and with which exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from eventloop.cli import demo
from eventloop.writers import read_jsonl
from tests.support.internals import substitute


def run(*arguments: str) -> int:
    """The command, in this process."""
    return cli.main(["demo", "--epochs", "1", *arguments])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cdua"], "device 'cdua' cannot be used here: did you mean 'cuda'?"),
        (["--device", "meta"], "device 'meta' cannot be used here: known are auto, cpu, cuda"),
        (["--device", "hpu"], "device 'hpu' cannot be used here"),
        (["--resume"], "holds no checkpoint to resume from"),
        (["--resume", "nowhere.pth"], "no checkpoint at nowhere.pth"),
        (["--work-dir", "/proc/run"], "work_dir '/proc/run' cannot be written"),
        (["--work-dir", "file"], "work_dir 'file' cannot be written: it is a file"),
        (["--work-dir", "/"], "--work-dir must be a directory for one run, got /"),
        (
            ["--seed", str(2**64)],
            f"--seed must be from -2**63 to 2**64 - 1, the range of torch's generators, got {2**64}",
        ),
        (["--seed", str(-(2**63) - 1)], "--seed must be from -2**63"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be done is said in one line before anything is trained."""
    Path("file").touch()

    assert run(*arguments) == 2

    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("eventloop: ")
    assert (errors.count("\n"), errors.endswith(" (--traceback shows where)\n")) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--resume", "--work-dir", "absent"], []),
        (["--resume", "nowhere.pth", "--work-dir", "absent/run"], []),
        (["--resume", "best"], []),
        (["--resume", "--work-dir", "here/run"], ["here"]),
    ],
)
def test_a_resume_of_nothing_leaves_nothing(arguments: list[str], left: list[str]) -> None:
    """No directory that was not there before, and each that was."""
    for path in left:
        Path(path).mkdir()

    assert run(*arguments) == 2

    assert [str(path) for path in Path().rglob("*")] == left


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        ("0", "must be at least 1, got 0"),
        ("-1", "must be at least 1, got -1"),
        ("ten", "must be a whole number, got 'ten'"),
    ],
)
@pytest.mark.parametrize("option", ["demo --epochs", "checkpoints run --prune"])
def test_a_number_below_one_is_refused(
    option: str, epochs: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is no number, by the command line."""
    with pytest.raises(SystemExit, match="2"):
        cli.main([*option.split(), epochs])

    assert f"argument {option.split()[-1]}: {message}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["plan", "my train.py", "--dir", "a b", "best"],
            "--dir a b best; those of a script follow after --: eventloop plan 'my train.py' -- --dir 'a b' best\n",
        ),
        (["plan", "train.py", "--lr", "--json", "--", "x"], "eventloop plan train.py -- --lr\n"),
        (["checkpoints", "runs", "--best"], "unrecognized arguments: --best\n"),
        (["report", "run", "--jsno=1"], "unrecognized arguments: --jsno=1: did you mean '--json'?\n"),
    ],
)
def test_an_argument_that_is_unknown(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script's own, given as to the script, are told where they go; nothing is run."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(given)

    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("reprot", "there is no command 'reprot': did you mean 'report'?\n"),
        ("zzz", "there is no command 'zzz': known are checkpoints, demo, evaluate, init, plan, "),
    ],
)
def test_a_command_that_does_not_exist(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the nearest command, or all of them."""
    with pytest.raises(SystemExit, match="2"):
        cli.main([word, "run"])

    assert message in capsys.readouterr().err


@pytest.mark.representative(1)
@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError])
def test_no_error_of_a_training_is_taken_for_bad_input(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its class, it is raised, after the writers were given everything."""

    class Model(demo.DigitsCNN):
        calls = 0

        def forward(self, x: Any) -> Any:
            Model.calls += self.training
            if Model.calls == 15:
                raise error("in the middle")
            return super().forward(x)  # type: ignore[no-untyped-call]

    substitute(monkeypatch, "demo.DigitsCNN", Model)

    with pytest.raises(error, match="in the middle"):
        run("--work-dir", "run")

    ended = f"Run ended at iteration 14: error: {error.__name__}: in the middle\n"
    assert capsys.readouterr().out.endswith(ended)
    steps = [line["step"] for line in read_jsonl("run/metrics.jsonl") if "loss" in line]
    assert steps[-2:] == [10, 14]
