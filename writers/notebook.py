"""The progress bar of `ConsoleWriter` in a notebook: a bar and a table of validations, updated in place.

IPython is imported when the bar is first shown; in a notebook it is there already. Its kernel hands a display
to a thread of its own, so the writer's thread does not wait for the browser.
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
"""The bar follows the training, and the table rapid validations, at most once in this time."""
MOST_ROWS = 50
"""The table has the newest validations."""

Publish = Callable[[dict[str, str], str, bool], None]
"""Show a bundle of texts by MIME type under an id, or replace what is shown under it."""


class NotebookBar:
    """A bar below the cell that runs the training, and below it a table with a row for each evaluation.

    The thread that calls `show` sends both. A run that begins later, perhaps in another cell, gets a bar and
    a table of its own.

    Args:
        stream: where ordinary lines are written.
        publish: how to show something; by default with IPython.
    """

    def __init__(self, stream: TextIO, publish: Publish | None = None) -> None:
        self._stream = stream
        self._publish = publish or _publish
        self._begin("")

    def _begin(self, name: str) -> None:
        self._name = name  # of this bar's displays; "" while it is not running
        self._shown: set[str] = set()
        self._state: tuple[ScalarsLogged, Mapping[str, float], Pace] | None = None
        self._activity = self._saved = ""
        self._rows: deque[dict[str, str]] = deque(maxlen=MOST_ROWS)
        self._columns: dict[str, None] = {}
        self._drawn = self._tabled = float("-inf")
        self._new_rows = False

    @property
    def running(self) -> bool:
        """Return True from the first `show` until `stop`."""
        return bool(self._name)

    def show(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> None:
        """Update the bar; draw it unless it was drawn less than `REFRESH_SECONDS` ago."""
        if not self._name:
            self._begin(uuid4().hex)
        self._state, self._activity = (event, dict(latest), pace), ""
        if monotonic() - self._drawn >= REFRESH_SECONDS:
            self.draw()

    def show_activity(self, activity: str) -> None:
        """Show `activity`, such as "val", at the head of the bar until the next `show`."""
        self._activity = activity
        self.draw()

    def shows(self, event: Event) -> bool:
        """Show an event in the table or in the bar, and return whether it is shown there."""
        if isinstance(event, ScalarsLogged):
            self._add_row(event)
        elif isinstance(event, CheckpointSaved):
            self._saved = f"saved {Path(event.path).name}"
            self.draw()
        else:
            return False
        return True

    def print_line(self, line: str) -> None:
        """Print an ordinary line."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def draw(self) -> None:
        """Draw the bar now, if it is running."""
        if self._name and self._state is not None:
            self._drawn = monotonic()
            self._send("bar", *self._bar(*self._state))
            self._draw_table()

    def stop(self) -> None:
        """Draw bar and table a last time."""
        self._activity, self._tabled = "", float("-inf")
        self.draw()
        self._begin("")

    # --- the bar -------------------------------------------------------------------------------------------

    def _bar(self, event: ScalarsLogged, latest: Mapping[str, float], pace: Pace) -> tuple[str, str]:
        """Return the bar as HTML and as text."""
        done, total = event.step, event.max_iters
        head = self._activity or "iter"
        if event.max_epochs is not None:
            epoch = of(min(event.epoch + 1, event.max_epochs), event.max_epochs)
            head = f"{self._activity or 'epoch'} {epoch}"
        fields = [of(done, total), *map(str.strip, bar_fields(event, latest, pace)), self._saved]
        text = " · ".join(on_a_line(field) for field in fields if field)
        length = "" if total is None else f' value="{min(done, total)}" max="{total}"'
        bar = f'<progress{length} style="width: 16em; vertical-align: middle"></progress>'
        return f"<div><code>{escape(head)}</code> {bar} <code>{escape(text)}</code></div>", f"{head} {text}"

    # --- the table -----------------------------------------------------------------------------------------

    def _add_row(self, event: ScalarsLogged) -> None:
        by_epoch = event.max_epochs is not None
        row = {"epoch" if by_epoch else "iter": str(event.epoch if by_epoch else event.step)}
        latest = {} if self._state is None else self._state[1]
        if "loss" in latest:
            row["train loss"] = number("loss", latest["loss"])
        scalars = {name: value for name, value in event.scalars.items() if name not in TIMES}
        row |= {f"{event.mode} {name}": number(name, value) for name, value in scalars.items()}
        self._columns |= dict.fromkeys(row)
        self._rows.append(row)
        self._new_rows = True
        self._draw_table()

    def _draw_table(self) -> None:
        if self._new_rows and monotonic() - self._tabled >= REFRESH_SECONDS:
            self._tabled, self._new_rows = monotonic(), False
            rows = [[row.get(name, "") for name in self._columns] for row in self._rows]
            head = "".join(f"<th>{escape(on_a_line(name))}</th>" for name in self._columns)
            lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
            text = "\n".join("  ".join(row) for row in [[*map(on_a_line, self._columns)], *rows])
            self._send("table", f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>", text)

    def _send(self, part: str, html: str, text: str) -> None:
        self._publish({"text/html": html, "text/plain": text}, f"{self._name}-{part}", part in self._shown)
        self._shown.add(part)


def _publish(data: dict[str, str], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(  # type: ignore[no-untyped-call]
        data, transient={"display_id": display_id}, update=update
    )
