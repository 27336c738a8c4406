"""Write `run.json` once a training has begun, on the thread of the run's heartbeat."""

from __future__ import annotations

from msgspec.structs import replace

from eventloop.assembly.description import describe
from eventloop.description.commit import program_commit
from eventloop.description.record import Begin, write_record
from eventloop.training.protocols import LoopTrainer


class RunFile:
    """The file `run.json` of a trainer's run.

    `RunOwnership` calls `write` at the begin of a run, each second, and at its end. Only the first call after
    the begin of a training writes, or a later one if that fails. A run that only evaluates writes nothing.
    """

    def __init__(self, trainer: LoopTrainer) -> None:
        self._trainer = trainer
        self._written: Begin | None = None

    def write(self) -> None:
        """Write the record of a training that has begun since the last call.

        Raises:
            OSError: the file cannot be written.
        """
        trainer, begin = self._trainer, self._trainer.begun
        if begin is None or begin is self._written or trainer.ownership.lost:
            return
        write_record(
            trainer.work_dir,
            describe(trainer, trainer.state.settings, replace(begin, commit=program_commit())),
        )
        self._written = begin
