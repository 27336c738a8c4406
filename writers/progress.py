"""A progress bar on a terminal. Imports rich: only `ConsoleWriter`'s constructor imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from eventloop.events import ScalarsLogged
from eventloop.writers.lines import ETA_WIDTH, Pace, number

REFRESH_SECONDS = 0.1
WIDTH = 30


class ProgressBar:
    """One line that is drawn again and again, and ordinary lines that appear above it.

    It is drawn by whoever calls `show`, at most every `REFRESH_SECONDS`: rich's own thread would draw it ten times
    a second whether or not anything changed, at 1 ms of the interpreter each (this line: 0.2 ms). `sys.stdout`
    stays what it was: replaced from here, a `print` in a training thread or a forked loader worker would wait for
    a lock of this thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._state: tuple[ScalarsLogged, Mapping[str, float], Pace] | None = None
        self._note = ""
        self._drawn = 0.0

    @property
    def running(self) -> bool:
        """True from the first `show` to `stop`."""
        return self._live is not None

    def show(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> None:
        """Say where the run is, unless it was said a moment ago; then `draw` or the next `show` does."""
        self._state, self._note = (event, latest, pace), ""
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            self.draw()
        elif monotonic() - self._drawn >= REFRESH_SECONDS:
            self.draw()

    def note(self, what: str) -> None:
        """Say what else is under way, until the next `show`."""
        self._note = what
        self.draw()

    def say(self, line: str) -> None:
        """Print an ordinary line above."""
        self._console.print(line, soft_wrap=True)
        self._return()

    def draw(self) -> None:
        """Draw the line now."""
        if self._live is not None and self._state is not None:
            self._drawn = monotonic()
            self._live.update(self._line(*self._state), refresh=True)
            self._return()

    def _return(self) -> None:
        """Go to the beginning of the bar's line: what the program prints then replaces the bar, and is not cut by the
        terminal's width."""
        self._console.file.write("\r")
        self._console.file.flush()

    def stop(self) -> None:
        """Draw the line a last time and leave the cursor below it: what others print next is clean."""
        live, self._live = self._live, None
        if live is not None and self._state is not None:
            live.update(self._line(*self._state))
            live.stop()

    def _line(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> Text:
        """Every field keeps its width from one call to the next, and is whole; the bar takes what the terminal has left."""
        done, total = event.step, event.max_iters
        head, tail = f"{self._note or 'iter':<5} ", f" {_of(done, total)}"
        if event.max_epochs is not None:
            head = (
                f"{self._note or 'epoch':<5} {_of(min(event.epoch + 1, event.max_epochs), event.max_epochs)} "
            )
        left = self._console.width - len(head) - len(tail) - 1
        for field in _fields(event, latest, pace):
            if len(field) > left:
                break
            tail, left = tail + field, left - len(field)
        bar = self._bar(done, total, min(WIDTH, left)) if total and left >= 4 else []
        return Text.assemble(head, *bar, tail, no_wrap=True, overflow="crop")

    def _bar(self, done: int, total: int, width: int) -> list[tuple[str, str]]:
        full, rest = ("#", "-") if self._console.options.ascii_only else ("━", "─")
        filled = width * min(done, total) // total
        return [(full * filled, "cyan"), (rest * (width - filled), "bright_black")]


def _fields(event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> list[str]:
    """Return the fields after the bar, the most important first."""
    fields = []
    if "loss" in latest:
        fields.append(f"  loss {_short('loss', latest['loss']):>7}")
    if pace.speed:
        fields.append(f"  {pace.speed:>10}")
    if eta := pace.eta(event):
        fields.append(f"  eta {eta:>{ETA_WIDTH}}")
    if "lr" in latest:
        fields.append(f"  lr {_short('lr', latest['lr']):>7}")
    return fields


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done:>{len(str(total))}}/{total}"


def _short(name: str, value: float) -> str:
    """At most seven characters, with as many digits as they hold."""
    texts = [number(name, value), f"{value:.1e}", f"{value:.0e}"]
    if abs(value) >= 1:
        texts.insert(1, f"{value:.5g}")
    return next((text for text in texts if len(text) <= 7), texts[-1])
