"""Describe a save that several ranks write together, as one of them does its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

REST, OWN, SHARD = "rest", "own", "shard"
"""The top-level keys of what one rank copies: the rest of the state, on rank 0 alone, what is the rank's own,
such as its random state, and the chunks that it writes."""


class PartJob(NamedTuple):
    """What all ranks know of a save that they write together.

    Attributes:
        work: the directory that all ranks write to.
        rank, ranks: the number of this rank, and of all ranks.
        form: the names, shapes and types of all tensors, as a hash.
        index_json, metadata: the contents of `index.json` and `.metadata`; empty on other ranks than 0.
        watched: the DTensor of each chunk that is copied, by the `id` of the chunk: its version counts the
            optimizer's steps, that of its local tensor does not.
    """

    work: Path
    rank: int
    ranks: int
    form: str
    index_json: bytes
    metadata: bytes
    watched: Mapping[int, torch.Tensor]
