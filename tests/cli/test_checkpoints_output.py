"""`eventloop checkpoints`: names that are no text, files that are none, and an output that takes nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventloop.checkpoint.commit import MANIFEST
from eventloop.util.terminal import OutputError, say
from tests.cli.conftest import ENVIRONMENT
from tests.cli.saved_runs import ALL, checkpoints, names

FULL = Path("/dev/full")
FULL_MESSAGE = "eventloop: standard output cannot be written: [Errno 28] No space left on device (--traceback shows where)\n"
CLOSED_MESSAGE = (
    "eventloop: standard output is closed: there is nowhere to write to (--traceback shows where)\n"
)


def in_shell(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, with its streams redirected as a shell does it."""
    command = [sys.executable, "-m", "eventloop", "checkpoints", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT,
    )  # fmt: skip


# --- where it is written to --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--json"], ["--prune", "1", "--yes"]])
def test_a_full_disk_is_one_line_and_exit_code_2(run: Path, arguments: list[str]) -> None:
    """And what was to be pruned stays: nobody was told of it."""
    ran = in_shell(f"> {FULL}", run, *arguments)

    assert (ran.returncode, ran.stderr) == (2, FULL_MESSAGE)
    assert names(run) == ALL


def test_a_closed_output_is_one_line_and_exit_code_2(run: Path) -> None:
    """As after `>&-`, where Python has no standard output at all."""
    ran = in_shell(">&-", run)

    assert (ran.returncode, ran.stderr) == (2, CLOSED_MESSAGE)


def test_without_standard_error_the_exit_code_tells(run: Path) -> None:
    """There is nobody who could be asked, nor told why nothing was removed."""
    ran = in_shell("2>&- <&-", run, "--prune", "1")

    assert ran.returncode == 2
    assert names(run) == ALL


def test_what_cannot_be_written_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `say`, as one error that says what it is about."""
    monkeypatch.setattr(sys, "stdout", None)

    with pytest.raises(OutputError, match="standard output is closed: there is nowhere to write to"):
        say("anything")


def test_characters_that_an_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are written as they are."""
    memory = io.BytesIO()
    with io.TextIOWrapper(memory, encoding="ascii") as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)

        assert say("épôque 1")

        assert memory.getvalue() == b"\\xe9p\\xf4que 1\n"


# --- names -------------------------------------------------------------------------------------------------


def rename(run: Path, name: bytes) -> None:
    """Give a checkpoint a name that no text encodes to."""
    try:
        os.rename(os.fsencode(run / "epoch_3"), os.path.join(os.fsencode(run), name))
    except OSError:
        pytest.skip("this file system takes text only")


def test_a_name_that_is_no_text_is_escaped_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no other bytes than those of text."""
    rename(run, b"epoch_\xff")

    assert checkpoints(run, "--json", "--prune", "5") == 0

    told = json.loads(capsys.readouterr().out)
    assert r"epoch_\udcff" in [each["name"] for each in told["checkpoints"]]
    assert r"epoch_\udcff" in told["prune"]["keep"]


def test_a_name_that_is_no_text_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an escape in the place of what is none, and so it is where it is damaged."""
    rename(run, b"epoch_\xff")

    assert checkpoints(run) == 0
    assert "\nepoch_\\udcff " in capsys.readouterr().out
    next(run.glob(f"epoch_\udcff/{MANIFEST}")).write_bytes(b"")
    assert checkpoints(run) == 1
    assert f"damaged: {run}/epoch_\\udcff/{MANIFEST} is damaged: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_terminal_obeys_no_name(
    run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """ESC, C1 and direction marks of a checkpoint's name are escapes; of JSON it is still the name."""
    name = "epoch\x1b[2J\x9b\u202e"
    rename(run, name.encode())

    assert checkpoints(run, *arguments) == 0

    shown = capsys.readouterr().out
    assert {"\x1b", "\x9b", "\u202e"}.isdisjoint(shown)
    if arguments:
        assert name in [each["name"] for each in json.loads(shown)["checkpoints"]]
    else:
        assert r"epoch\x1b[2J\u009b\u202e" in shown


@pytest.mark.parametrize("arguments", [[], ["--prune", "5"]])
def test_a_name_with_a_line_end_is_one_row(
    run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row for each checkpoint, and a prune a line for what stays."""
    rename(run, b"epoch\n3")

    assert checkpoints(run, *arguments) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [
        "epoch_1", "best_acc_epoch_2", "epoch_2", "epoch", "epoch_4",
    ]  # fmt: skip
    assert len(lines) == 6 + len(arguments)


def test_bad_input_with_a_line_end_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the path is."""
    assert checkpoints(tmp_path / "no\nwhere") == 2

    assert capsys.readouterr().err.count("\n") == 1


# --- numbers and files -------------------------------------------------------------------------------------


def test_more_than_there_can_be_are_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is larger than any of the machine's keeps everything."""
    assert checkpoints(run, "--prune", "9" * 23, "--yes") == 0

    assert capsys.readouterr().out.endswith("There is nothing to remove.\n")
    assert names(run) == ALL


def test_a_single_file_that_goes_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the system is one line too, wherever it is met."""

    def gone(stock: object) -> None:
        raise FileNotFoundError("epoch_4.pth is gone")

    monkeypatch.setattr("eventloop.checkpoint.listing.Stock.inventory", gone)

    assert checkpoints(run) == 2
    assert capsys.readouterr().err == "eventloop: epoch_4.pth is gone (--traceback shows where)\n"
