"""Create a copy of a DataLoader whose first pass begins where an interrupted pass continues.

`IndexReader` uses it. If the run that was interrupted had batches of another size, or another number of
ranks, `Rest` divides the samples that are left in the pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from eventloop.data.loader_info import why_not_by_index
from eventloop.util.checks import length_of


class Rest(Sampler[Any]):
    """A sampler of the indices that one rank reads in the rest of a pass.

    The rest comes after the samples on which all ranks have trained. A DistributedSampler has one order of
    all samples: its rest is divided over the ranks, and filled up or cut to equal parts, as the sampler does
    with a whole pass. Of any other sampler the first indices are left out, as many as one rank has read.

    Args:
        sampler: the sampler of the whole pass.
        samples: the number of samples of the pass on which all ranks together have trained.
        shares: the number of ranks over which the sampler divides the pass; see `shares_of`.
    """

    def __init__(self, sampler: Any, samples: int, shares: int) -> None:
        self._sampler, self._samples, self._shares = sampler, samples, shares
        self._has_order_of_all = isinstance(sampler, DistributedSampler)

    def __len__(self) -> int:
        """Return the number of indices that this rank still reads; of a DistributedSampler, as any rank."""
        if not self._has_order_of_all:
            return max(0, len(self._sampler) - self._samples // self._shares)
        left = max(0, len(self._sampler.dataset) - self._samples)
        return left // self._shares if self._sampler.drop_last else -(-left // self._shares)

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's indices: its share of the order of all ranks, or the rest of its own order."""
        if not self._has_order_of_all:
            return islice(self._sampler, self._samples // self._shares, None)
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(whole.dataset)
        order, end = [*whole][self._samples :], len(self) * self._shares
        return islice(cycle(order), self._sampler.rank, end, self._shares)


def shares_of(loader: DataLoader[Any], data_ranks: int) -> int:
    """Return the number of ranks over which the sampler of a map-style loader divides a pass.

    It is 1 if the sampler yields as many indices on this rank as the data set has samples.

    Args:
        loader: the loader.
        data_ranks: the number of ranks that read different data.
    """
    sampler, data_set = lists_of(loader).sampler, loader.dataset
    if isinstance(sampler, DistributedSampler):
        return int(sampler.num_replicas)
    own, all_samples = length_of(sampler), length_of(data_set)  # type: ignore[arg-type]
    return 1 if own is None or all_samples is None or own >= all_samples else data_ranks


def lists_of(loader: DataLoader[Any]) -> Any:
    """Return a loader's batch sampler, which yields a list of indices for each batch."""
    assert loader.batch_sampler is not None  # a PlainReader reads a loader without one
    return loader.batch_sampler


def samples_of_step(loader: Any, data_ranks: int) -> int | None:
    """Return the number of samples in one batch of every rank together.

    Return None if the loader has no plain `BatchSampler`, so that batches may have any size, or no length.

    Args:
        loader: the loader.
        data_ranks: the number of ranks that read different data.
    """
    if why_not_by_index(loader) is not None or type(loader.batch_sampler) is not BatchSampler:
        return None
    if length_of(loader) is None:
        return None
    return int(loader.batch_sampler.batch_size) * shares_of(loader, data_ranks)


def rest_of(loader: DataLoader[Any], samples: int, data_ranks: int) -> BatchSampler:
    """Return this rank's lists of indices for the rest of a pass.

    Args:
        loader: the loader.
        samples: the number of samples of the pass on which all ranks together have trained.
        data_ranks: the number of ranks that read different data.
    """
    lists = lists_of(loader)
    rest = Rest(lists.sampler, samples, shares_of(loader, data_ranks))
    return BatchSampler(rest, lists.batch_size, lists.drop_last)


class Indices:
    """Yield a batch sampler's lists of indices, in the first pass perhaps other lists.

    A DataLoader with workers makes two iterators of its batch sampler, and reads only one. An iterator of
    this class iterates over the batch sampler only when its first list is read, so the sampler draws once.

    Args:
        batch_sampler: the source of the lists.
        first: the lists of the first pass; None to take them from `batch_sampler`, too.
        limit: the largest number of lists in a pass from `batch_sampler`; None for all of them.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        first: Iterable[list[Any]] | None = None,
        limit: int | None = None,
    ) -> None:
        self._batch_sampler, self._first, self.limit = batch_sampler, first, limit

    def __iter__(self) -> Iterator[list[Any]]:
        first, self._first = self._first, None
        yield from islice(self._batch_sampler, self.limit) if first is None else first


def rebuild(
    loader: DataLoader[Any],
    indices: Iterable[list[Any]],
    generator: torch.Generator,
    collate: Callable[[Any], Any],
    init: Callable[[int], Any] | None,
) -> DataLoader[Any]:
    """Return a DataLoader with the options of another one, except those that are arguments here.

    Args:
        loader: the DataLoader whose options are used.
        indices: the batch sampler.
        generator: the generator from which the seed of the workers is drawn.
        collate, init: the `collate_fn` and the `worker_init_fn`.
    """
    options: dict[str, Any] = {}
    if loader.num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        batch_sampler=indices,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=init,
        generator=generator,
        in_order=loader.in_order,
        **options,
    )
