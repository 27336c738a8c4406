"""Scripts that are forked are as those that are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open")
HOME = {"PATH": "", "PYTHONPATH": forked.ROOT}


FACTS = """
import os, signal, sys
print(__name__, sys.argv, sys.path[:2], os.getcwd(), sorted(os.environ.items()), sorted(name for name in globals() if name[0] != '_'))
print(*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)), signal.pthread_sigmask(0, []))
print(globals().get("__file__"), __spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals())
print(sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
print(sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.encoding, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_it_finds_what_a_started_one_finds(how: str, tmp_path: Path) -> None:
    """Names, arguments, paths, environment, signals, descriptors."""
    (tmp_path / "facts.py").write_text(FACTS)
    arguments = {"-c": ["-c", FACTS], "-m": ["-m", "facts"], "script": ["facts.py"]}[how]
    options: Any = {
        "cwd": tmp_path,
        "env": {**HOME, "LC_CTYPE": "C.UTF-8", "X": "1"},
        "stdin": subprocess.DEVNULL,
    }

    here = subprocess.run(
        [sys.executable, *arguments, "a", "b"], capture_output=True, text=True, check=False, **options
    )
    with forked.Forked(
        [*arguments, "a", "b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out.splitlines(), err) == (0, here.stdout.splitlines(), here.stderr)


ENDINGS = {
    "falls off its end": "",
    "sys.exit": "sys.exit(3)",
    "a word": "sys.exit('no')",
    "an exception": "1 / 0",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)",
    "a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(7)",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDINGS)
def test_it_ends_as_a_started_one_ends(how: str, tmp_path: Path) -> None:
    """Exit code, last words, exit functions and threads."""
    program = (
        "import atexit, os, signal, sys, threading\natexit.register(print, 'at exit')\n"
        "threading.Timer(0.05, print, ['thread']).start()\n"
        f"{ENDINGS[how]}\n"
    )

    here = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    there = forked.run(["-c", program], cwd=tmp_path)

    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
    assert there.stderr.splitlines()[-1:] == here.stderr.splitlines()[-1:]


def test_it_is_a_process_that_signals_reach(tmp_path: Path) -> None:
    """It can be asked, killed and waited for; a wait that takes too long says so."""
    program = "print('ready', flush=True); input()"
    process = forked.Forked(["-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == -signal.SIGTERM
    process.communicate()
