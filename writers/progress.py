"""Draw the progress bar of `ConsoleWriter`.

Imports rich; only the constructor of `ConsoleWriter` imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from eventloop.events import Event, ScalarsLogged
from eventloop.writers.lines import Pace, bar_fields, of

REFRESH_SECONDS = 0.1
"""Least seconds between two draws of the bar."""
WIDTH = 30
"""Largest width of the bar in characters."""


class ProgressBar:
    """Redraw a line with a bar in place at the bottom of a terminal, below ordinary lines.

    The thread that calls `show` draws it, at most every `REFRESH_SECONDS`. rich's own refresh thread is off:
    it would draw ten times a second even without changes, and hold the interpreter for 1 ms each time (this
    class: 0.2 ms). `sys.stdout` is not replaced: a `print` in the training thread or in a forked loader
    worker would otherwise wait for a lock of the writer's thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._state: tuple[ScalarsLogged, Mapping[str, float], Pace] | None = None
        self._activity = ""
        self._drawn = 0.0

    @property
    def running(self) -> bool:
        """Return True from the first `show` until `stop`."""
        return self._live is not None

    def show(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> None:
        """Update the bar; draw it unless it was drawn less than `REFRESH_SECONDS` ago."""
        self._state, self._activity = (event, latest, pace), ""
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            self.draw()
        elif monotonic() - self._drawn >= REFRESH_SECONDS:
            self.draw()

    def show_activity(self, activity: str) -> None:
        """Show `activity`, such as "val", at the head of the line until the next `show`."""
        self._activity = activity
        self.draw()

    def shows(self, event: Event) -> bool:
        """Return False, so that every event is printed as a line above the bar."""
        return False

    def print_line(self, line: str) -> None:
        """Print an ordinary line above the bar."""
        self._console.print(line, soft_wrap=True)
        self._return()

    def draw(self) -> None:
        """Draw the bar now, if it is running."""
        if self._live is not None and self._state is not None:
            self._drawn = monotonic()
            self._live.update(self._line(*self._state), refresh=True)
            self._return()

    def _return(self) -> None:
        """Move the cursor to the start of the line, so that a print of the program overwrites the bar."""
        self._console.file.write("\r")
        self._console.file.flush()

    def stop(self) -> None:
        """Draw the bar a last time and leave the cursor on the next line."""
        live, self._live = self._live, None
        if live is not None and self._state is not None:
            live.update(self._line(*self._state))
            live.stop()

    def _line(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> Text:
        """Return the line of the bar: fields of constant width, and the bar in the width that remains.

        Fields that do not fit are left out.
        """
        done, total = event.step, event.max_iters
        head, tail = f"{self._activity or 'iter':<5} ", f" {of(done, total)}"
        if event.max_epochs is not None:
            epoch = of(min(event.epoch + 1, event.max_epochs), event.max_epochs)
            head = f"{self._activity or 'epoch':<5} {epoch} "
        left = self._console.width - len(head) - len(tail) - 1
        for field in bar_fields(event, latest, pace):
            if len(field) > left:
                break
            tail, left = tail + field, left - len(field)
        bar = self._bar(done, total, min(WIDTH, left)) if total and left >= 4 else []
        return Text.assemble(head, *bar, tail, no_wrap=True, overflow="crop")

    def _bar(self, done: int, total: int, width: int) -> list[tuple[str, str]]:
        full, rest = ("#", "-") if self._console.options.ascii_only else ("━", "─")
        filled = width * min(done, total) // total
        return [(full * filled, "cyan"), (rest * (width - filled), "bright_black")]
