"""Read one run for the live page, and find the sections that have changed since the last read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from eventloop.util.surrogates import without_surrogates
from eventloop.watching.reader import RunReader
from eventloop.watching.view import CurveView
from eventloop.watching.web.curve_changes import changes, whole
from eventloop.watching.web.sections import sections

Parts = dict[str, msgspec.Raw]
"""The sections of a run as JSON, by name."""


class Reading(NamedTuple):
    """Hold the result of one read of a run's directory: sections as JSON by name, and curves."""

    parts: dict[str, bytes]
    curves: list[CurveView]


class WatchedRun:
    """Read a run that the page shows, and keep the sections and curves that were last sent.

    Args:
        reader: the reader of the run, which nothing else may use.
        name: the name of the run on the page.
        colour: the colour of its curves in charts of several runs.
    """

    def __init__(self, reader: RunReader, name: str, colour: str) -> None:
        self._reader = reader
        fixed = msgspec.json.encode(without_surrogates({"name": name, "colour": colour}))
        self._parts: dict[str, bytes] = {"fixed": fixed}
        self._curves: list[CurveView] = []

    def read(self) -> Reading | None:
        """Read the directory, on any thread; return None if it cannot be read now, as while it changes."""
        try:
            view = self._reader.read()
        except (OSError, ValueError):
            return None
        shown = without_surrogates(msgspec.to_builtins(sections(view)))
        return Reading({name: msgspec.json.encode(part) for name, part in shown.items()}, view.curves)

    def update(self, reading: Reading | None) -> Parts:
        """Store the result of `read`, and return the sections that differ from the former ones."""
        if reading is None:
            return {}
        changed = {name: part for name, part in reading.parts.items() if self._parts.get(name) != part}
        self._parts.update(changed)
        parts = {name: msgspec.Raw(part) for name, part in changed.items()}
        if (curve_changes := changes(self._curves, reading.curves)) is not None:
            parts["curves"] = msgspec.Raw(msgspec.json.encode(curve_changes))
        self._curves = reading.curves
        return parts

    def whole(self) -> Parts:
        """Return all sections, for a page that was just opened."""
        parts = {name: msgspec.Raw(part) for name, part in self._parts.items()}
        return parts | {"curves": msgspec.Raw(msgspec.json.encode(whole(self._curves)))}
