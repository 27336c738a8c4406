"""Let ranks vote on a checkpoint that they write together, by files in its directory.

A vote is a file with the sizes and hashes of a rank's files, which are durable then, or with the reason why
they could not be written. Rank 0 waits for all votes. Files need no connection between the ranks. So no rank
waits in a collective operation for a rank that died, and ranks can vote while the training computes, or after
it has ended. The saver's process runs this module, so it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from eventloop.checkpoint.disk import Disk, FileHash, SaveGivenUp

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.002, 0.1
"""The first and the longest wait in seconds between two searches for votes; the waits double in between."""


class NoCheckpointError(RuntimeError):
    """A rank could not write its part of a checkpoint, or did not vote in time."""


class Vote(NamedTuple):
    """The vote of one rank on a checkpoint.

    Attributes:
        form: a hash of the names, shapes, types and placements of all tensors of the checkpoint.
        files: the sizes and hashes of the rank's files, by name.
        error: the reason why the rank could not write them; "" if it could.
        host: the name of the rank's host.
    """

    form: str
    files: Mapping[str, FileHash]
    error: str = ""
    host: str = ""


def vote_path(work: Path, rank: int) -> Path:
    """Return the path of a rank's vote."""
    return work / f"vote_{rank}.json"


def write_vote(work: Path, rank: int, vote: Vote, disk: Disk) -> None:
    """Write a rank's vote so that a reader finds either no vote or the complete one.

    Raises:
        OSError: the vote cannot be written.
    """
    files = {name: [*entry] for name, entry in vote.files.items()}
    body = json.dumps([vote.form, files, vote.error, socket.gethostname()]).encode()
    unfinished = vote_path(work, rank).with_suffix(".part")
    with suppress(FileNotFoundError):  # a process that died may have left one
        unfinished.unlink()
    with disk.create(unfinished) as file:
        disk.write(file, memoryview(body))
    disk.rename(unfinished, vote_path(work, rank))


def read_vote(work: Path, rank: int) -> Vote | None:
    """Return the vote of a rank, or None if it has not voted.

    Raises:
        OSError: the vote cannot be read.
    """
    try:
        form, files, error, host = json.loads(vote_path(work, rank).read_bytes())
    except FileNotFoundError:
        return None
    return Vote(form, {name: FileHash(*entry) for name, entry in files.items()}, error, host)


def await_votes(
    work: Path, own: Vote, ranks: int, patience: float, given_up: threading.Event | None = None
) -> list[Vote]:
    """Wait, on rank 0, for the votes of all other ranks, and return the votes of all, in order.

    Args:
        work: the directory that the ranks write to.
        own: the vote of rank 0.
        ranks: the number of ranks.
        patience: the seconds without another vote and without growth of any file, after which the missing
            ranks count as dead.
        given_up: an event that ends the wait when another thread sets it.

    Raises:
        NoCheckpointError: a rank could not write its files, has other tensors than rank 0, or has not voted.
        SaveGivenUp: `given_up` was set.
        OSError: a vote cannot be read.
    """
    votes: dict[int, Vote] = {0: own}
    pause, size, last_progress = FIRST_LOOK_SECONDS, _size(work), monotonic()
    while len(votes) < ranks:
        new = {rank: vote for rank in range(ranks) if rank not in votes and (vote := read_vote(work, rank))}
        for rank, vote in new.items():
            _check(rank, vote, own)
        votes |= new
        if new:
            pause, last_progress = FIRST_LOOK_SECONDS, monotonic()
        elif monotonic() - last_progress > patience:
            if (size_now := _size(work)) == size:
                raise NoCheckpointError(_silent(ranks, votes, patience))
            size, last_progress = size_now, monotonic()
        if given_up is not None and given_up.is_set():
            raise SaveGivenUp("the save was given up")
        if len(votes) < ranks:
            sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)
    return [votes[rank] for rank in range(ranks)]


def _check(rank: int, vote: Vote, own: Vote) -> None:
    """Raise NoCheckpointError if a vote is against the checkpoint, or of other tensors than rank 0's own."""
    if vote.error:
        raise NoCheckpointError(f"rank {rank} on host {vote.host} could not write its part: {vote.error}")
    if vote.form != own.form:
        raise NoCheckpointError(
            f"rank {rank} on host {vote.host} has tensors of other names, shapes or types than rank 0: "
            "expected the same state on all ranks; handlers of before_save_checkpoint must act alike on them"
        )


def _silent(ranks: int, votes: Mapping[int, Vote], patience: float) -> str:
    """Return the message about the ranks that have not voted."""
    missing = [str(rank) for rank in range(ranks) if rank not in votes]
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    return (
        f"expected the votes of {ranks} ranks, got none of {names} for {patience:g} s: the process may have "
        "died or stand still, or its host may see another directory"
    )


def _size(work: Path) -> int:
    """Return the bytes of all files in a directory, which grow while a rank writes."""
    total = 0
    with suppress(OSError), os.scandir(work) as entries:
        for entry in entries:
            total += entry.stat().st_size
    return total
