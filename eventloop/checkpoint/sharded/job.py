"""Describe one rank's part of a save that several ranks write together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

REST, OWN, SHARD = "rest", "own", "shard"
"""The top-level keys of what one rank copies.

"rest" is the state without the tensors that go to shards, on rank 0 alone. "own" is the state that each rank
has of its own, such as its random state. "shard" is the list of the chunks of tensors that the rank writes.
"""


class PartJob(NamedTuple):
    """The description of one rank's part of a save.

    Attributes:
        work: the temporary directory that all ranks write to.
        rank, ranks: the number of this rank, and the number of ranks.
        form: a hash of the names, shapes, types and placements of all tensors.
        index_json, metadata: the contents of `index.json` and `.metadata`; empty on other ranks than 0.
        watched: by the `id` of each chunk that is copied, its DTensor. An optimizer's step raises the version
            count of the DTensor, but not that of the chunk, which is its local tensor.
    """

    work: Path
    rank: int
    ranks: int
    form: str
    index_json: bytes
    metadata: bytes
    watched: Mapping[int, torch.Tensor]
