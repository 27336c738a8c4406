"""A second DataLoader like another one, whose passes may begin after some of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from eventloop.data.rng import rng_state


class Indices:
    """A batch sampler's lists of indices; in the first pass without those that were read before.

    Args:
        batch_sampler: whose lists they are.
        skip: so many lists are drawn and dropped.
        idle: so many empty lists come instead of the last of these, one for each worker whose turn had been.
        begin: called before anything is drawn from the sampler.
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
        """The global random state after the first list that is dropped, before any more are drawn."""

    def __len__(self) -> int:
        return len(self._batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        # the sampler is asked when a DataLoader would ask it; a DataLoader with workers asks twice, and draws once
        self._newest = _Lists(self, None if self._begin is not None else iter(self._batch_sampler))
        return self._newest

    def start(self) -> None:
        """Drop the lists that are to be dropped now, not when the first one is needed."""
        assert self._newest is not None
        self._newest.start()

    def first(self, lists: Iterator[list[Any]] | None) -> tuple[Iterator[list[Any]], int]:
        """What the first pass begins with; the others begin at their beginning."""
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
    """One pass."""

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
    """A loader like `loader`, with a batch sampler, `collate_fn` and `worker_init_fn` of ours."""
    return _like(loader, collate, init, {"batch_sampler": indices})


def rebuild_stream(
    loader: DataLoader[Any], collate: Callable[[Any], Any], init: Callable[[int], Any] | None
) -> DataLoader[Any]:
    """A loader like `loader`, which reads an IterableDataset, with a `collate_fn` and `worker_init_fn` of ours."""
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
