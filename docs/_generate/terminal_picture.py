"""Draw the live view of `eventloop watch` as docs/pictures/terminal.svg, of a demo that trains meanwhile.

    python -m docs._generate.terminal_picture

The demo runs in a temporary directory. The picture is what a terminal of 100 columns shows, with another name of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from eventloop.cli.watch.screen import STYLES
from eventloop.cli.watch.text import view_lines
from eventloop.watching import RunReader, RunView

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "terminal.svg"
ROOT = PICTURE.parents[2]
COLUMNS, LINES = 100, 34
MIDDLE = 600
"""The iteration from which on the run is drawn."""
PATIENCE = 120.0
"""Seconds after which the demo should be there, or past the middle."""


def main() -> None:
    """Train, draw the run while it trains, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the view has the directory as it was given
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "eventloop", "demo", "--epochs", "30", "--work-dir", "runs/demo"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as demo:
            try:
                view = _middle_of(Path("runs/demo"))
            finally:
                demo.terminate()
    draw(view, PICTURE)


def draw(view: RunView, path: Path) -> None:
    """Draw a view as a terminal shows it."""
    if view.host:
        view = msgspec.structs.replace(view, sentence=view.sentence.replace(f"on {view.host}", "on node7"))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, highlight=False, markup=False, emoji=False
        )
        for line in view_lines(view, COLUMNS, LINES, "utf-8"):
            console.print(line.text, style=STYLES[line.style])
        console.save_svg(str(path), title=f"eventloop watch {view.run}", unique_id="terminal")


def _middle_of(directory: Path) -> RunView:
    """Wait until a run has passed the middle, and return its view."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (directory / "heartbeat.json").exists():
            view = RunReader(directory).read()
            if (view.iter or 0) > MIDDLE and view.state == "training" and view.phases:
                return view
    raise TimeoutError(f"expected a demo past iteration {MIDDLE} within {PATIENCE:g} s in {directory}")


if __name__ == "__main__":
    main()
