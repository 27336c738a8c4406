"""What a writer is told about the run when it opens: facts, fixed when the run began."""

from __future__ import annotations

import msgspec


class Run(msgspec.Struct, frozen=True):
    """One run, from the moment `before_run` is about to be emitted."""

    work_dir: str
    """Where the run's files go, from the root; it exists and can be written."""
    start_iter: int = 0
    """Completed train iterations when the run began; above 0 when it was resumed."""
    start_epoch: int = 0
    max_iters: int | None = None
    max_epochs: int | None = None
    iters_per_epoch: int | None = None
    """Batches of one pass over the train loader, None where it has no length."""
    rank: int = 0
    world_size: int = 1


class CurrentRun:
    """The facts of the run that began last. Writers hold this and not the trainer, which may then be
    forgotten.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> Run:
        """What a writer is given when it opens."""
        return self.run
