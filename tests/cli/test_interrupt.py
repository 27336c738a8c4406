"""Ctrl-C, two times, as a user of `eventloop demo` presses it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from eventloop.checkpoint import find_checkpoints, load_checkpoint
from tests.cli.conftest import Start, wait_until

HINT = "Ctrl-C: stopping after this iteration, with a checkpoint. Ctrl-C again ends at once.\n"
FULL = Path("/dev/full")


def press(process: subprocess.Popen[str]) -> None:
    """Ctrl-C; wait for the answer on standard error."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert any(line == HINT for line in process.stderr)


@pytest.mark.slow
def test_a_writer_that_hangs_is_left(start: Start, tmp_path: Path) -> None:
    """With an output that nobody reads: the first Ctrl-C saves and waits for it, the second ends, and names it."""
    reader, writer = os.pipe()
    os.write(
        writer, b"." * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    )  # it takes no more, as a pager's that nobody scrolls
    process = start("--epochs", "1000", stdout=writer)
    os.close(writer)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)

    press(process)
    wait_until(lambda: find_checkpoints(tmp_path / "run"), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    os.close(reader)

    assert process.returncode == 130, errors
    assert re.fullmatch(
        r"closed after [\d.]+ s; events left undelivered: ConsoleWriter \(\d+\), (stuck|in one delivery) for .*\. `eventloop replay .*` delivers them\n"
        r"eventloop: ended by Ctrl-C\n",
        errors,
    )
    assert load_checkpoint(find_checkpoints(tmp_path / "run")[-1])["meta"]["iter"] > 0


def test_sigterm_is_a_clean_end(start: Start, tmp_path: Path) -> None:
    """A scheduler's signal: the checkpoint of the iteration, the summary, how to go on, and exit code 143."""
    process = start("--epochs", "1000")
    assert process.stdout is not None
    assert any("[1][10/44]" in line for line in process.stdout)

    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 143, errors
    assert errors == ""
    assert re.search(r"stopped +preempted by SIGTERM; continue with: eventloop demo --resume", output)
    assert load_checkpoint(find_checkpoints(tmp_path / "run")[-1])["meta"]["iter"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
def test_an_output_that_takes_nothing_ends_no_training(start: Start, tmp_path: Path) -> None:
    """The demo trains and saves all the same, and says at its end that nothing could be shown; a scheduler sees the
    exit code of its signal, by which it requeues."""
    told = "eventloop: standard output cannot be written: [Errno 28] No space left on device"
    for epochs, code in (("1", 2), ("1000", 143)):
        run = tmp_path / epochs
        with FULL.open("w") as full:
            process = start("--epochs", epochs, "--work-dir", epochs, stdout=full.fileno())
        if code == 143:
            wait_until(partial(find_checkpoints, run), process)
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)

        assert (process.returncode, errors.splitlines()[-1]) == (code, told)
        assert find_checkpoints(run)
