"""Prepare the saves of one training whose model is sharded over ranks.

`CheckpointHook` makes a `Session` on every rank before the first iteration, for which the ranks exchange
messages. A save needs no messages, because every rank counts the saves and computes the same plan.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from eventloop.checkpoint.sharded.job import OWN, REST, SHARD, PartJob
from eventloop.checkpoint.sharded.places import Place, split
from eventloop.checkpoint.sharded.plan import Form, Plan, form_of, index_of, metadata_of, plan_of
from eventloop.state.exchange import decided_by_rank_0, gather, raised_together
from eventloop.state.sharded import local_parts
from eventloop.temporary.names import name_of_ranks

SHARED_SECONDS = 30.0
"""Seconds in which rank 0 must see the files of the other ranks; a network file system may show them late."""
RANKS = "ranks"
"""The top-level key of a rank's own state, such as its random state, in the state that is to be saved."""


class Session:
    """Prepare the saves of one training in one directory. The constructor is a collective operation.

    Args:
        directory: the directory of the checkpoints, which all ranks must share.
        rank, ranks: the number of this rank, and of all ranks.

    Raises:
        OSError: the directory cannot be written, or the ranks see different directories.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory, self._rank, self._ranks = directory, rank, ranks
        self._token = decided_by_rank_0(lambda: secrets.token_hex(6))
        self._number = 0
        self._plan: Plan | None = None
        self._forms: list[Form] = []  # of the tensors for which the plan was made
        self._own: list[Place] = []  # the tensors of which this rank writes a chunk
        self._index = self._metadata = b""  # the contents of `index.json` and `.metadata`, on rank 0
        self._check_shared()

    def prepare(self, name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], PartJob]:
        """Return the part of a state that this rank copies, and the description of how it is written.

        Every rank calls this for every save, so that all of them count the saves alike.

        Args:
            name: the checkpoint's name.
            state: the state with the live tensors, which has this rank's own state under "ranks".

        Raises:
            TypeError: a tensor cannot be saved.
        """
        self._number += 1
        rest, tensors = split({key: value for key, value in state.items() if key != RANKS})
        plan = self._planned(tensors)
        to_write = [tensors[place] for place in self._own]
        chunks = local_parts(to_write)
        copied = {OWN: state[RANKS], SHARD: chunks}
        if self._rank == 0:
            copied[REST] = rest
        watched = {id(chunk): tensor for chunk, tensor in zip(chunks, to_write, strict=True)}
        work = self._directory / name_of_ranks(name, self._token, self._number)
        job = PartJob(work, self._rank, self._ranks, plan.form, self._index, self._metadata, watched)
        return copied, job

    def _planned(self, tensors: Mapping[Place, torch.Tensor]) -> Plan:
        """Return the plan; make it first if tensors have changed their names, shapes, types or placements."""
        forms = [form_of(place, tensor) for place, tensor in tensors.items()]
        if self._plan is None or self._forms != forms:
            self._forms, self._plan = forms, plan_of(tensors, self._rank, self._ranks)
            plan, self._own = self._plan, self._plan.of_rank(self._rank)
            if self._rank == 0:
                self._index, self._metadata = index_of(plan, tensors), metadata_of(plan, tensors)
        return self._plan

    def _check_shared(self) -> None:
        """Let every rank create a file in the directory, and let rank 0 search for all of them.

        Raises:
            OSError: the directory cannot be written, or rank 0 does not see the file of a rank.
        """
        marks = [self._directory / f".shared.{self._token}.{rank}" for rank in range(self._ranks)]
        with raised_together(f"writing to {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
            marks[self._rank].touch()
        try:
            hosts = gather(socket.gethostname())
            if missing := decided_by_rank_0(lambda: _unseen(marks)):
                names = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in missing)
                raise OSError(
                    f"the directory {self._directory} is not shared: expected a file system that all ranks "
                    f"write to, but rank 0 on host {hosts[0]} does not see the files of {names}: give the "
                    "Trainer a work_dir on a shared file system"
                )
        finally:
            with suppress(OSError):
                marks[self._rank].unlink()


def _unseen(marks: list[Path]) -> list[int]:
    """Return the ranks whose files do not appear within `SHARED_SECONDS`."""
    deadline = monotonic() + SHARED_SECONDS
    while missing := [rank for rank, mark in enumerate(marks) if not mark.exists()]:
        if monotonic() > deadline:
            break
        sleep(0.05)
    return missing
