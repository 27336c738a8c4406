"""Show views on a terminal and update them in place; imports rich, so only the live view imports it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eventloop.cli.watch.text import Style, view_lines
from eventloop.util.terminal import output_encoding
from eventloop.watching.view import RunView

NARROWEST = 40
"""The least width of a column; runs that do not fit side by side are one below the other."""
STYLES: dict[Style, str] = {"": "", "title": "bold", "good": "green", "bad": "bold red", "dim": "dim"}


class Screen:
    """A full screen with the views of all runs; the terminal is as before after the `with` block.

    rich's own refresh thread is off, as it would draw without changes.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, tb)

    def show(self, views: Sequence[RunView]) -> None:
        """Draw the views, each in a column if there is room."""
        width, height = self._console.size
        columns = max(1, min(len(views), width // NARROWEST))
        rows = -(-len(views) // columns)
        each = width // columns - (1 if columns > 1 else 0), max(3, height // rows)
        grid = Table.grid(padding=(0, 1, 0, 0) if columns > 1 else 0)
        for begin in range(0, len(views), columns):
            grid.add_row(*(_text(view, *each) for view in views[begin : begin + columns]))
        self._live.update(grid, refresh=True)
        sys.stdout.flush()


def _text(view: RunView, width: int, height: int) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for index, line in enumerate(view_lines(view, width, height, output_encoding())):
        text.append("\n" if index else "")
        text.append(line.text, STYLES[line.style])
    return text
