"""Resume a pass over a map-style DataLoader by drawing only its lists of indices again.

`readers` chooses it for a plain `DataLoader`. No sample that was trained on is read again, except where the
log says so.
"""

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
from eventloop.data.rng import changed_generators, random_state, rng_state, set_random_state
from eventloop.data.worker_random_state import ChangedState, FromWorker, InWorker, merge
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


class IndexReader:
    """The reader of a map-style DataLoader, which resumes a pass by drawing only the indices again.

    A resumed pass, and each pass with workers, is read through a second loader with the same options. Its
    workers return their random state with every batch. The checkpoint has the state after the last batch that
    was trained on, not that of batches read ahead, and the workers of the resumed run start with it.

    Persistent workers are seeded once, when the first pass begins. The checkpoint also has the random state
    from which that seed is drawn, so that a resumed run draws the same seed, and its samplers draw nothing
    twice.
    """

    def __init__(self) -> None:
        self._rebuilt: DataLoader[Any] | None = None  # kept if its workers persist
        self._states: dict[int, tuple[bytes, ...]] = {}
        self._pending: tuple[int, int, ChangedState] | None = None  # number of a batch, its worker, its state
        self._seeded_with: torch.Tensor | None = None
        self._seeded_here = True  # True if the current pass seeded the workers, False if an earlier one did

    def open(self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        if not loader.num_workers:
            return self._without_workers(loader, skip, opened_with) if skip else iter(loader)
        if not loader.in_order:
            return self._out_of_order(loader, skip, opened_with) if skip else iter(loader)
        self._settle(skip)
        length = length_of(loader)
        if skip and length is not None and skip >= length:
            if has_states(loader):
                _draw_out(loader, opened_with)
            return iter(())  # all batches were trained on
        if self._rebuilt is not None and not skip:
            self._seeded_here = False
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def state_dict(self, loader: DataLoader[Any], batch_idx: int) -> dict[str, Any]:
        """Return the random states of the workers, and the seeding state of persistent workers."""
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
        """Return the states that workers resume with, after `batch_idx` batches of the pass."""
        if not (batch_idx or loader.persistent_workers):
            return {}  # the next pass starts and seeds new workers
        states = dict(self._states)
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, changed = self._pending
            states[worker] = merge(states.get(worker), changed)
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
        """Read the skipped samples again, because sampler and samples draw from one generator in turn."""
        now = rng_state()
        reader = PlainReader(
            f"the sampler draws from {_named(shared)} during the pass, and something else draws from it too"
        )
        iterator = reader.open(loader, skip, opened_with)
        if reader.left is not None:
            _warn_inexact([name for name in changed_generators(reader.left, now) if name in shared])
        return iterator

    def _out_of_order(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[Any]:
        logger.warning(
            "the loader has in_order=False: the batches that were trained on are not known exactly, so some "
            "may be trained on twice and others not at all"
        )
        return self._without_workers(loader, skip, opened_with)

    def _start(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[FromWorker]:
        """Start workers at the beginning of a pass, or at the batch where a resumed pass goes on."""
        self._rebuilt = None  # ends its workers, which have read ahead of this pass
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
            _warn_inexact(_shared(indices, now))
            set_random_state(loader, now)
        self._rebuilt = rebuilt if loader.persistent_workers else None
        return iterator

    def _seed(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any], now: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Restore the random state from which the workers are seeded.

        If an earlier pass seeded them, return a function that restores the state with which the samplers
        begin.
        """
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
        for batch, worker, changed in iterator:
            self._pending = number, worker, changed
            number += 1
            yield batch
            self._settle(number)

    def _settle(self, batch_idx: int) -> None:
        """Keep the pending state of a worker if its batch is among the first `batch_idx` of the pass."""
        if self._pending is not None and self._pending[0] < batch_idx:
            _, worker, changed = self._pending
            self._states[worker] = merge(self._states.get(worker), changed)
        self._pending = None


def _shared(indices: Indices, now: Mapping[str, Any]) -> list[str]:
    """Return the names of the global generators that the sampler shares with other code during the pass.

    Lists of indices after the first were drawn from them, and drawing the lists alone does not lead to their
    state now.
    """
    if indices.after_first is None:
        return []
    drawn = rng_state()
    elsewhere = changed_generators(drawn, now["rng"])
    return [name for name in changed_generators(indices.after_first, drawn) if name in elsewhere]


def _named(generators: list[str]) -> str:
    return f"the global generator of {' and of '.join(generators)}"


def _warn_inexact(shared: list[str]) -> None:
    if shared:
        logger.warning(
            "the order of the samples is not that of the interrupted run: the sampler draws from %s during "
            "the pass, and so does the training; let it draw when the pass is opened, or from a generator "
            "of its own",
            _named(shared),
        )


def _draw_out(loader: DataLoader[Any], opened_with: Mapping[str, Any]) -> None:
    """Draw all lists of a pass, so that samplers with a state of their own are at its end."""
    now = random_state(loader)
    set_random_state(loader, opened_with, opening=True)
    for _ in lists_of(loader):
        pass
    set_random_state(loader, now)


def _drop_next(iterator: Iterator[Any], dataset: Any) -> None:
    """Take the empty batch that stands for one that was read before the checkpoint."""
    try:
        next(iterator, None)
    except Exception:
        if not hasattr(dataset, "__getitems__"):  # `__getitems__` may refuse an empty list
            raise
