"""Define the facts about a run that writers receive when they open."""

from __future__ import annotations

import msgspec


class Run(msgspec.Struct, frozen=True):
    """The facts about a run when `before_run` is about to be emitted."""

    work_dir: str
    """Absolute path of the run's directory, which exists and can be written."""
    start_iter: int = 0
    """Completed train iterations when the run began; above 0 after a resume."""
    start_epoch: int = 0
    max_iters: int | None = None
    max_epochs: int | None = None
    iters_per_epoch: int | None = None
    """Batches of one pass over the train loader; None if it has no length."""
    rank: int = 0
    world_size: int = 1


class CurrentRun:
    """The facts of the latest run. Writers hold this rather than the trainer, which can then be freed."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> Run:
        """Return the facts of the latest run."""
        return self.run
