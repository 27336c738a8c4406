"""Name, convert and count the values that a writer of an experiment tracker is given.

`eventloop.writers.tracker` and the writers use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eventloop.eventlog.replay import FOLDER as REPLAY_FOLDER
from eventloop.events import CheckpointSaved, HistogramLogged, ImageLogged, ScalarsLogged, TextLogged
from eventloop.events.run import Run
from eventloop.util.surrogates import escaped

Named = ImageLogged | HistogramLogged | TextLogged
_CHECKPOINT = "checkpoint/"


class Tally:
    """Count values as new to a tracker or as known to it.

    Each step of a name counts once, although a resumed training or a replay repeats it.

    Args:
        found: the last step that the tracker has of each name.
    """

    def __init__(self, found: Mapping[str, int]) -> None:
        self.new = self.known = 0
        self._found = dict(found)
        self._counted: dict[str, int] = {}

    def count(self, name: str, step: int) -> None:
        """Count the value of a name at a step."""
        if self._counted.get(name, -1) >= step:
            return
        self._counted[name] = step
        known = step <= self._found.get(name, -1)
        self.known += known
        self.new += not known


def number_of(value: Any) -> float | None:
    """Return a value, or a scalar of numpy, as a number; None if it is not one."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value.item())
    except Exception:
        return None


def key_of(event: Named) -> str:
    """Return an event's mode and name, such as "train/samples"."""
    return f"{event.mode}/{event.name}"


def key_of_checkpoint(event: CheckpointSaved) -> str:
    """Return the name under which the last iteration of a checkpoint that was sent is kept."""
    return f"{_CHECKPOINT}{event.path}"


def checkpoints_of(last: dict[str, int]) -> dict[str, int]:
    """Return those of the last steps that are of checkpoints, which no tracker knows."""
    return {name: step for name, step in last.items() if name.startswith(_CHECKPOINT)}


def values_of(event: ScalarsLogged) -> dict[str, float]:
    """Return the numbers of an event by their names in a tracker, such as "train/loss"."""
    return {f"{event.mode}/{name}": value for name, value in event.scalars.items()}


def record_last(last: dict[str, int], names: Iterable[str], step: int) -> None:
    """Note that a tracker has a step of each of these names."""
    for name in names:
        last[name] = max(step, last.get(name, -1))


def run_name_of(run: Run, given: str | None) -> str:
    """Return the name that a run has in a tracker: `given`, or the name of its work dir.

    A replay, which writes to the folder `replay` in the work dir, has the same name. A name that is not UTF-8
    has escapes.
    """
    folder = Path(run.work_dir).resolve()
    return escaped(given or (folder.parent if folder.name == REPLAY_FOLDER else folder).name)
