"""Put the outputs of a pass over a loader into the order of its data set.

A shuffled loader has another order, and so have the parts of the data set that a DistributedSampler gives to
the ranks. So the indices that the loader's sampler draws are recorded during the pass.
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


class RecordedIndices:
    """Wrap the batch sampler of a loader to record the indices of each batch of a pass.

    Args:
        loader: a copy of the user's loader, whose batch sampler is replaced by this object. A loader without
            indices, such as that of an IterableDataset, is not changed.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._batches: list[list[Any]] = []
        self._loader = loader
        self.known = why_not_by_index(loader) is None and getattr(loader, "in_order", True)
        """False if the loader has no indices, or gives its batches in another order than the sampler's."""
        if self.known and isinstance(loader, DataLoader):
            self._sampler: Any = loader.batch_sampler
            vars(loader)["batch_sampler"] = self  # setattr of a DataLoader raises an error

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
        """Return the indices of all batches in the order of the loader; None if they are unknown."""
        return _ints([index for batch in self._batches for index in batch]) if self.known else None

    def data_set(self) -> tuple[Any, ...]:
        """Return values that identify this rank's data set: its length, and hashes of a Subset's indices."""
        hashes, data_set = [], getattr(self._loader, "dataset", None)
        while isinstance(data_set, Subset):
            indices: Sequence[Any] = _ints([*data_set.indices]) or [*map(repr, data_set.indices)]
            hashes.append(sha256(repr(indices).encode()).hexdigest())
            data_set = data_set.dataset
        return (None if data_set is None else length_of(data_set), *hashes)


class _RankOutputs(NamedTuple):
    """The joined outputs of one rank, the indices that it has read, and the identity of its data set."""

    outputs: Any
    indices: list[int] | None
    data_set: tuple[Any, ...]


def _ints(indices: Sequence[Any]) -> list[int] | None:
    """Return indices as ints; None if a sampler draws other objects, such as pairs."""
    are_ints = all(isinstance(index, int | np.integer) for index in indices)
    return [int(index) for index in indices] if are_ints else None


def in_dataset_order(
    batches: Sequence[Any],
    indices: list[int] | None,
    data_set: tuple[Any, ...] = (),
    *,
    data_ranks: int | None = None,
) -> Any:
    """Join the outputs of all batches of all ranks in the order of the data set; a collective.

    The result has one row for each index, even if the index was drawn several times, as by the padding of a
    DistributedSampler. If ranks have data sets of different lengths, or different Subsets, the rows of one
    data set follow those of another. If indices are unknown, the outputs of one rank follow those of another.
    At least one rank must have batches.

    Args:
        batches: the outputs of this rank's batches.
        indices, data_set: the results of `RecordedIndices.all` and `RecordedIndices.data_set`.
        data_ranks: the number of ranks with different data; 1 if all ranks have read the same batches.
    """
    own_outputs = _RankOutputs(join(batches), indices, data_set) if batches else None
    ranks = [rank for rank in gather(own_outputs) if rank is not None]
    outputs = ranks[0].outputs if len(ranks) == 1 else join_ranks([rank.outputs for rank in ranks])
    if any(rank.indices is None for rank in ranks):
        return ranks[0].outputs if data_ranks == 1 else outputs
    if data_ranks != 1:
        _warn_if_alike(ranks)
    samples = _samples(ranks)
    row_of: dict[tuple[int, int], int] = {}  # the first row of each sample
    for row, sample in enumerate(samples):
        row_of.setdefault(sample, row)
    rows = [row_of[sample] for sample in sorted(row_of)]
    is_sorted = rows == [*range(len(samples))]
    return outputs if is_sorted else select(outputs, rows, of=len(samples))


def _samples(ranks: Sequence[_RankOutputs]) -> list[tuple[int, int]]:
    """Return for each row of the joined outputs the number of its data set, and its index in that set."""
    number_of: dict[tuple[Any, ...], int] = {}  # for each data set
    samples = []
    for rank in ranks:
        data_set_number = number_of.setdefault(rank.data_set, len(number_of))
        samples += [(data_set_number, index) for index in rank.indices or ()]
    return samples


def _warn_if_alike(ranks: Sequence[_RankOutputs]) -> None:
    """Log a warning on rank 0 if all ranks have read the same indices of data sets that look alike."""
    different = {(frozenset(rank.indices or ()), rank.data_set) for rank in ranks}
    if len(ranks) > 1 and len(different) == 1 and dist.get_rank() == 0:
        ((indices, _),) = different
        if len(indices) > 1:  # a DistributedSampler pads a data set of one sample to one for each rank
            logger.warning(ALIKE, len(ranks), len(indices))
