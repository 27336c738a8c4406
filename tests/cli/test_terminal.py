"""`eventloop demo` on a terminal: a real one, of which the test is the other end."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"

ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its Ctrl-C is ours
os.execv(sys.executable, [sys.executable, "-m", "eventloop", "demo", *sys.argv[1:]])
"""


class Terminal:
    """A demo, and what the screen was sent so far."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self._keyboard, screen = os.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        environment = {name: value for name, value in ENVIRONMENT.items() if name not in hidden}
        environment["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, "--work-dir", "run", *arguments],
            cwd=cwd,
            env=environment,
            stdin=screen,
            stdout=screen,
            stderr=screen,
        )
        os.close(screen)
        self.seen = ""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._keyboard, keys)

    def read_until(self, pattern: str) -> None:
        """Wait until the screen shows something new that matches."""
        start = len(self.seen)
        while not re.search(pattern, plain(self.seen[start:])):
            assert self._read(), f"it ended without {pattern!r}: {self.seen}"

    def read_to_end(self) -> str:
        """What the screen was sent, until nobody has it any more."""
        while self._read():
            pass
        return self.seen

    def _read(self) -> bool:
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.seen += data.decode()
        return bool(data)

    def close(self) -> None:
        """Hang up."""
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


def plain(text: str) -> str:
    """`text` without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.slow
def test_the_bar_is_live_and_leaves_a_clean_screen(tmp_path: Path) -> None:
    """One line follows the run, with all a person wants to know; other lines appear above it, the summary below."""
    with closing(Terminal(tmp_path, "--epochs", "2")) as demo:
        seen = demo.read_to_end()
        assert demo.process.wait(60) == 0

    text = plain(seen)
    bar = r"epoch [12]/2 ━*─* +(\d+)/88  loss +[\d.e-]+ +[\d.]+ it/s  eta +\d:\d\d:\d\d  lr +[\d.e-]+"
    steps = [int(step) for step in re.findall(bar, text)]
    assert steps == sorted(steps)
    assert (len(set(steps)) > 1, steps[-1]) == (True, 88)
    assert "Epoch(train)" not in text
    assert re.search(r"Epoch\(val\) \[2\]  accuracy: 0\.\d+", text)
    assert "Checkpoint saved: run/epoch_2" in text
    told = ("Run ended at iteration 88: completed", "handler  ", "best accuracy")
    assert sorted(told, key=text.index) == [*told]
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)


@pytest.mark.slow
def test_ctrl_c_twice_on_a_terminal(tmp_path: Path) -> None:
    """The first says what happens, the second ends with code 130; the cursor is back, and there is no traceback."""
    with closing(Terminal(tmp_path, "--epochs", "1000")) as demo:
        demo.read_until(r"epoch +1/1000 ")
        demo.type(b"\x03")
        demo.read_until("Ctrl-C again ends at once")
        demo.type(b"\x03")
        seen = demo.read_to_end()
        assert demo.process.wait(60) == 130

    assert "Traceback" not in seen
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)
