"""Define a running save: its job, the copy of the state and its encoding, and the promise of the result.

The saver makes one for each save, and its threads fill it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventloop.checkpoint.commit import AnySave, Save
from eventloop.checkpoint.manifest import encode_body
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.checkpoint.saving.saver_client import Job, SaverProcess, Written
from eventloop.checkpoint.saving.snapshot import Snapshot
from eventloop.checkpoint.serialize import Rebuilt, manifest_of, records_of
from eventloop.checkpoint.sharded.part import PartSave
from eventloop.processes.shared_memory import Mapped
from eventloop.util.waiting import Promise

SMALL = 1 << 20
"""The largest size in bytes of a state that is sent to the process; a larger one is mapped by it."""


class SaveTask:
    """One running save: its job, the copy of the state until it is encoded, and the promise of the result.

    Attributes:
        snapshot: the copy of the state; None if nothing is copied.
        small: whether the bytes of the state are sent to the process; those of a larger one are mapped by it.
        buffers: the memory of the copy. A small state needs it until it is encoded, a larger one until it is
            written.
        save: the encoded state, or what to write without one.
        seen_by_process: whether a process can read the state, because it is small or its buffers are shared.
        begun: True once it is being written; from then on it cannot be replaced.
        process: the process that writes the save; None if a thread does.
    """

    def __init__(self, job: Job, snapshot: Snapshot | None = None, save: AnySave | None = None) -> None:
        self.job, self.snapshot, self.save = job, snapshot, save
        self.size = 0 if snapshot is None else snapshot.size
        self.small = self.seen_by_process = self.size <= SMALL
        self.written: Promise[Written] = Promise()
        self.buffers: Buffers | None = None
        self.begun = False
        self.process: SaverProcess | None = None

    def encode(self) -> None:
        """Copy the tensors that `Snapshot.begin` left out, and encode the copy once it is complete."""
        snapshot, buffers = self.snapshot, self.buffers
        assert snapshot is not None
        assert buffers is not None
        if snapshot.unfinished:
            snapshot.copy()
        state = snapshot.wait()
        shared = {} if self.small else buffers.memory()
        self.seen_by_process = shared is not None
        save = self._encoded(state, buffers.rebuilt, shared or {})
        # views of memory cannot be sent to a process
        self.save = save.with_own_bytes() if self.seen_by_process else save
        if self.small:
            self.buffers = None

    def _encoded(
        self, state: dict[str, Any], rebuilt: Rebuilt, memory: Mapping[int, Mapped]
    ) -> Save | PartSave:
        job = self.job
        if job.part is None:
            manifest = encode_body(manifest_of(state, job.label))
            return Save(job.path, records_of(state, rebuilt, memory), manifest, job.replaces, job.spares)
        from eventloop.checkpoint.sharded.encode import encode_part  # it imports torch.distributed.checkpoint

        part = encode_part(state, job.part, job.path, job.label, rebuilt, memory)
        return part._replace(whole=part.whole._replace(replaces=job.replaces, spares=job.spares))
