"""Name, convert and count the values that the writer of an experiment tracker receives.

`eventloop.writers.tracker` and the writers derived from its `TrackerWriter` use it.
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
"""An event with the name of its value."""
_CHECKPOINT = "checkpoint/"
"""The prefix of the keys of checkpoints in a mapping of last steps."""


class Tally:
    """Count the values that are new to a tracker, and those that it had when the writer connected.

    Each step of a name is counted once, also if a resumed training or a replay repeats it.

    Args:
        last_steps: for each name, the last step that the tracker had when the writer connected.
    """

    def __init__(self, last_steps: Mapping[str, int]) -> None:
        self.new = self.known = 0
        self._last_known = dict(last_steps)
        self._last_counted: dict[str, int] = {}  # for each name, the last step that was counted

    def count(self, name: str, step: int) -> None:
        """Count the value that `name` has at `step` as known or new, unless this step was counted before."""
        if step <= self._last_counted.get(name, -1):
            return
        self._last_counted[name] = step
        is_known = step <= self._last_known.get(name, -1)
        self.known += is_known
        self.new += not is_known


def number_of(value: Any) -> float | None:
    """Convert a number, or a tensor or array of one number, to a float; return None for any other value."""
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
    """Return the key of a checkpoint in a mapping of last steps, such as "checkpoint/runs/digits/epoch_1"."""
    return f"{_CHECKPOINT}{event.path}"


def checkpoints_of(last_steps: dict[str, int]) -> dict[str, int]:
    """Return the entries of a mapping of last steps that are of checkpoints; trackers do not store these."""
    return {name: step for name, step in last_steps.items() if name.startswith(_CHECKPOINT)}


def values_of(event: ScalarsLogged) -> dict[str, float]:
    """Return the numbers of an event by their names in a tracker, such as "train/loss"."""
    return {f"{event.mode}/{name}": value for name, value in event.scalars.items()}


def record_last(last_steps: dict[str, int], names: Iterable[str], step: int) -> None:
    """Update the last steps of `names` in place, to `step` unless they have a later one."""
    for name in names:
        last_steps[name] = max(step, last_steps.get(name, -1))


def run_name_of(run: Run, name: str | None) -> str:
    """Return the name that a run has in a tracker: `name`, or by default the name of its work dir.

    A replay writes to the folder `replay` in the work dir, and has the same name as the run. Lone surrogates
    become escapes.
    """
    folder = Path(run.work_dir).resolve()
    if folder.name == REPLAY_FOLDER:
        folder = folder.parent
    return escaped(name or folder.name)
