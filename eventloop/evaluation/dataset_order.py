"""Put the outputs of a pass over a loader into the order of its data set.

A shuffled loader, and the share of each rank that a DistributedSampler draws, have another order. The indices
that the loader's sampler draws are noted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from eventloop.data.loader_info import why_not_by_index
from eventloop.evaluation.evaluation import gather
from eventloop.evaluation.outputs import join, join_ranks, take


class NotedIndices:
    """The indices of each batch of a pass, which a copy of a loader notes while its sampler draws them.

    Args:
        loader: a copy of the user's loader, whose batch sampler is replaced. A loader without indices, such
            as an IterableDataset's, is left as it is.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._batches: list[list[Any]] = []
        self._known = why_not_by_index(loader) is None and getattr(loader, "in_order", True)
        if self._known and isinstance(loader, DataLoader):
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
        return tuple(_ints(self._batches[batch_idx]) or ()) if self._known else ()

    def all(self) -> list[int] | None:
        """Return all indices in the order of the loader; None if they are unknown."""
        return _ints([index for batch in self._batches for index in batch]) if self._known else None


def _ints(indices: Sequence[Any]) -> list[int] | None:
    """Return indices as ints; None if a sampler draws anything else, such as pairs."""
    known = all(isinstance(index, int | np.integer) for index in indices)
    return [int(index) for index in indices] if known else None


def in_dataset_order(batches: Sequence[Any], indices: list[int] | None) -> Any:
    """Join the outputs of all batches of all ranks, one row for each index of the data set; a collective.

    An index that was drawn several times, as the padding of a DistributedSampler is, gives one row. Without
    indices the outputs of the ranks follow each other. At least one rank has batches.
    """
    own = (join(batches), indices) if batches else None
    ranks = [each for each in gather(own) if each is not None]
    whole = ranks[0][0] if len(ranks) == 1 else join_ranks([outputs for outputs, _ in ranks])
    if any(drawn is None for _, drawn in ranks):
        return whole
    order = [index for _, drawn in ranks for index in drawn or ()]
    first: dict[int, int] = {}
    for row, index in enumerate(order):
        first.setdefault(index, row)
    rows = [first[index] for index in sorted(first)]
    return whole if rows == [*range(len(order))] else take(whole, rows, of=len(order))
