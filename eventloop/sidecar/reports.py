"""Send the metrics of a checkpoint to its run as a command, and find the metrics that were sent before.

The id of a command is computed from the checkpoint. So an evaluator that is started again finds, in the run's
files, the commands that it sent before it was killed. The file `commands.jsonl` has the commands that the run
has applied. The inbox has those that it has not applied yet, even while no process of the run is alive.
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
"""The folder in a run's directory that its evaluator owns, so that there is only one at a time."""


def id_of(candidate: Candidate) -> str:
    """Return the id of the command for a checkpoint. Sorted as texts, ids are in the order of iterations."""
    return f"{candidate.iter:020d}-{candidate.sha256[:8]}"


class Reports:
    """Send reports to one run, and find those that were sent before. One evaluator at a time uses it.

    Args:
        run: the directory of the run.
        source: the sender, such as "evaluate 4711@node3".
    """

    def __init__(self, run: Path, source: str) -> None:
        self._run, self._source = run, source
        self._inbox, self._outbox = run / INBOX, run / OUTBOX

    def known(self, name: str, iteration: int) -> bool:
        """Return whether a checkpoint's metrics were sent as a command that still counts for the run.

        A command that the run has refused counts, because the run would refuse it again. An applied
        command counts while the run's record has it: a run that is resumed by name from an earlier checkpoint
        begins a new record.

        A command moves from the inbox to the outbox, and is recorded in `commands.jsonl` before its answer is
        in the outbox. Reading inbox, outbox and record in this order finds it at any moment of the move.

        Args:
            name: the id of the command, as `id_of` returns it.
            iteration: the iteration of the checkpoint.
        """
        # in the inbox the command has the suffix SENT, and CLAIMED from when the run is about to apply it
        if any((self._inbox / (name + suffix)).exists() for suffix in (SENT, CLAIMED)):
            return True
        with suppress(OSError, msgspec.MsgspecError):
            # the answer has the suffix SENT, too
            answer = msgspec.json.decode((self._outbox / (name + SENT)).read_bytes(), type=Answer)
            if answer.outcome == "refused":
                return True
        return iteration in self._recorded()

    def metrics(self, name: str, iteration: int) -> dict[str, float] | None:
        """Return the metrics of a command that `known` has found; None if no file of the run has them.

        They are read from the command in the inbox or from `commands.jsonl`; an answer in the outbox does not
        contain them.
        """
        for suffix in (SENT, CLAIMED):
            with suppress(OSError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
                sent = msgspec.json.decode((self._inbox / (name + suffix)).read_bytes(), type=Command)
                return _scores(sent.arguments["metrics"])
        with suppress(OSError, ValueError, TypeError, KeyError):
            for applied in reversed(read_record(self._run / NAME)):
                if applied.command == EVALUATED and applied.arguments.get("iter") == iteration:
                    return _scores(applied.arguments["metrics"])
        return None

    def _recorded(self) -> set[int]:
        """Return the iterations of the checkpoints whose metrics are in the run's present record."""
        try:
            return iterations_evaluated(read_record(self._run / NAME))
        except FileNotFoundError:
            return set()

    def send(self, name: str, candidate: Candidate, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a checkpoint as a command into the run's inbox, and sync it to the disk.

        Args:
            name: the id of the command, as `id_of` returns it.
            candidate: the checkpoint.
            metrics: its scores.

        Raises:
            OSError: the file cannot be written.
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
            # padded, so that the answer later has room in this file even if the disk is full
            file.write(msgspec.json.encode(command).ljust(ROOM))
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, self._inbox / (name + SENT))
        sync_directory(self._inbox)


def _scores(metrics: Mapping[str, float | str]) -> dict[str, float]:
    return {metric: float(value) for metric, value in metrics.items()}
