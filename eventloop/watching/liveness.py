"""Decide whether a run is alive, hangs, has ended or was killed.

The owner of its directory, its heartbeat and its logs show that. `RunReader` calls `judge` at each read. The
clocks of two machines are never compared: the age of a heartbeat at the first read is measured by the clock
of the directory's file system, later ages by the reader's clock.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from eventloop.ownership.owner import Owner, State
from eventloop.ownership.status import Beat, Outcome, RunStatus
from eventloop.temporary.names import directory_time
from eventloop.util.formatting import duration, on_a_line
from eventloop.watching.view import ViewState

HUNG_SECONDS = 60.0
"""Seconds without the end of an iteration after which a training is "hung", if its iterations are short."""
SILENT_SECONDS = 15.0
"""Seconds without a heartbeat after which a living process is "hung"; a run writes one each second."""
LONG = 20
"""A training with long iterations is "hung" after this many times the mean time of an iteration."""
FIRST = 10
"""The first two iterations, which may compile the model and start loaders, get this many `HUNG_SECONDS`."""
_VIEW_STATES: dict[State, ViewState] = {
    "claiming": "starting",
    "evaluating": "validating",
    "ending": "ending",
}
STACKS = "`eventloop tell {run} stacks` shows where the training thread stands"


class Age:
    """Measure the seconds since a run last wrote its heartbeat."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._modified: int | None = None  # the modification time of the heartbeat at the last read
        self._changed = 0.0  # when the reader saw it change, on the monotonic clock
        self._age_then = 0.0  # the age of the heartbeat at that time

    def of(self, beat: Beat) -> float:
        """Return the age of a heartbeat that was just read."""
        now = time.monotonic()
        if self._modified is None:
            self._changed, self._age_then = now, max(0.0, directory_time(self._run) - beat.modified / 1e9)
        elif beat.modified != self._modified:
            self._changed, self._age_then = now, 0.0
        self._modified = beat.modified
        return self._age_then + now - self._changed


class Verdict(NamedTuple):
    """Hold the state of a run, with the facts that explain it.

    Attributes:
        state: the state.
        sentence: the state as a sentence for people.
        outcome: how the run ended, if that is recorded.
        still: seconds since an iteration ended or the state changed; None if unknown.
    """

    state: ViewState
    sentence: str
    outcome: Outcome | None = None
    still: float | None = None


def judge(
    run: str,
    owner: Owner | None,
    status: RunStatus | None,
    age: float,
    recorded: Outcome | None,
    hung_seconds: float,
) -> Verdict:
    """Return the state of a run.

    Args:
        run: its directory, for sentences.
        owner: the process that owns the directory, which may have been killed; None without one.
        status: the last status in the heartbeat; None without one.
        age: seconds since the heartbeat was written.
        recorded: how the run ended according to its logs or costs; None if they record no end.
        hung_seconds: seconds without the end of an iteration after which a training is "hung".
    """
    if owner is not None and owner.state in ("pruning", "replaying"):
        owner = None  # a command of eventloop owns the directory, not a run
    if owner is not None and status is not None and status.state == "ended" and _same(owner, status):
        owner = None  # the run has written everything, and is about to remove its record of ownership
    if owner is not None and owner.lives is False:
        return _killed(owner, status)
    if owner is not None:
        return _living(run, owner, status, age, hung_seconds)
    if status is not None and status.state == "ended":
        recorded = Outcome(status.reason or "left", status.error, status.signal)
    if recorded is not None:
        return Verdict("ended", _end_text(recorded), recorded)
    return Verdict("unknown", "no process owns the directory, and no end of a run is recorded")


def _same(owner: Owner, status: RunStatus) -> bool:
    """Return whether the process that wrote a status is the owner."""
    return (owner.pid, owner.host) == (status.pid, status.host)


def _killed(owner: Owner, status: RunStatus | None) -> Verdict:
    """Return the verdict on a run whose owner shows no sign of life, with the time of the last one."""
    process = f"process {owner.pid} on {owner.host}" if owner.host else "its process"
    at = f" at iteration {status.iter:,}" if status is not None and _same(owner, status) else ""
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.touched / 1e9))
    return Verdict(
        "killed", f"killed{at}: {process} has given its last sign of life at {last}, and recorded no end"
    )


def _living(run: str, owner: Owner, status: RunStatus | None, age: float, hung_seconds: float) -> Verdict:
    """Return the state of a run whose owner is not known to be dead, with the arguments of `judge`."""
    process = f"process {owner.pid} on {owner.host}" if owner.host else "a process whose record is damaged"
    if status is None or not _same(owner, status):
        state = _VIEW_STATES.get(owner.state, "starting")
        return Verdict(
            state, f"{state}: {process} has the directory since {owner.since}, and has no heartbeat yet"
        )
    still = max(0.0, status.time - status.moved) + age
    if age > min(SILENT_SECONDS, hung_seconds):
        lives = "lives: it may be stopped" if owner.lives else "may live: its machine may be gone"
        return Verdict("hung", f"no sign of life for {duration(age)}, and {process} {lives}", None, still)
    if status.state == "training" and still > _limit(status, hung_seconds):
        return Verdict(
            "hung",
            f"no iteration has ended for {duration(still)}, and {process} lives: {STACKS.format(run=run)}",
            None,
            still,
        )
    return Verdict(status.state, _state_text(status, process, still), None, still)


def _limit(status: RunStatus, hung_seconds: float) -> float:
    """Return the seconds without the end of an iteration after which a training is "hung"."""
    if status.iter - status.first_iter < 2:
        return FIRST * hung_seconds
    return max(hung_seconds, LONG / status.speed if status.speed else 0.0)


def _state_text(status: RunStatus, process: str, still: float) -> str:
    """Describe the state of a live run; for other states than training, how long it has lasted."""
    if status.state == "training" and status.iter == status.first_iter:
        return f"training, without the end of an iteration so far for {duration(still)}: {process}"
    if status.state == "training":
        return f"training: {process}"
    return f"{status.state} for {duration(still)}: {process}"


def _end_text(outcome: Outcome) -> str:
    """Describe how a run ended: by an error, by a signal, or with a reason."""
    reason, error, signal = outcome
    if error is not None:
        return f"ended by an error: {on_a_line(error)}"
    by = f" by {signal}" if signal else ""
    return f"ended{by}: {on_a_line(reason)}" if reason != "completed" else "ended: completed"
