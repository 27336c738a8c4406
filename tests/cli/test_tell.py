"""`eventloop tell` sends a command to a training in another process, and prints its answer in one line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.cli.tell import options_first
from eventloop.ownership import read_owner
from eventloop.ownership.acquiring import owning
from tests.commands.steered import Steered, steered
from tests.forked import ROOT
from tests.support.process_support import until

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """A training that ends with the module, and has a CheckpointHook."""
    with steered(tmp_path_factory.mktemp("tell") / "run", interval=1_000_000) as training:
        yield training


def run_tell(run: Path, *words: str) -> int:
    """The command, in this process."""
    return cli.main(["tell", str(run), *words])


def test_applied(training: Steered, capsys: Capture) -> None:
    """The exit code is 0, and a line says after which iteration."""
    assert run_tell(training.run, "note", "a=1", "looks", "well") == 0

    out, err = capsys.readouterr()
    assert re.fullmatch(r"applied after iteration \d+\n", out)
    assert err == ""


def test_the_path_of_a_checkpoint(training: Steered, capsys: Capture) -> None:
    """The line ends with the path of the checkpoint, which is there."""
    assert run_tell(training.run, "checkpoint") == 0

    path = re.fullmatch(r"applied after iteration \d+: (.+)\n", capsys.readouterr().out)
    assert path is not None
    assert (Path(path[1]) / "manifest.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("0.5", "times=3"),
        ("times=3", "amount=0.5"),
        ("--timeout", "60", "0.5", "3"),
        ("0.5", "3", "--timeout=60"),
    ],
)
def test_words_and_named_arguments(training: Steered, capsys: Capture, words: tuple[str, ...]) -> None:
    """Arguments are given by their place or by their name, and options stand anywhere."""
    assert run_tell(training.run, "scale", *words) == 0

    assert capsys.readouterr().out.endswith(": amount 0.5, times 3, name all\n")


def test_a_negative_number_is_no_option(training: Steered, capsys: Capture) -> None:
    """A word may begin with a minus sign."""
    assert run_tell(training.run, "scale", "-0.5", "--timeout", "60") == 0

    assert capsys.readouterr().out.endswith(": amount -0.5, times 1, name all\n")


def test_refused(training: Steered, capsys: Capture) -> None:
    """The exit code is 1, and a line says why."""
    assert run_tell(training.run, "push", "three") == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"eventloop: refused after iteration \d+: push expects 'push NUMBER', got number='.+': Expected `int`, got `str`\n",
        err,
    )


def test_json(training: Steered, capsys: Capture) -> None:
    """An answer is one JSON object on one line, also one that refuses."""
    assert run_tell(training.run, "push", "7", "--json") == 0
    assert run_tell(training.run, "--json", "push") == 1

    applied, refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert (applied["command"], applied["outcome"], applied["result"]) == ("push", "applied", {"number": 7})
    assert (refused["outcome"], refused["result"]) == ("refused", {})


def test_no_wait(training: Steered, capsys: Capture) -> None:
    """The command is sent, its id printed, and its answer will be in the outbox."""
    assert run_tell(training.run, "push", "8", "--no-wait") == 0

    sent = re.fullmatch(r"sent as (\d+-[0-9a-f]{8})\n", capsys.readouterr().out)
    assert sent is not None
    answer = training.run / "outbox" / f"{sent[1]}.json"
    until(answer.exists)
    assert json.loads(answer.read_bytes())["result"] == {"number": 8}


def test_help_of_a_run(training: Steered, capsys: Capture) -> None:
    """The usage is followed by the commands of the run, its own ones with their parameters and docstrings."""
    assert run_tell(training.run, "--help") == 0

    out = capsys.readouterr().out
    assert out.startswith("usage: eventloop tell RUN COMMAND")
    assert f"the commands of {training.run}:\n" in out
    assert "  scale AMOUNT [TIMES] [NAME]: Return the arguments, by name.\n" in out
    assert "\n  evaluated " not in out  # a command of `eventloop evaluate` alone


def test_help_without_a_run(capsys: Capture) -> None:
    """Without a run, the usage with the commands and the exit codes is printed."""
    assert cli.main(["tell", "--help"]) == 0

    out = capsys.readouterr().out
    assert "stop [REASON]" in out
    assert "3 no answer" in out


def test_stacks(training: Steered, capsys: Capture) -> None:
    """The stack of each thread of the run is printed, with the name of the thread."""
    assert run_tell(training.run, "stacks") == 0

    out = capsys.readouterr().out
    assert '"MainThread" (most recent call first):' in out
    assert "training/trainer.py" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("set", "lr"), "set expects NAME=VALUE, such as lr=1e-4, got 'lr'"),
        (("set",), "set expects NAME=VALUE, such as lr=1e-4, got nothing"),
        (("set", "lr=1", "lr=2"), "expected each name once, got 'lr' twice"),
        (("note", "x" * 70_000), "expected a command of at most 65,536 bytes, got 'note' of "),
    ],
)
def test_wrong_arguments(training: Steered, capsys: Capture, words: tuple[str, ...], error: str) -> None:
    """The exit code is 2, and one line says what was expected."""
    assert run_tell(training.run, *words) == 2

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"eventloop: {error}")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "expected RUN, the run's directory; eventloop tell --help lists the commands"),
        (["run"], "expected COMMAND, such as stop; eventloop tell --help lists the commands"),
        (
            ["run", "stop", "--timeout", "0"],
            "argument --timeout: must be a number of seconds above 0, got '0'",
        ),
        (["run", "stop", "--timeot=3"], "unrecognized arguments: --timeot=3"),
    ],
)
def test_a_command_line_that_is_wrong(capsys: Capture, words: list[str], error: str) -> None:
    """The usage is printed, and what was expected."""
    with pytest.raises(SystemExit) as end:
        cli.main(["tell", *words])

    assert end.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_no_such_run(tmp_path: Path, capsys: Capture, there: bool) -> None:
    """A directory without a run, and one that does not exist, give 2 and one line, and nothing is written."""
    run = tmp_path if there else tmp_path / "no"

    assert run_tell(run, "stop") == 2

    what = "has no run under way" if there else "is no directory"
    expected = f"eventloop: expected the directory of a training that runs, and {run} {what} (--traceback shows where)\n"
    assert capsys.readouterr().err == expected
    assert [*tmp_path.iterdir()] == []


def test_no_answer_in_time(tmp_path: Path, capsys: Capture) -> None:
    """The exit code is 3; the line says that the process lives, and that the command was withdrawn."""
    with owning(tmp_path, "training", ""):
        owner = read_owner(tmp_path)
        assert owner is not None
        assert run_tell(tmp_path, "stop", "--timeout", "0.05") == 3
        assert capsys.readouterr().err == (
            f"eventloop: no answer within 0.05 s: the run's process lives ({socket.gethostname()}, process {owner.pid}, "
            f"since {owner.since}); the command was withdrawn\n"
        )
        assert run_tell(tmp_path, "stop", "--timeout", "0.05", "--json") == 3

    fields = json.loads(capsys.readouterr().out)
    assert (fields["outcome"], fields["withdrawn"], fields["lives"]) == ("no answer", True, True)
    assert [*(tmp_path / "inbox").iterdir()] == []


def test_a_run_that_was_killed(tmp_path: Path, capsys: Capture) -> None:
    """The exit code is 3 at once, and the line has machine, process and start; `--no-wait` leaves the command there."""
    run = tmp_path / "run"
    with steered(run) as training:
        training.process.kill()
        training.process.communicate()
    owner = read_owner(run)
    assert owner is not None

    assert run_tell(run, "stop") == 3
    who = f"{socket.gethostname()}, process {owner.pid}, since {owner.since}"
    assert capsys.readouterr().err == (
        f"eventloop: no answer: the run's process is dead ({who}); the command was not sent\n"
    )
    assert run_tell(run, "stop", "--no-wait") == 0
    assert len([*(run / "inbox").iterdir()]) == 1


def test_options_come_first() -> None:
    """Options are found anywhere before a `--`; all other words keep their order."""
    given = ["RUN", "--timeout", "5", "cmd", "-1", "--json", "--", "--json"]

    assert options_first(given) == ["--timeout", "5", "--json", "--", "RUN", "cmd", "-1", "--json"]


def test_tell_needs_no_torch(training: Steered) -> None:
    """The process of `eventloop tell` imports neither torch nor numpy."""
    program = "import sys; from eventloop.cli import main; main(sys.argv[1:]); print({'torch', 'numpy'} & {*sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", program, "tell", str(training.run), "push", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout.splitlines()[1] == "set()"


def test_set(training: Steered, capsys: Capture) -> None:
    """Values of param groups are set by NAME=VALUE, where a NAME may end with a star, and all or none."""
    assert run_tell(training.run, "set", "weight_decay=0.5", "lr=0") == 0
    applied = capsys.readouterr().out
    assert run_tell(training.run, "set", "weight_decay*=0.5", "lrr=1") == 1

    assert re.search(r": weight_decay \S+ -> 0\.5, lr \S+ -> 0", applied)
    assert "lrr" in capsys.readouterr().err
