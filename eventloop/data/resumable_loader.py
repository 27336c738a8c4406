"""Make a second DataLoader with the options of another one, whose first pass may skip batches.

`IndexReader` and `StreamReader` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from eventloop.data.rng import rng_state


class Indices:
    """A batch sampler's lists of indices, whose first pass skips the lists that were read before.

    Args:
        batch_sampler: the source of the lists.
        skip: the number of lists that are drawn and dropped.
        idle: the number of empty lists that come first, one for each worker that had its turn already. They
            make each worker get the batches that it would have got.
        begin: a function that is called before the sampler draws.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        skip: int = 0,
        idle: int = 0,
        begin: Callable[[], object] | None = None,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._skip, self._idle, self._begin = skip, idle, begin
        self._newest: _Lists | None = None
        self.after_first: dict[str, Any] | None = None
        """The global random state after the first dropped list was drawn; None if none was."""

    def __len__(self) -> int:
        return len(self._batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        # called when a DataLoader would call it; a DataLoader with workers calls it twice, and draws once
        self._newest = _Lists(self, None if self._begin is not None else iter(self._batch_sampler))
        return self._newest

    def start(self) -> None:
        """Draw and drop the skipped lists now, not when the first list is needed."""
        assert self._newest is not None
        self._newest.start()

    def first(self, lists: Iterator[list[Any]] | None) -> tuple[Iterator[list[Any]], int]:
        """Return the lists of a pass without the skipped ones, and the number of empty lists before them.

        Only the first call skips lists; later passes begin at their beginning.
        """
        skip, idle, begin = self._skip, self._idle, self._begin
        self._skip, self._idle, self._begin = 0, 0, None
        if begin is not None:
            begin()
        if lists is None:
            lists = iter(self._batch_sampler)
        for number in range(skip):
            next(lists, None)
            if not number:
                self.after_first = rng_state()
        return lists, idle


class _Lists:
    """The lists of one pass; those to skip are dropped when it starts."""

    def __init__(self, indices: Indices, lists: Iterator[list[Any]] | None) -> None:
        self._indices: Indices | None = indices
        self._lists = lists
        self._idle = 0

    def start(self) -> None:
        if self._indices is not None:
            self._lists, self._idle = self._indices.first(self._lists)
            self._indices = None

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        self.start()
        if self._idle:
            self._idle -= 1
            return []
        assert self._lists is not None
        return next(self._lists)


def rebuild(
    loader: DataLoader[Any],
    indices: Iterable[list[Any]],
    collate: Callable[[Any], Any],
    init: Callable[[int], Any] | None,
) -> DataLoader[Any]:
    """Make a loader like another, with another batch sampler, `collate_fn` and `worker_init_fn`."""
    return _like(loader, collate, init, {"batch_sampler": indices})


def rebuild_stream(
    loader: DataLoader[Any], collate: Callable[[Any], Any], init: Callable[[int], Any] | None
) -> DataLoader[Any]:
    """Make a loader like another of an IterableDataset, with another `collate_fn` and `worker_init_fn`."""
    return _like(loader, collate, init, {"batch_size": loader.batch_size, "drop_last": loader.drop_last})


def _like(
    loader: DataLoader[Any],
    collate: Callable[[Any], Any],
    init: Callable[[int], Any] | None,
    options: dict[str, Any],
) -> DataLoader[Any]:
    if loader.num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=init,
        generator=loader.generator,
        in_order=loader.in_order,
        **options,
    )
