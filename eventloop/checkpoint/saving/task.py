"""Define a running save: its job, the copy of the state and its encoding, and the promise of the result.

`serialize` encodes a whole state, `sharded.encode` the part of one rank.

The saver makes one for each save, and its threads fill it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventloop.checkpoint.commit import AnySave, Save
from eventloop.checkpoint.saving.saver_client import Job, SaverProcess, Written
from eventloop.checkpoint.saving.snapshot import Packed, Snapshot
from eventloop.checkpoint.serialize import Rebuilt, serialize
from eventloop.checkpoint.sharded.part import PartSave
from eventloop.processes.shared_memory import Mapped
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
        self.source: Mapping[str, Any] | None = None
        """The state until it is copied, so that the thread that copies frees it.

        Python's lock is released for each tensor that is freed, so a training thread that freed them would
        wait for the thread that copies, often for a time slice.
        """
        self.packed: Packed | None = None
        self.save: AnySave | None = None
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

    def copy(self) -> None:
        """Copy the tensors that `Snapshot.pack` left out, and free the state."""
        assert self.packed is not None
        try:
            if self.packed.rest.unfinished:
                self.packed.rest.copy()
        finally:
            self.source = None

    def encode(self) -> None:
        """Wait for the copy, and encode it; the buffers of a small state are not needed afterwards."""
        assert self.packed is not None
        self.packed.rest.wait()
        layout = self.packed.layout
        memory = {} if self.small else layout.memory()
        save = self._encoded(self.packed.unpack(), layout.rebuilt, memory)
        # views of memory cannot be sent to a process
        self.save = save.with_own_bytes() if self.seen_by_process else save
        if self.small:
            self.snapshot = None

    def _encoded(
        self, state: dict[str, Any], rebuilt: Rebuilt, memory: Mapping[int, Mapped]
    ) -> Save | PartSave:
        job = self.job
        if job.part is None:
            save = serialize(state, job.path, job.label, rebuilt, memory)
            return save._replace(replaces=job.replaces, spares=job.spares)
        from eventloop.checkpoint.sharded.encode import encode_part  # it imports torch.distributed.checkpoint

        part = encode_part(state, job.part, job.path, job.label, rebuilt, memory)
        return part._replace(whole=part.whole._replace(replaces=job.replaces, spares=job.spares))
