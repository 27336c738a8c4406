"""Define a running save: its job, the copy of the state, the encoded copy, and the promise of the result.

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
"""The largest size in bytes of a small state.

The saver's process gets the bytes of a small state through a pipe, and maps the memory of a larger one.
"""


class SaveTask:
    """A save that is not complete: what to write where, the copy of the state, and the promise of the result.

    Attributes:
        job: the path, the label and the checkpoints to remove.
        snapshot: the copy of the state; None for a `Mark`, which copies nothing.
        save: what `commit` writes: a `Mark` from the start, otherwise None until `encode` has encoded the
            copy.
        size: the bytes of the state's tensors.
        small: whether the state has at most `SMALL` bytes.
        seen_by_process: whether the saver's process can read the state, because it is small or its buffers
            are shared. For a larger state it is False until `encode` finds out.
        written: the promise of the result.
        buffers: the memory of the copy. A small state needs it until it is encoded, a larger one until it is
            written.
        begun: True once the save is being written, was dropped, or has failed. It can then not be dropped.
        process: the saver's process, if it writes the save; None if a thread does.
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
        """Copy the tensors that `Snapshot.begin` left out, and encode the copy once it is complete.

        Raises:
            ChangedWhileCopiedError: a tensor was changed while it was copied.
            CheckpointError: the manifest could not be read again.
        """
        snapshot, buffers = self.snapshot, self.buffers
        assert snapshot is not None
        assert buffers is not None
        if snapshot.unfinished:
            snapshot.copy()
        state = snapshot.wait()
        mappings = {} if self.small else buffers.memory()  # None: the process cannot map the buffers
        self.seen_by_process = mappings is not None
        save = self._encoded(state, buffers.rebuilt, mappings or {})
        # the process gets the save as a pickle, which cannot contain views of memory
        self.save = save.with_own_bytes() if self.seen_by_process else save
        if self.small:
            self.buffers = None

    def _encoded(
        self, state: dict[str, Any], rebuilt: Rebuilt, memory: Mapping[int, Mapped]
    ) -> Save | PartSave:
        """Return the copy of a state in the form in which `commit` writes it.

        Args:
            state: the copy.
            rebuilt: as in `records_of`.
            memory: as in `records_of`; empty if the bytes themselves are in the save.
        """
        job = self.job
        if job.part is None:
            manifest = encode_body(manifest_of(state, job.label))
            return Save(job.path, records_of(state, rebuilt, memory), manifest, job.replaces, job.spares)
        from eventloop.checkpoint.sharded.encode import encode_part  # it imports torch.distributed.checkpoint

        part = encode_part(state, job.part, job.path, job.label, rebuilt, memory)
        return part._replace(whole=part.whole._replace(replaces=job.replaces, spares=job.spares))
