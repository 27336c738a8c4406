"""Draw the progress bar of `ConsoleWriter` on a terminal.

This module imports rich, so only the constructor of a `ConsoleWriter` that needs the bar imports it.
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
"""The least seconds between two draws of the bar while `show` is called."""
WIDTH = 30
"""The largest width of the bar in characters."""


class ProgressBar:
    """Redraw a progress bar in place at the bottom of a terminal, below ordinary lines.

    `show` draws the bar on the thread that calls it, at most every `REFRESH_SECONDS`. rich's refresh thread
    is off, because it would draw ten times a second even without changes, and hold the interpreter lock for
    1 ms each time (a draw of this class: 0.2 ms). rich does not replace `sys.stdout` either: a `print` in the
    training thread or in a forked loader worker would then wait for a lock of the writer's thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        # the arguments of the last `show`
        self._state: tuple[ScalarsLogged, Mapping[str, float], Pace] | None = None
        self._activity = ""  # what runs instead of the training, such as "val"
        self._drawn = 0.0  # the `monotonic()` of the last draw

    @property
    def running(self) -> bool:
        """Return whether the bar is shown: from the first `show` until `stop`."""
        return self._live is not None

    def show(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> None:
        """Update the bar; draw it unless it was drawn less than `REFRESH_SECONDS` ago.

        Args:
            event: the last training event.
            latest: the last value of each training scalar.
            pace: the seconds per iteration.
        """
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
        """Return False: this bar shows no events, so the writer prints each as a line above the bar."""
        return False

    def print_line(self, line: str) -> None:
        """Print an ordinary line above the bar."""
        self._console.print(line, soft_wrap=True)
        self._move_to_line_start()

    def draw(self) -> None:
        """Draw the bar now, if it is running."""
        if self._live is not None and self._state is not None:
            self._drawn = monotonic()
            self._live.update(self._line(*self._state), refresh=True)
            self._move_to_line_start()

    def _move_to_line_start(self) -> None:
        """Move the cursor to the start of the bar's line, so that a `print` of the program overwrites it."""
        self._console.file.write("\r")
        self._console.file.flush()

    def stop(self) -> None:
        """Draw the bar a last time and move the cursor to the next line."""
        live, self._live = self._live, None
        if live is not None and self._state is not None:
            live.update(self._line(*self._state))
            live.stop()

    def _line(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> Text:
        """Return a line with the epoch, the bar, the iterations and as many fields of `bar_fields` as fit.

        The bar fills the remaining width, and is left out if that is less than 4 characters.
        """
        done, total = event.step, event.max_iters
        head, tail = f"{self._activity or 'iter':<5} ", f" {of(done, total)}"
        if event.max_epochs is not None:
            epoch = of(min(event.epoch + 1, event.max_epochs), event.max_epochs)
            head = f"{self._activity or 'epoch':<5} {epoch} "
        remaining_width = self._console.width - len(head) - len(tail) - 1
        for field in bar_fields(event, latest, pace):
            if len(field) > remaining_width:
                break
            tail += field
            remaining_width -= len(field)
        bar = []
        if total and remaining_width >= 4:
            bar = self._bar(done, total, min(WIDTH, remaining_width))
        return Text.assemble(head, *bar, tail, no_wrap=True, overflow="crop")

    def _bar(self, done: int, total: int, width: int) -> list[tuple[str, str]]:
        """Return the filled and the empty part of a bar of `width` characters, each with its colour."""
        full, empty = ("#", "-") if self._console.options.ascii_only else ("━", "─")
        filled = width * min(done, total) // total
        return [(full * filled, "cyan"), (empty * (width - filled), "bright_black")]
