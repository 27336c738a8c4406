"""How a pass over a loader is opened, and how one that was cut short is gone on with.

Of a `DataLoader` over a map-style dataset only the lists of indices are drawn again, and no sample is read twice.
A loader with `state_dict` and `load_state_dict` is asked to go on by itself. Of anything else the batches that were
trained on are read again and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from eventloop.plain import plain
from eventloop.rebuild import Indices, rebuild
from eventloop.rng import generators_of, random_state, rng_state, set_random_state, set_rng_state
from eventloop.worker_rng import FromWorker, InWorker, Told, merge

logger = logging.getLogger("eventloop")


class Reader(Protocol):
    """Opens the passes over one loader."""

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """The batches of a pass, without the first `skip`; `opened_with` is the random state it began with.

        The random state is left as the uninterrupted pass would have it: as it is, where batches are skipped.
        """

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """What `open` needs beyond its arguments, with `batch_idx` batches of the pass trained on."""

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Take a state for the pass that is opened next."""


def reader_of(loader: Iterable[Any]) -> Reader:
    """The best there is for a loader."""
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return StatefulReader()
    return PlainReader(why) if (why := _why_not_by_index(loader)) else IndexReader()


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Batches of one pass, None where the loader does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


class PlainReader:
    """Any iterable: what was trained on is read again and dropped, but for lists, which are cut.

    Args:
        why: the reason, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        iterator: Iterator[Any]
        if not skip:
            iterator = iter(loader)
            return iterator
        if isinstance(loader, list | tuple):
            return islice(loader, skip, None)
        length = length_of(loader)
        if length is not None and skip >= length and not generators_of(loader):
            return iter(())  # nothing is left, and no sampler has anything to draw at the end
        logger.warning(
            "the first %d batches of the pass, which were trained on, are read again and dropped: %s",
            skip,
            self._why,
        )
        now = random_state(loader)
        set_random_state(loader, opened_with)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        set_random_state(loader, now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Nothing."""


class StatefulReader:
    """A loader that saves its own place, like torchdata's StatefulDataLoader.

    A resumed run is as exact as the loader is: torchdata's finds every sample again, and saves no random state of
    its workers.
    """

    def __init__(self) -> None:
        self._began = False
        self._loaded = False

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        began, loaded = self._began, self._loaded
        self._began, self._loaded = True, False
        if skip and not (began or loaded):
            why = f"the checkpoint has no state of the {type(loader).__name__}"
            return PlainReader(why).open(loader, skip, opened_with)
        if skip and not loaded:
            loader.load_state_dict(loader.state_dict())  # the pass a stop cut short
        now = rng_state()
        iterator: Iterator[Any] = iter(loader)
        if skip:
            set_rng_state(now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """The loader's own.

        Raises:
            TypeError: there is something in it that could be saved, and not be loaded with `weights_only=True`.
        """
        return {
            "stateful": plain(loader.state_dict(), f"train loader ({type(loader).__name__}.state_dict())")
        }

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Give the loader its own, if there is one."""
        if "stateful" in state:
            loader.load_state_dict(state["stateful"])
            self._loaded = True


class IndexReader:
    """A DataLoader of which only the indices are drawn again.

    A pass that goes on, and each one with workers, is read through a second loader, made as the first one. Its
    workers tell their random state with every batch. The state after the last batch that was trained on is in the
    checkpoint, whatever was read ahead, and the workers that go on begin with it.

    Workers that persist are seeded once, when the first pass begins. So that those of a resumed run draw that seed
    once more, and the samplers nothing twice, the state it is drawn from is in the checkpoint too.
    """

    def __init__(self) -> None:
        self._rebuilt: DataLoader[Any] | None = None  # where its workers persist
        self._states: dict[int, tuple[bytes, ...]] = {}
        self._pending: tuple[int, int, Told] | None = None  # number of a batch, its worker, what that told
        self._seeded_with: torch.Tensor | None = None
        self._seeded_here = True  # by the pass that is under way, not by one before

    def open(self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        if not loader.num_workers:
            return self._without_workers(loader, skip, opened_with) if skip else iter(loader)
        if not loader.in_order:
            return self._out_of_order(loader, skip, opened_with) if skip else iter(loader)
        self._settle(skip)
        length = length_of(loader)
        if skip and length is not None and skip >= length:
            return iter(())  # the end was met reading ahead
        if self._rebuilt is not None and not skip:
            self._seeded_here = False
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def state_dict(self, loader: DataLoader[Any], batch_idx: int) -> dict[str, Any]:
        """The states of workers, and what those that persist were seeded with."""
        states = dict(self._states)
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, told = self._pending
            states[worker] = merge(states.get(worker), told)
        if not (batch_idx or loader.persistent_workers):
            states = {}  # the next pass seeds workers of its own
        return {
            "num_workers": loader.num_workers,
            "workers": {
                worker: [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state]
                for worker, state in states.items()
            },
            "seeded_with": self._seeded_with,
            "seeded_here": self._seeded_here,
        }

    def load_state_dict(self, loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
        """Take the states of workers, if the loader has as many."""
        self._rebuilt = self._pending = None
        self._states = {}
        if "num_workers" not in state:
            return
        if state["num_workers"] != loader.num_workers:
            logger.warning(
                "num_workers: %d in the checkpoint, %d in this loader: what workers draw at random differs from here on",
                state["num_workers"],
                loader.num_workers,
            )
            return
        for worker, parts in state["workers"].items():
            self._states[worker] = tuple(part.numpy().tobytes() for part in parts)
        self._seeded_with, self._seeded_here = state["seeded_with"], state["seeded_here"]

    def _without_workers(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[Any]:
        now = random_state(loader)
        set_random_state(loader, opened_with)
        indices = Indices(_lists_of(loader), skip)
        iterator = iter(rebuild(loader, indices, loader.collate_fn, loader.worker_init_fn))
        indices.start()
        set_random_state(loader, now)
        return iterator

    def _out_of_order(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[Any]:
        logger.warning("the loader's in_order is False: which batches were trained on is not known exactly")
        return self._without_workers(loader, skip, opened_with)

    def _start(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[FromWorker]:
        """Start workers: at the beginning of a pass, or where it goes on."""
        self._rebuilt = None  # with workers that have read ahead of where this pass begins
        now = random_state(loader)
        begin = self._seed(loader, skip, opened_with, now)
        if not skip and begin is None:
            self._states = {}
        idle = skip % loader.num_workers
        inside = InWorker(loader.collate_fn, loader.worker_init_fn, self._states, idle)
        indices = Indices(_lists_of(loader), skip, idle, begin)
        rebuilt = rebuild(loader, indices, inside.collate, inside.init)
        iterator = iter(rebuilt)
        for _ in range(idle):
            _drop_next(iterator, loader.dataset)
        if skip:
            set_random_state(loader, now)
        self._rebuilt = rebuilt if loader.persistent_workers else None
        return iterator

    def _seed(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any], now: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Put the generators into the state that workers are to be seeded from; return what puts them into the
        state that samplers begin with, where that is another one, because an earlier pass seeded the workers."""
        if skip:
            set_random_state(loader, opened_with)
        if not loader.persistent_workers:
            return None
        source = loader.generator if loader.generator is not None else torch.default_generator
        earlier = self._seeded_with is not None and not (skip and self._seeded_here)
        self._seeded_here = not earlier
        if earlier:
            assert self._seeded_with is not None
            source.set_state(self._seeded_with.clone())
            return partial(set_random_state, loader, opened_with if skip else now)
        self._seeded_with = source.get_state()
        return None

    def _batches(self, iterator: Iterator[FromWorker], number: int) -> Iterator[Any]:
        for batch, worker, told in iterator:
            self._pending = number, worker, told
            number += 1
            yield batch
            self._settle(number)

    def _settle(self, batch_idx: int) -> None:
        """So many batches of the pass are trained on."""
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, told = self._pending
            self._states[worker] = merge(self._states.get(worker), told)
        self._pending = None


def _lists_of(loader: DataLoader[Any]) -> Iterable[list[Any]]:
    assert loader.batch_sampler is not None  # or it would be read by a PlainReader
    return loader.batch_sampler


def _drop_next(iterator: Iterator[Any], dataset: Any) -> None:
    """Take what stands for a batch that was read before."""
    try:
        next(iterator, None)
    except Exception:
        if not hasattr(dataset, "__getitems__"):  # which may refuse to be asked for nothing
            raise


def _why_not_by_index(loader: Iterable[Any]) -> str | None:
    """Why a loader cannot be rebuilt, None where it can."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"a {kind} is no torch.utils.data.DataLoader, and has no state_dict and load_state_dict"
    if type(loader) is not DataLoader:
        return f"{kind} is a subclass of DataLoader, which may read in any way, and has no state_dict and load_state_dict"
    if isinstance(loader.dataset, IterableDataset):
        return "the loader's dataset is an IterableDataset, whose samples have no indices"
    if isinstance(loader.dataset, getattr(data, "MapDataPipe", ())):
        return "the loader's dataset is a MapDataPipe"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and no lists of indices"
    return None
