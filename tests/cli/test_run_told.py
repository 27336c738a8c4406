"""Commands to scripts of other engines that know nothing of eventloop, by `eventloop run`."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from eventloop.commands import send
from eventloop.ownership.owner import read_owner
from eventloop.ownership.status import read_status
from eventloop.watching import RunReader
from tests.cli.conftest import ENVIRONMENT
from tests.forked import Forked

pytestmark = pytest.mark.slow

DEADLINE = 120.0
"""Seconds against hangs."""
EPOCHS = 1_000_000
"""More than a test has time for."""

SCRIPTS = Path(__file__).parent / "scripts"
HOSTS = [
    pytest.param(host, marks=pytest.mark.skipif(find_spec(host) is None, reason=f"{host} is not installed"))
    for host in ("lightning", "transformers", "mmengine")
]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds, while a process lives."""
    began = time.monotonic()
    while not holds():
        assert process.poll() is None, "the script has ended"
        assert time.monotonic() - began < DEADLINE
        time.sleep(0.02)


def trains(directory: Path) -> bool:
    """Whether a run trains in a directory, and says how far it is."""
    owner = read_owner(directory)
    return owner is not None and owner.state == "training" and read_status(directory) is not None


@pytest.mark.parametrize("host", HOSTS)
def test_an_unmodified_script_is_told(host: str, tmp_path: Path) -> None:
    """A script that would train for very long steers its rate, saves where its host saves, and stops by commands.

    A reader beside it sees the machine and the progress.
    """
    directory = tmp_path / "run"
    arguments: list[str | Path] = [
        "--work-dir",
        directory,
        SCRIPTS / f"{host}_script.py",
        "--epochs",
        str(EPOCHS),
    ]
    with (tmp_path / "errors.txt").open("w") as errors:
        process = Forked(
            ["-m", "eventloop", "run", *arguments],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=errors.fileno(),
        )
        try:
            wait_until(lambda: trains(directory), process)
            rate = send(directory, "set", arguments={"lr*": 0.5}, timeout=DEADLINE)
            saved = send(directory, "checkpoint", timeout=DEADLINE)
            reader = RunReader(directory)
            wait_until(lambda: (reader.read().iter or 0) >= rate.iteration, process)
            view = reader.read()
            stopped = send(directory, "stop", "enough", timeout=DEADLINE)
            code = process.wait(DEADLINE)
        finally:
            process.kill()
            process.wait()

    assert code == 0, (tmp_path / "errors.txt").read_text()[-4000:]
    assert [each.outcome for each in (rate, saved, stopped)] == ["applied"] * 3
    assert rate.iteration <= saved.iteration <= stopped.iteration
    assert Path(saved.result["path"]).exists()
    assert (view.host, view.pid, view.max_epochs) == (socket.gethostname(), process.pid, EPOCHS)
    assert RunReader(directory).read().reason == "enough"
