"""A pass over a map-style DataLoader, of which only the lists of indices are drawn again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop.data.loader_info import has_states, lists_of
from eventloop.data.plain_reader import PlainReader
from eventloop.data.resumable_loader import Indices, rebuild
from eventloop.data.rng import moved, random_state, rng_state, set_random_state
from eventloop.data.worker_random_state import FromWorker, InWorker, Told, merge
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


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
            if has_states(loader):
                _draw_out(loader, opened_with)
            return iter(())  # the end was met reading ahead
        if self._rebuilt is not None and not skip:
            self._seeded_here = False
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def state_dict(self, loader: DataLoader[Any], batch_idx: int) -> dict[str, Any]:
        """The states of workers, and what those that persist were seeded with."""
        states = self._states_at(loader, batch_idx)
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

    def _states_at(self, loader: DataLoader[Any], batch_idx: int) -> dict[int, tuple[bytes, ...]]:
        """What workers are to go on with, after so many batches of the pass."""
        if not (batch_idx or loader.persistent_workers):
            return {}  # the next pass seeds workers of its own
        states = dict(self._states)
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, told = self._pending
            states[worker] = merge(states.get(worker), told)
        return states

    def _without_workers(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[Any]:
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        indices = Indices(lists_of(loader), skip)
        iterator = iter(rebuild(loader, indices, loader.collate_fn, loader.worker_init_fn))
        indices.start()
        shared = _shared(indices, now)
        set_random_state(loader, now)
        return self._read_again(loader, skip, opened_with, shared) if shared else iterator

    def _read_again(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any], shared: list[str]
    ) -> Iterator[Any]:
        """Draw the indices as they were drawn, with what reading the samples draws between them."""
        now = rng_state()
        reader = PlainReader(
            f"the sampler draws from {_named(shared)} as the pass goes, and is not alone in that"
        )
        iterator = reader.open(loader, skip, opened_with)
        if reader.left is not None:
            _tell_inexact([name for name in moved(reader.left, now) if name in shared])
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
        indices = Indices(lists_of(loader), skip, idle, begin)
        rebuilt = rebuild(loader, indices, inside.collate, inside.init)
        iterator = iter(rebuilt)
        for _ in range(idle):
            _drop_next(iterator, loader.dataset)
        if skip:
            _tell_inexact(_shared(indices, now))
            set_random_state(loader, now)
        self._rebuilt = rebuilt if loader.persistent_workers else None
        return iterator

    def _seed(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any], now: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Put the generators into the state that workers are to be seeded from; return what puts them into the
        state that samplers begin with, where that is another one, because an earlier pass seeded the workers."""
        if skip:
            set_random_state(loader, opened_with, opening=True)
        if not loader.persistent_workers:
            return None
        source = loader.generator if loader.generator is not None else torch.default_generator
        earlier = self._seeded_with is not None and not (skip and self._seeded_here)
        self._seeded_here = not earlier
        if earlier:
            assert self._seeded_with is not None
            source.set_state(self._seeded_with.clone())
            return partial(set_random_state, loader, opened_with if skip else now, opening=bool(skip))
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


def _shared(indices: Indices, now: Mapping[str, Any]) -> list[str]:
    """The global generators that lists after the first were drawn from and that somebody else drew from between them,
    for they are not where the lists alone bring them."""
    if indices.after_first is None:
        return []
    drawn = rng_state()
    elsewhere = moved(drawn, now["rng"])
    return [name for name in moved(indices.after_first, drawn) if name in elsewhere]


def _named(generators: list[str]) -> str:
    return f"the global generator of {' and of '.join(generators)}"


def _tell_inexact(shared: list[str]) -> None:
    if shared:
        logger.warning(
            "the order of the samples is not that of the run that was interrupted: the sampler draws from %s as the pass "
            "goes, and so does the training; let it draw when the pass is opened, or from a generator of its own",
            _named(shared),
        )


def _draw_out(loader: DataLoader[Any], opened_with: Mapping[str, Any]) -> None:
    """Bring samplers that save their state to the end of a pass."""
    now = random_state(loader)
    set_random_state(loader, opened_with, opening=True)
    for _ in lists_of(loader):
        pass
    set_random_state(loader, now)


def _drop_next(iterator: Iterator[Any], dataset: Any) -> None:
    """Take what stands for a batch that was read before."""
    try:
        next(iterator, None)
    except Exception:
        if not hasattr(dataset, "__getitems__"):  # which may refuse to be asked for nothing
            raise
