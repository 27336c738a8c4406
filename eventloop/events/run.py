"""Define the facts about a run that writers receive when they open."""

from __future__ import annotations

from secrets import token_hex

import msgspec


class Run(msgspec.Struct, frozen=True):
    """The facts about a run, as they are just before `before_run` is emitted."""

    work_dir: str
    """The absolute path of the run's directory, which exists and can be written."""
    start_iter: int = 0
    """The number of completed train iterations at the begin of the run; above 0 after a resume."""
    start_epoch: int = 0
    """The number of completed epochs at the begin of the run."""
    max_iters: int | None = None
    max_epochs: int | None = None
    iters_per_epoch: int | None = None
    """The number of batches in one pass over the train loader; None if it has no length."""
    rank: int = 0
    world_size: int = 1
    trainer_id: str = ""
    """The id of the trainer, a random text that is the same in each of its runs; "" in a replay."""


class CurrentRun:
    """The facts of a trainer's latest run. Writers refer to this object instead of the trainer.

    So the trainer can be freed while writers still work.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._trainer_id = token_hex(8)

    def __call__(self) -> Run:
        """Return the facts of the latest run, with the trainer's id."""
        return msgspec.structs.replace(self.run, trainer_id=self._trainer_id)
