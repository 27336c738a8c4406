"""Commands whose standard output takes nothing: one line, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.util.terminal import OutputError
from tests.cli.conftest import ENVIRONMENT, Start, wait_until
from tests.cli.reported_runs import make_run

FULL = Path("/dev/full")
WORDS = {
    f"> {FULL}": "standard output cannot be written: [Errno 28] No space left on device",
    ">&-": "standard output is closed: there is nowhere to write to",
}
CONFIG = 'default_hooks = dict(logger=dict(interval=5))\nhooks = [dict(type="EMAHook")]\n'

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")


def in_shell(redirection: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, with its output redirected as a shell does it."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "eventloop", *arguments],
        cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a config."""
    folder = tmp_path_factory.mktemp("output")
    make_run(folder / "run")
    (folder / "config.py").write_text(CONFIG)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("redirection", WORDS)
@pytest.mark.parametrize(
    "arguments",
    [["report", "run"], ["report", "run", "--json"], ["report", "run", "--html", "-"], ["plan", "config.py"], ["plan", "config.py", "--json"]],
)  # fmt: skip
def test_an_output_that_takes_nothing(folder: Path, redirection: str, arguments: list[str]) -> None:
    """What cannot be shown is no traceback: one line says why, and the exit code is 2."""
    ran = in_shell(redirection, folder, *arguments)

    assert (ran.returncode, ran.stderr) == (
        2, f"eventloop: {WORDS[redirection]} (--traceback shows where)\n"
    )  # fmt: skip


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


def test_the_traceback_is_there_for_who_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--traceback` the error is raised."""
    monkeypatch.setattr(sys, "stdout", None)

    with pytest.raises(OutputError, match=WORDS[">&-"]):
        cli.main(["report", str(folder / "run"), "--traceback"])
