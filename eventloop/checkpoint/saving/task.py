"""Define a running save: its job, the copy of the state, and the promise of the result.

The saver makes one for each save, and its threads fill it in.
"""

from __future__ import annotations

from eventloop.checkpoint.commit import Save
from eventloop.checkpoint.saving.saver_client import Job, SaverProcess, Written
from eventloop.checkpoint.saving.snapshot import Packed, Snapshot
from eventloop.checkpoint.serialize import serialize
from eventloop.util.waiting import Promise

SMALL = 1 << 20
"""The largest size in bytes of a state that is sent to the process; a larger one is mapped by it."""


class SaveTask:
    """One running save: its job, the copy of the state until it is encoded, and the promise of the result."""

    def __init__(self, job: Job, size: int) -> None:
        self.job, self.size = job, size
        self.written: Promise[Written] = Promise()
        self.snapshot: Snapshot | None = None
        """The buffers that hold the copy.

        A small state needs them until it is encoded, a larger one until it is written.
        """
        self.packed: Packed | None = None
        self.save: Save | None = None
        self.begun = False
        """True once it is being written; from then on it cannot be replaced."""
        self.process: SaverProcess | None = None
        """The process that writes the save; None if a thread does."""

    @property
    def small(self) -> bool:
        """Return whether the state is small.

        The bytes of a small state are sent to the process; those of a larger one are mapped by it.
        """
        return self.size <= SMALL

    @property
    def seen_by_process(self) -> bool:
        """Return whether a process can read the state, because it is small or its buffers are shared."""
        return self.small or (self.packed is not None and self.packed.layout.shared)

    def encode(self) -> None:
        """Wait for the copy, and encode it; the buffers of a small state are not needed afterwards."""
        assert self.packed is not None
        self.packed.rest.wait()
        layout = self.packed.layout
        memory = {} if self.small else layout.memory()
        save = serialize(self.packed.unpack(), self.job.path, self.job.label, layout.rebuilt, memory)
        self.save = save._replace(replaces=self.job.replaces, spares=self.job.spares)
        if self.seen_by_process:  # views of memory cannot be sent to a process
            self.save = self.save.with_own_bytes()
        if self.small:
            self.snapshot = None
