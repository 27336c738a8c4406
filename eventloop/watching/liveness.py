"""Decide whether a run lives, hangs, has ended or was killed, from its owner, its heartbeat and its logs.

`RunReader` calls `judge` at each read. Ages come from the clock of the directory at the first read, and from
the reader's own clock from then on, never from a comparison of the clocks of two machines.
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
"""Seconds without the end of an iteration after which a training hangs, unless its iterations are long."""
SILENT_SECONDS = 15.0
"""Seconds without a sign of life after which a living process hangs; a run gives one each second."""
LONG = 20
"""The number of mean iterations without the end of one, from which a training hangs."""
FIRST = 10
"""How many times as long the first two iterations may take, which compile a model or begin to load data."""
_DOES: dict[State, ViewState] = {"claiming": "starting", "evaluating": "validating", "ending": "ending"}
STACKS = "`eventloop tell {run} stacks` shows where the training thread stands"


class Age:
    """The seconds since a run has last written its heartbeat."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._modified: int | None = None
        self._at_change = self._changed = 0.0

    def of(self, beat: Beat) -> float:
        """Return the age of a heartbeat that was just read."""
        now = time.monotonic()
        if self._modified is None:
            self._changed, self._at_change = now, max(0.0, directory_time(self._run) - beat.modified / 1e9)
        elif beat.modified != self._modified:
            self._changed, self._at_change = now, 0.0
        self._modified = beat.modified
        return self._at_change + now - self._changed


class Verdict(NamedTuple):
    """The state of a run, and the facts for it.

    Attributes:
        state: the state.
        sentence: the state for people.
        outcome: how the run ended, if that is recorded.
        still: seconds without the end of an iteration, or a change of the state; None if unknown.
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
        owner: the run that has the directory now, or was killed there.
        status: the last status in the heartbeat; None without one.
        age: seconds since it was written.
        recorded: how the run ended, by its logs or costs.
        hung_seconds: as `HUNG_SECONDS`.
    """
    if owner is not None and owner.state in ("pruning", "replaying"):  # not a run
        owner = None
    if owner is not None and status is not None and status.state == "ended" and _same(owner, status):
        owner = None  # everything is written, and its record is about to be removed
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
    """Return whether the process of a status is the owner."""
    return (owner.pid, owner.host) == (status.pid, status.host)


def _killed(owner: Owner, status: RunStatus | None) -> Verdict:
    who = f"process {owner.pid} on {owner.host}" if owner.host else "its process"
    at = f" at iteration {status.iter:,}" if status is not None and _same(owner, status) else ""
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.touched / 1e9))
    return Verdict(
        "killed", f"killed{at}: {who} has given its last sign of life at {last}, and recorded no end"
    )


def _living(run: str, owner: Owner, status: RunStatus | None, age: float, hung_seconds: float) -> Verdict:
    who = f"process {owner.pid} on {owner.host}" if owner.host else "a process whose record is damaged"
    if status is None or not _same(owner, status):
        state = _DOES.get(owner.state, "starting")
        return Verdict(
            state, f"{state}: {who} has the directory since {owner.since}, and has no heartbeat yet"
        )
    still = max(0.0, status.time - status.moved) + age
    if age > min(SILENT_SECONDS, hung_seconds):
        lives = "lives: it may be stopped" if owner.lives else "may live: its machine may be gone"
        return Verdict("hung", f"no sign of life for {duration(age)}, and {who} {lives}", None, still)
    if status.state == "training" and still > _limit(status, hung_seconds):
        return Verdict(
            "hung",
            f"no iteration has ended for {duration(still)}, and {who} lives: {STACKS.format(run=run)}",
            None,
            still,
        )
    return Verdict(status.state, _doing(status, who, still), None, still)


def _limit(status: RunStatus, hung_seconds: float) -> float:
    if status.iter - status.first_iter < 2:
        return FIRST * hung_seconds
    return max(hung_seconds, LONG / status.speed if status.speed else 0.0)


def _doing(status: RunStatus, who: str, still: float) -> str:
    if status.state == "training" and status.iter == status.first_iter:
        return f"training, without the end of an iteration so far for {duration(still)}: {who}"
    if status.state == "training":
        return f"training: {who}"
    return f"{status.state} for {duration(still)}: {who}"


def _end_text(outcome: Outcome) -> str:
    reason, error, signal = outcome
    if error is not None:
        return f"ended by an error: {on_a_line(error)}"
    by = f" by {signal}" if signal else ""
    return f"ended{by}: {on_a_line(reason)}" if reason != "completed" else "ended: completed"
