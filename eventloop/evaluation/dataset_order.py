"""Put the outputs of a pass over a loader into the order of its data set.

A shuffled loader, and the share of each rank that a DistributedSampler draws, have another order. The indices
that the loader's sampler draws are noted meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from eventloop.data.loader_info import why_not_by_index
from eventloop.evaluation.outputs import join, join_ranks, select
from eventloop.state.exchange import gather
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

ALIKE = (
    "predict: all %d ranks have read the same %d indices, and one output for each was kept: divide the data "
    "set by a DistributedSampler; if each rank has a data set of its own, pass iter(loader)"
)


class NotedIndices:
    """The indices of each batch of a pass, which a copy of a loader notes while its sampler draws them.

    Args:
        loader: a copy of the user's loader, whose batch sampler is replaced. A loader without indices, such
            as an IterableDataset's, is left as it is.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._batches: list[list[Any]] = []
        self._loader = loader
        self.known = why_not_by_index(loader) is None and getattr(loader, "in_order", True)
        if self.known and isinstance(loader, DataLoader):
            self._sampler: Any = loader.batch_sampler
            vars(loader)["batch_sampler"] = self  # a DataLoader refuses to have it set

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._sampler:
            self._batches.append([*batch])
            yield self._batches[-1]

    def of_batch(self, batch_idx: int) -> tuple[int, ...]:
        """Return the indices of a batch; () if they are unknown."""
        return tuple(_ints(self._batches[batch_idx]) or ()) if self.known else ()

    def all(self) -> list[int] | None:
        """Return all indices in the order of the loader; None if they are unknown."""
        return _ints([index for batch in self._batches for index in batch]) if self.known else None

    def data_set(self) -> tuple[Any, ...]:
        """Return values that differ if ranks have different data sets: the length, and a Subset's indices."""
        chosen, data = [], getattr(self._loader, "dataset", None)
        while isinstance(data, Subset):
            known = _ints([*data.indices])
            chosen.append(sha256(repr(known or [*map(repr, data.indices)]).encode()).hexdigest())
            data = data.dataset
        return (None if data is None else length_of(data), *chosen)


class _Share(NamedTuple):
    """The part of a rank in the outputs."""

    outputs: Any
    indices: list[int] | None
    data_set: tuple[Any, ...]


def _ints(indices: Sequence[Any]) -> list[int] | None:
    """Return indices as ints; None if a sampler draws anything else, such as pairs."""
    known = all(isinstance(index, int | np.integer) for index in indices)
    return [int(index) for index in indices] if known else None


def in_dataset_order(
    batches: Sequence[Any],
    indices: list[int] | None,
    data_set: tuple[Any, ...] = (),
    *,
    data_ranks: int | None = None,
) -> Any:
    """Join the outputs of all batches of all ranks, one row for each index of the data set; a collective.

    An index that was drawn several times, as the padding of a DistributedSampler is, gives one row. If ranks
    have data sets of different lengths, or other Subsets, the data sets follow each other. Without indices
    the outputs of the ranks do. At least one rank has batches.

    Args:
        batches, indices, data_set: the outputs of this rank's batches, and what its loader has drawn.
        data_ranks: the number of ranks with different data; with 1 the outputs of one rank are those of all.
    """
    own = _Share(join(batches), indices, data_set) if batches else None
    ranks = [share for share in gather(own) if share is not None]
    whole = ranks[0].outputs if len(ranks) == 1 else join_ranks([share.outputs for share in ranks])
    if any(share.indices is None for share in ranks):
        return ranks[0].outputs if data_ranks == 1 else whole
    if data_ranks != 1:
        _warn_if_alike(ranks)
    data_sets: dict[tuple[Any, ...], int] = {}  # a number for each, in the order of the ranks
    order = [
        (data_sets.setdefault(share.data_set, len(data_sets)), index)
        for share in ranks
        for index in share.indices or ()
    ]
    first: dict[tuple[int, int], int] = {}
    for row, sample in enumerate(order):
        first.setdefault(sample, row)
    rows = [first[sample] for sample in sorted(first)]
    return whole if rows == [*range(len(order))] else select(whole, rows, of=len(order))


def _warn_if_alike(ranks: Sequence[_Share]) -> None:
    """Log a warning if each rank has read the same indices, of data sets that may be different ones."""
    drawn = {(frozenset(share.indices or ()), share.data_set) for share in ranks}
    if len(ranks) > 1 and len(drawn) == 1 and dist.get_rank() == 0:
        ((indices, _),) = drawn
        if len(indices) > 1:  # a single one is the padding of a DistributedSampler
            logger.warning(ALIKE, len(ranks), len(indices))
