"""Send the metrics of a checkpoint to its run as a command, and find out which ones were sent before.

A command has an id that follows from the checkpoint, so an evaluator that was killed and started again finds
in the run's files what it has sent. A command that a run has applied is in `commands.jsonl`; a command that
no run has applied yet waits in the inbox, also while no run lives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from eventloop.checkpoint.manifest import score
from eventloop.commands.client import ROOM
from eventloop.commands.messages import CLAIMED, EVALUATED, HIDDEN, INBOX, OUTBOX, SENT, Answer, Command
from eventloop.commands.private_directory import create_private
from eventloop.commands.record import NAME, iterations_evaluated, read_record
from eventloop.sidecar.outstanding import Candidate
from eventloop.temporary.sync import sync_directory

FOLDER = "evaluator"
"""The folder of a run that its evaluator owns, so that there is one at a time."""


def id_of(candidate: Candidate) -> str:
    """Return the id of the command for a checkpoint; those of a run are in the order of the iterations."""
    return f"{candidate.iter:020d}-{candidate.sha256[:8]}"


class Reports:
    """The reports to one run; one evaluator at a time uses it.

    Args:
        run: the directory of the run.
        source: the sender, such as "evaluate 4711@node3".
    """

    def __init__(self, run: Path, source: str) -> None:
        self._run, self._source = run, source
        self._inbox, self._outbox = run / INBOX, run / OUTBOX

    def known(self, name: str, iteration: int) -> bool:
        """Return whether a command was sent, and its run, if any, has not gone back behind it.

        A command moves from the inbox to the outbox, and is in the record before it has an answer. So each
        place is read after the one before it.
        """
        if any((self._inbox / (name + suffix)).exists() for suffix in (SENT, CLAIMED)):
            return True
        with suppress(OSError, msgspec.MsgspecError):
            answer = msgspec.json.decode((self._outbox / (name + SENT)).read_bytes(), type=Answer)
            if answer.outcome == "refused":
                return True
        return iteration in self._recorded()

    def metrics(self, name: str, iteration: int) -> dict[str, float] | None:
        """Return the metrics of a command that `known` has found; None if no file of the run has them.

        The answer in the outbox has none of them.
        """
        for suffix in (SENT, CLAIMED):
            with suppress(OSError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
                sent = msgspec.json.decode((self._inbox / (name + suffix)).read_bytes(), type=Command)
                return _scores(sent.arguments["metrics"])
        with suppress(OSError, ValueError, TypeError, KeyError):
            for each in reversed(read_record(self._run / NAME)):
                if each.command == EVALUATED and each.arguments.get("iter") == iteration:
                    return _scores(each.arguments["metrics"])
        return None

    def _recorded(self) -> set[int]:
        try:
            return iterations_evaluated(read_record(self._run / NAME))
        except FileNotFoundError:
            return set()

    def send(self, name: str, candidate: Candidate, metrics: Mapping[str, float]) -> None:
        """Put a command durably into the inbox of the run.

        Raises:
            OSError: it cannot be written.
        """
        command = Command(
            id=name,
            command=EVALUATED,
            arguments={
                "name": candidate.path.name,
                "iter": candidate.iter,
                "epoch": candidate.epoch,
                "metrics": {metric: score(value) for metric, value in metrics.items()},
            },
            source=self._source,
        )
        create_private(self._inbox, os.stat(self._run).st_uid if os.geteuid() == 0 else None)
        hidden = self._inbox / f".{name}{HIDDEN}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(hidden, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(command).ljust(ROOM))  # for the answer, if the disk is full then
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, self._inbox / (name + SENT))
        sync_directory(self._inbox)


def _scores(metrics: Mapping[str, float | str]) -> dict[str, float]:
    return {metric: float(value) for metric, value in metrics.items()}
