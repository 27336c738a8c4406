"""`eventloop checkpoints`: names that are no text, files that are none, and an output that takes nothing."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.checkpoint.commit import MANIFEST
from eventloop.util.terminal import print_line
from tests.cli.saved_runs import ALL, checkpoints, names

FULL = Path("/dev/full")
FULL_MESSAGE = "eventloop: standard output cannot be written: [Errno 28] No space left on device (--traceback shows where)\n"


# --- where it is written to --------------------------------------------------------------------------------


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was to be pruned stays: nobody was told of it."""
    with FULL.open("w") as full, redirect_stdout(full):
        assert cli.main(["checkpoints", str(run), "--prune", "1", "--yes"]) == 2

    assert capsys.readouterr().err == FULL_MESSAGE
    assert names(run) == ALL


def test_characters_that_an_output_lacks_are_escaped() -> None:
    """The others are written as they are."""
    memory = io.BytesIO()
    with io.TextIOWrapper(memory, encoding="ascii") as ascii_only:
        with redirect_stdout(ascii_only):
            assert print_line("épôque 1")

        assert memory.getvalue() == b"\\xe9p\\xf4que 1\n"


# --- names -------------------------------------------------------------------------------------------------


def rename(run: Path, name: bytes) -> None:
    """Give a checkpoint a name that no text encodes to."""
    try:
        os.rename(os.fsencode(run / "epoch_3"), os.path.join(os.fsencode(run), name))
    except OSError:
        pytest.skip("this file system takes text only")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"epoch_\xff", r"epoch_\udcff"),
        ("epoch\x1b[2J\x9b\u202e".encode(), r"epoch\x1b[2J\u009b\u202e"),
        (b"epoch\n3", "epoch 3"),
    ],
    ids=["no text", "controls", "line end"],
)
def test_a_name_is_escaped(run: Path, name: bytes, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No terminal obeys it, and a row and a line of what stays have it on one line; in JSON it is the name, but for
    bytes that are no text. So it is where it is damaged."""
    rename(run, name)

    assert checkpoints(run, "--prune", "5") == 0
    text = capsys.readouterr().out
    assert checkpoints(run, "--prune", "5", "--json") == 0
    as_json = capsys.readouterr().out

    lines = text.splitlines()
    assert len(lines) == 8
    assert lines[4].startswith(f"{shown} ")
    assert shown in lines[6]
    assert {"\x1b", "\x9b", "\u202e"}.isdisjoint(text + as_json)
    told = json.loads(as_json)
    saved = name.decode() if b"\xff" not in name else shown
    assert saved in [each["name"] for each in told["checkpoints"]]
    assert saved in told["prune"]["keep"]
    (renamed,) = names(run) - ALL
    (run / renamed / MANIFEST).write_bytes(b"")
    assert checkpoints(run) == 1
    assert f"damaged: {run}/{shown}/{MANIFEST} is damaged: " in capsys.readouterr().out
