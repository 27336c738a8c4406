"""Show a progress bar and a table of validations, updated in place, below a cell of a notebook.

`ConsoleWriter` uses it. IPython, which a notebook has loaded already, is imported when the bar is first
shown. The kernel sends a display on a thread of its own, so the writer's thread does not wait for the
browser.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from time import monotonic
from typing import TextIO
from uuid import uuid4

from eventloop.costs.step_clock import TIMES
from eventloop.events import CheckpointSaved, Event, ScalarsLogged
from eventloop.util.formatting import on_a_line
from eventloop.writers.lines import Pace, bar_fields, number, of

REFRESH_SECONDS = 0.25
"""The least seconds between two draws of the bar, and between two draws of the table."""
MOST_ROWS = 50
"""The largest number of rows in the table; older validations are dropped."""

Publish = Callable[[dict[str, str], str, bool], None]
"""A function `(texts by MIME type, display id, update)` that shows a display, or updates a shown one."""


class NotebookBar:
    """Show a bar, and below it a table with a row for each validation or test, under the running cell.

    Both are sent on the thread that calls the methods. A run that begins after `stop`, perhaps in another
    cell, gets a bar and a table of its own.

    Args:
        stream: the text stream for ordinary lines.
        publish: the function that shows a display; by default IPython's.
    """

    def __init__(self, stream: TextIO, publish: Publish | None = None) -> None:
        self._stream = stream
        self._publish = publish or _publish
        self._reset("")

    def _reset(self, display_id: str) -> None:
        """Begin a bar and a table with ids that begin with `display_id`; with "" nothing is shown yet."""
        self._display_id = display_id
        self._shown: set[str] = set()  # the displays that can be updated: "bar", "table"
        # the arguments of the last `show`
        self._state: tuple[ScalarsLogged, Mapping[str, float], Pace] | None = None
        self._activity = self._saved = ""  # what runs instead of the training, and the last saved checkpoint
        self._rows: deque[dict[str, str]] = deque(maxlen=MOST_ROWS)  # of the table, each by column
        self._columns: dict[str, None] = {}  # the names of all columns, in their order
        self._bar_drawn_at = self._table_drawn_at = float("-inf")
        self._has_new_rows = False

    @property
    def running(self) -> bool:
        """Return whether the bar is shown: from the first `show` until `stop`."""
        return bool(self._display_id)

    def show(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> None:
        """Update the bar; draw it unless it was drawn less than `REFRESH_SECONDS` ago.

        Args:
            event: the last training event.
            latest: the last value of each training scalar.
            pace: the seconds per iteration.
        """
        if not self._display_id:
            self._reset(uuid4().hex)
        self._state, self._activity = (event, dict(latest), pace), ""
        if monotonic() - self._bar_drawn_at >= REFRESH_SECONDS:
            self.draw()

    def show_activity(self, activity: str) -> None:
        """Show `activity`, such as "val", at the head of the bar until the next `show`."""
        self._activity = activity
        self.draw()

    def shows(self, event: Event) -> bool:
        """Show scores in the table or a saved checkpoint in the bar; return False for any other event."""
        if isinstance(event, ScalarsLogged):
            self._add_row(event)
        elif isinstance(event, CheckpointSaved):
            self._saved = f"saved {Path(event.path).name}"
            self.draw()
        else:
            return False
        return True

    def print_line(self, line: str) -> None:
        """Print an ordinary line to the stream."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def draw(self) -> None:
        """Draw the bar now, if it is running, and the table if it has new rows."""
        if self._display_id and self._state is not None:
            self._bar_drawn_at = monotonic()
            self._send("bar", *self._bar(*self._state))
            self._draw_table()

    def stop(self) -> None:
        """Draw bar and table a last time; a later `show` begins another bar and table."""
        self._activity, self._table_drawn_at = "", float("-inf")
        self.draw()
        self._reset("")

    # --- the bar -------------------------------------------------------------------------------------------

    def _bar(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> tuple[str, str]:
        """Return the bar with the fields after it, as HTML and as text."""
        done, total = event.step, event.max_iters
        head = self._activity or "iter"
        if event.max_epochs is not None:
            epoch = of(min(event.epoch + 1, event.max_epochs), event.max_epochs)
            head = f"{self._activity or 'epoch'} {epoch}"
        fields = [of(done, total), *map(str.strip, bar_fields(event, latest, pace)), self._saved]
        text = " · ".join(on_a_line(field) for field in fields if field)
        attributes = "" if total is None else f' value="{min(done, total)}" max="{total}"'
        bar = f'<progress{attributes} style="width: 16em; vertical-align: middle"></progress>'
        html = f"<div><code>{escape(head)}</code> {bar} <code>{escape(text)}</code></div>"
        return html, f"{head} {text}"

    # --- the table -----------------------------------------------------------------------------------------

    def _add_row(self, event: ScalarsLogged) -> None:
        """Add a row with the scores of a validation or test and the last loss of the training."""
        has_epochs = event.max_epochs is not None
        row = {"epoch": str(event.epoch)} if has_epochs else {"iter": str(event.step)}
        latest = {} if self._state is None else self._state[1]
        if "loss" in latest:
            row["train loss"] = number("loss", latest["loss"])
        for name, value in event.scalars.items():
            if name not in TIMES:
                row[f"{event.mode} {name}"] = number(name, value)
        self._columns |= dict.fromkeys(row)
        self._rows.append(row)
        self._has_new_rows = True
        self._draw_table()

    def _draw_table(self) -> None:
        """Draw the table if it has new rows and was not drawn in the last `REFRESH_SECONDS`."""
        if not self._has_new_rows or monotonic() - self._table_drawn_at < REFRESH_SECONDS:
            return
        self._table_drawn_at, self._has_new_rows = monotonic(), False
        names = [on_a_line(name) for name in self._columns]
        rows = [[row.get(name, "") for name in self._columns] for row in self._rows]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        text = "\n".join("  ".join(row) for row in [names, *rows])
        self._send("table", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", text)

    def _send(self, part: str, html: str, text: str) -> None:
        """Show the "bar" or the "table", or replace it if it is shown already."""
        data = {"text/html": html, "text/plain": text}
        self._publish(data, f"{self._display_id}-{part}", part in self._shown)
        self._shown.add(part)


def _publish(data: dict[str, str], display_id: str, update: bool) -> None:
    """Show texts by MIME type as a display of IPython, or with `update` replace the display of this id."""
    from IPython.display import publish_display_data

    publish_display_data(  # type: ignore[no-untyped-call]
        data, transient={"display_id": display_id}, update=update
    )
