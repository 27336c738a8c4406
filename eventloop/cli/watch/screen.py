"""Show views of runs on a terminal and update them in place. Only the live view imports this, and so rich."""

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
"""The least width of a column in characters; runs for which there is no column are shown below others."""
STYLES: dict[Style, str] = {"": "", "title": "bold", "good": "green", "bad": "bold red", "dim": "dim"}


class Screen:
    """Show the views of all runs on the whole terminal, which is restored at the end of the `with` block.

    The refresh thread of rich is off, because it would draw even without changes.
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
        """Draw the views in a grid of as many columns as fit."""
        width, height = self._console.size
        columns = max(1, min(len(views), width // NARROWEST))
        rows = -(-len(views) // columns)
        padding = 1 if columns > 1 else 0
        cell_width, cell_height = width // columns - padding, max(3, height // rows)
        grid = Table.grid(padding=(0, padding, 0, 0))
        for begin in range(0, len(views), columns):
            row = views[begin : begin + columns]
            grid.add_row(*(_text(view, cell_width, cell_height) for view in row))
        self._live.update(grid, refresh=True)
        sys.stdout.flush()


def _text(view: RunView, width: int, height: int) -> Text:
    """Return the lines of a view as rich text, cropped to the width of the terminal."""
    text = Text(no_wrap=True, overflow="crop")
    for index, line in enumerate(view_lines(view, width, height, output_encoding())):
        text.append("\n" if index else "")
        text.append(line.text, STYLES[line.style])
    return text
