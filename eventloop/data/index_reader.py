"""Resume a pass over a map-style DataLoader by drawing only its lists of indices again.

`readers` chooses `IndexReader` for a plain `DataLoader`, and for torchdata's loader over a data set without a
state. No sample that was trained on is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop.data.limits import first
from eventloop.data.loader_state import random_state, set_random_state
from eventloop.data.resumable_loader import Indices, lists_of, rebuild
from eventloop.data.rng import changed_generators, rng_state
from eventloop.data.worker_random_state import ChangedState, FromWorker, InWorker, merge
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

Lists = Iterable[list[Any]] | None
"""Lists of the indices of a batch's samples, one list for each batch."""


class IndexReader:
    """The reader of a map-style DataLoader, which resumes a pass by drawing only the indices again.

    A resumed pass, and each pass with worker processes, is read through a second loader with the same
    options. Its workers return their random state with every batch. The checkpoint has the state after the
    last batch that was trained on, not after batches read ahead, and the workers of the resumed run start
    with it.

    A DataLoader draws the seed of its workers when a pass is opened, before the sampler draws. This class
    draws the seed in the same order, and keeps the state of the generator before that draw. Persistent
    workers are seeded once, when the first pass begins, and those of a resumed run get the same seed.
    """

    def __init__(self) -> None:
        # the loader through which the passes are read, kept for the next pass if its workers persist
        self._rebuilt: DataLoader[Any] | None = None
        # by worker, its random state after its last batch that was trained on
        self._states: dict[int, tuple[bytes, ...]] = {}
        # the batch that was read last, and may not be trained on yet: its index in the pass, its worker, and
        # the parts of the worker's random state that have changed
        self._pending: tuple[int, int, ChangedState] | None = None
        # the state of the loader's generator before the workers' seed was drawn from it
        self._seeded_with: torch.Tensor | None = None
        self._seeded_here = True  # whether the current pass has drawn that seed, and not an earlier pass

    def open(
        self,
        loader: DataLoader[Any],
        skip: int,
        opened_with: Mapping[str, Any],
        limit: int | None = None,
        rest: Lists = None,
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes.

        Workers are given no list of indices beyond the limit, so they read and draw nothing beyond it.

        Args:
            loader, skip, opened_with, limit: as in `Reader.open`.
            rest: the lists of indices of the batches to return, if the batches that were trained on had
                another size; None for those of the loader after the first `skip`.
        """
        self._merge_pending(skip)
        length = length_of(loader) if limit is None else limit
        if rest is None and loader.num_workers and skip and length is not None and skip >= length:
            _draw_out(loader, opened_with, limit)
            return iter(())  # all batches were trained on
        if not (loader.num_workers and loader.in_order):
            batches = self._without_states(loader, skip, opened_with, rest) if skip else iter(loader)
            return first(batches, limit, skip)
        if self._rebuilt is not None and not skip:  # its persistent workers read another pass
            self._seeded_here = False
            lists_of(self._rebuilt).limit = limit
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with, limit, rest), skip)

    def state_dict(self, loader: DataLoader[Any], batch_idx: int) -> dict[str, Any]:
        """Return the workers' random states, and the state of the generator before it drew their seed.

        Args:
            loader: the loader of the pass.
            batch_idx: the number of batches of the pass that were trained on.
        """
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
        """Restore the states of the workers; drop them with a warning if their number has changed."""
        self._rebuilt = self._pending = None
        self._states = {}
        if "num_workers" not in state:
            return
        if state["num_workers"] != loader.num_workers:
            logger.warning(
                "num_workers was %d in the checkpoint and is %d in this loader: the random numbers of the "
                "workers differ from here on",
                state["num_workers"],
                loader.num_workers,
            )
            return
        for worker, parts in state["workers"].items():
            self._states[worker] = tuple(part.numpy().tobytes() for part in parts)
        self._seeded_with, self._seeded_here = state["seeded_with"], state["seeded_here"]

    def _states_at(self, loader: DataLoader[Any], batch_idx: int) -> dict[int, tuple[bytes, ...]]:
        """Return the random states of workers after `batch_idx` batches of the pass, by worker."""
        if not (batch_idx or loader.persistent_workers):
            return {}  # the next pass starts and seeds new workers
        states = dict(self._states)
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, changed = self._pending
            states[worker] = merge(states.get(worker), changed)
        return states

    def _without_states(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any], rest: Lists
    ) -> Iterator[Any]:
        """Resume a pass without random states of workers: it has no workers, or `in_order=False`.

        The first `skip` lists of indices are drawn and dropped; see `open` for the arguments.
        """
        if loader.num_workers:
            logger.warning(
                "the loader has in_order=False: the batches that were trained on are not known exactly, so "
                "some may be trained on twice and others not at all"
            )
        state_before = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        lists = iter(lists_of(loader))
        _draw_seed(loader)
        lists = _after(lists, skip, rest)
        set_random_state(loader, state_before)
        indices = Indices(lists_of(loader), lists)
        seeds = torch.Generator(_source_of(loader).device)  # leaves the loader's generator as it is
        return iter(rebuild(loader, indices, seeds, loader.collate_fn, loader.worker_init_fn))

    def _start(
        self,
        loader: DataLoader[Any],
        skip: int,
        opened_with: Mapping[str, Any],
        limit: int | None,
        rest: Lists,
    ) -> Iterator[FromWorker]:
        """Start workers at the begin of a pass, or where a resumed pass continues; see `open`."""
        self._rebuilt = None  # ends the workers of the former loader, which have read ahead
        state_before = random_state(loader)
        if skip:
            set_random_state(loader, opened_with, opening=True)
        seeds = self._seed(loader, skip)
        if not skip and self._seeded_here:
            self._states = {}
        # the loader serves its workers in turn: those whose turn was before the checkpoint first get an empty
        # list of indices, so that the next list goes to the same worker as in an uninterrupted run
        idle = skip % loader.num_workers
        inside = InWorker(loader.collate_fn, loader.worker_init_fn, self._states, idle)
        lists = first(_after(iter(Indices(lists_of(loader), limit=limit)), skip, rest), limit, skip)
        indices = Indices(lists_of(loader), chain([[]] * idle, lists), limit)
        rebuilt = rebuild(loader, indices, seeds, inside.collate, inside.init)
        iterator = iter(rebuilt)
        for _ in range(idle):
            _drop_empty(iterator, loader.dataset)
        if skip:
            set_random_state(loader, state_before)
        self._rebuilt = rebuilt if loader.persistent_workers else None
        return iterator

    def _seed(self, loader: DataLoader[Any], skip: int) -> torch.Generator:
        """Return a generator with the state from which the workers' seed is drawn.

        The seed is also drawn from the loader's own generator, as a DataLoader does when a pass is opened,
        unless persistent workers were seeded in an earlier pass.
        """
        earlier = loader.persistent_workers and self._seeded_with is not None
        self._seeded_here = not earlier or bool(skip and self._seeded_here)
        if self._seeded_here:
            self._seeded_with = _draw_seed(loader)
        assert self._seeded_with is not None
        seeds = torch.Generator(_source_of(loader).device)
        # a copy: of a view into a file's memory torch would read the bytes at the begin of that memory
        seeds.set_state(self._seeded_with.clone())
        return seeds

    def _batches(self, iterator: Iterator[FromWorker], number: int) -> Iterator[Any]:
        """Yield the batches of workers, and keep the workers' states; the first batch has index `number`."""
        for batch, worker, changed in iterator:
            self._pending = number, worker, changed
            number += 1
            yield batch
            self._merge_pending(number)

    def _merge_pending(self, trained_on: int) -> None:
        """Store the random state that came with the last batch if that batch was trained on.

        Args:
            trained_on: the number of batches of the pass that were trained on.
        """
        if self._pending is not None and self._pending[0] < trained_on:
            _, worker, changed = self._pending
            self._states[worker] = merge(self._states.get(worker), changed)
        self._pending = None


def _draw_seed(loader: DataLoader[Any]) -> torch.Tensor:
    """Draw the seed of a pass, as a DataLoader does, and return the generator's state before the draw."""
    source = _source_of(loader)
    state = source.get_state()
    torch.empty((), dtype=torch.int64).random_(generator=source)
    return state


def _source_of(loader: DataLoader[Any]) -> torch.Generator:
    """Return the generator from which a DataLoader draws its seed, on the default device."""
    source: torch.Generator | None = loader.generator
    device = torch.get_default_device()
    if source is None and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        source = module.default_generators[module.current_device()]
    return torch.default_generator if source is None else source


def _draw_out(loader: DataLoader[Any], opened_with: Mapping[str, Any], limit: int | None) -> None:
    """Draw all lists of indices of a pass from the sampler, as a complete pass with workers has done."""
    state_before = random_state(loader)
    set_random_state(loader, opened_with, opening=True)
    for _ in islice(lists_of(loader), limit):
        pass
    set_random_state(loader, state_before)


def _after(lists: Iterator[list[Any]], skip: int, rest: Lists) -> Iterator[list[Any]]:
    """Return `rest`, or the lists of a pass after the first `skip`, for which the sampler draws its order."""
    if rest is not None:
        return iter([*rest])
    _drop(lists, skip)
    return lists


def _drop(lists: Iterator[list[Any]], skip: int) -> None:
    """Draw the first `skip` lists; warn if the sampler draws from a global generator during the pass."""
    for _ in range(min(skip, 1)):  # for the first list a sampler draws the order of the whole pass
        next(lists, None)
    opened = rng_state()
    for _ in range(skip - 1):
        next(lists, None)
    if drawn := changed_generators(opened, rng_state()):
        logger.warning(
            "the order of the samples may not be that of the interrupted run: the sampler draws from the "
            "global generator of %s during the pass; let it draw when the pass is opened, or from a "
            "generator that is an attribute of the sampler",
            " and of ".join(drawn),
        )


def _drop_empty(iterator: Iterator[Any], dataset: Any) -> None:
    """Read and drop the batch of an empty list of indices, with which a worker's turn is passed over.

    A resumed pass begins with empty lists so that each worker gets the same batches as in an uninterrupted
    run. An error is ignored if the dataset has `__getitems__`, which may refuse an empty list.
    """
    try:
        next(iterator, None)
    except Exception:
        if not hasattr(dataset, "__getitems__"):
            raise
