"""A training whose standard output takes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT, Start, wait_until

FULL = Path("/dev/full")
WORDS = {
    f"> {FULL}": "standard output cannot be written: [Errno 28] No space left on device",
    ">&-": "standard output is closed: there is nowhere to write to",
}

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")


def in_shell(redirection: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, with its output redirected as a shell does it."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "eventloop", *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("redirection", WORDS)
def test_a_training_is_not_lost_for_it(redirection: str, tmp_path: Path) -> None:
    """The demo trains and saves all the same; that nothing of it could be shown is said at its end."""
    ran = in_shell(redirection, tmp_path, "demo", "--epochs", "1", "--work-dir", "run")

    last = ran.stderr.splitlines()[-1]
    assert (ran.returncode, last) == (2, f"eventloop: {WORDS[redirection]}")
    assert (tmp_path / "run" / "epoch_1").is_dir()


@pytest.mark.slow
def test_a_scheduler_sees_its_signal_all_the_same(start: Start, tmp_path: Path) -> None:
    """SIGTERM's exit code is the one that a requeue goes by, also where the words at the end cannot be shown."""
    with FULL.open("w") as full:
        process = start("--epochs", "1000", stdout=full.fileno())
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)

    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)

    assert (process.returncode, errors.splitlines()[-1]) == (143, f"eventloop: {WORDS[f'> {FULL}']}")
