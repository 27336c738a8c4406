"""Create a second DataLoader with the options of another one, whose first pass may begin in its middle.

`IndexReader` uses it. The middle may be a place between batches of another size, or of another number of
ranks: then `Rest` has the indices.
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
    """The indices of one rank in the rest of a pass, after the samples on which all ranks have trained.

    The rest of the order of a DistributedSampler is divided over the ranks, and filled up or cut, as the
    sampler does with a whole pass. Any other sampler leaves out its share of the samples.

    Args:
        sampler: the sampler of the whole pass.
        samples: the number of samples of the pass on which all ranks together have trained.
        shares: the number of ranks over which the sampler divides the pass.
    """

    def __init__(self, sampler: Any, samples: int, shares: int) -> None:
        self._sampler, self._samples, self._shares = sampler, samples, shares
        self._has_order_of_all = isinstance(sampler, DistributedSampler)

    def __len__(self) -> int:
        if not self._has_order_of_all:
            return max(0, len(self._sampler) - self._samples // self._shares)
        left = max(0, len(self._sampler.dataset) - self._samples)
        return left // self._shares if self._sampler.drop_last else -(-left // self._shares)

    def __iter__(self) -> Iterator[Any]:
        if not self._has_order_of_all:
            return islice(self._sampler, self._samples // self._shares, None)
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(whole.dataset)
        order, end = [*whole][self._samples :], len(self) * self._shares
        return islice(cycle(order), self._sampler.rank, end, self._shares)


def shares_of(loader: DataLoader[Any], data_ranks: int) -> int:
    """Return the number of ranks over which a map-style loader's sampler divides a pass.

    It is 1 if the sampler gives each rank as many samples as the data set has.

    Args:
        loader: the loader.
        data_ranks: the number of ranks that read different data.
    """
    sampler, data_set = lists_of(loader).sampler, loader.dataset
    if isinstance(sampler, DistributedSampler):
        return int(sampler.num_replicas)
    own, whole = length_of(sampler), length_of(data_set)  # type: ignore[arg-type]
    return 1 if own is None or whole is None or own >= whole else data_ranks


def lists_of(loader: DataLoader[Any]) -> Any:
    """Return a loader's batch sampler, which yields a list of indices for each batch."""
    assert loader.batch_sampler is not None  # else a PlainReader reads it
    return loader.batch_sampler


def samples_of_step(loader: Any, data_ranks: int) -> int | None:
    """Return the number of samples in one batch of every rank together.

    Return None if the loader has no sampler whose indices are put together to batches of one size.

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
    """Return the lists of indices of a pass after `samples` samples, on which all ranks have trained."""
    lists = lists_of(loader)
    rest = Rest(lists.sampler, samples, shares_of(loader, data_ranks))
    return BatchSampler(rest, lists.batch_size, lists.drop_last)


class Indices:
    """A batch sampler's lists of indices; those of the first pass may be given.

    A DataLoader with workers asks for two iterators and reads only one. This class asks the batch sampler for
    an iterator when the first list is read, so that the sampler draws once.

    Args:
        batch_sampler: the source of the lists.
        first: the lists of the first pass; None takes them from `batch_sampler` as well.
        limit: the number of lists of a pass from `batch_sampler`; None takes all of them.
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
    """Create a loader like another, with another batch sampler, `collate_fn` and `worker_init_fn`.

    Args:
        loader: the loader whose options are used.
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
