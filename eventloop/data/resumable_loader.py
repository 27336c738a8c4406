"""Create a second DataLoader with the options of another one, whose first pass may begin in its middle.

`IndexReader` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader


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
