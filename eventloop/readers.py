"""How a pass over a loader is opened, and how one that was cut short is gone on with.

Of a `DataLoader` over a map-style dataset only the lists of indices are drawn again, and no sample is read twice.
A loader with `state_dict` and `load_state_dict` is asked to go on by itself. Of anything else the batches that were
trained on are read again and dropped.

The order is exactly that of the uninterrupted run where it is decided by

- `set_epoch`, or what the global generators of Python, NumPy and torch give when the pass is opened, up to its first list
  of indices: what `shuffle=True` and torch's samplers do;
- a generator of Python, NumPy or torch that is an attribute of the loader, of one of its samplers or of its dataset: its
  state is in the checkpoint;
- a sampler with `state_dict` and `load_state_dict`, whose state as of the opening of the pass is in the checkpoint; it is
  all that decides the next pass, or its place in this one, which is then found by drawing;
- a global generator that is drawn from as the pass goes, if nobody else draws from it meanwhile. If the reading of
  the samples does too, they are read again, which is as exact without workers; if the training does (dropout draws from
  torch's), nothing is, and one line of the log says so.

What a sampler keeps elsewhere (in a list of generators, in a closure, in an object of its own) is not found. Where a
number among its attributes tells that it is another than it was, one line of the log says so. What a dataset counts
or draws from in its workers is theirs: only the global generators there are put back.
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
from eventloop.rebuild import Indices, rebuild, rebuild_stream
from eventloop.rng import (
    generators_of,
    moved,
    random_state,
    rng_state,
    samplers_of,
    samplers_state,
    saves_itself,
    set_random_state,
    set_rng_state,
)
from eventloop.worker_rng import FromWorker, InWorker, Told, merge

logger = logging.getLogger("eventloop")

_AGAIN = "the first %d batches of the pass, which were trained on, are read again and dropped: %s"


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
    if saves_itself(loader):
        return StatefulReader()
    if _persists(loader) and _is_stream(loader):
        return StreamReader()
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
        self._opened = 0  # passes
        self._seeded_earlier = False  # workers that persist, in a run that is gone on with
        self.left: dict[str, Any] | None = None
        """The global random state that reading again has left."""

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        iterator: Iterator[Any]
        if self._seeded_earlier and _persists(loader):
            logger.warning(
                "the loader's workers persist since an earlier pass, and this one is not rebuilt (%s): what they draw at "
                "random differs from here on; persistent_workers=False would be exact",
                self._why,
            )
        self._opened, self._seeded_earlier = self._opened + (not skip or not self._opened), False
        if not skip:
            iterator = iter(loader)
            return iterator
        if isinstance(loader, list | tuple):
            return islice(loader, skip, None)
        length = length_of(loader)
        if length is not None and skip >= length and not (generators_of(loader) or _has_states(loader)):
            return iter(())  # nothing is left, and no sampler has anything to draw at the end
        logger.warning(_AGAIN, skip, self._why)
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        self.left = rng_state()
        set_random_state(loader, now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Whether workers that persist were seeded by another pass than the one that is gone on with."""
        return {"seeded_earlier": self._opened > bool(batch_idx)}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Take that."""
        self._seeded_earlier = bool(state.get("seeded_earlier"))
        self._opened = 2 if self._seeded_earlier else 0


class StatefulReader:
    """A loader that saves its own place, like torchdata's StatefulDataLoader.

    A resumed run is as exact as the loader is. torchdata's 0.11 finds every sample again with `shuffle=True`, with workers
    too. It saves no random state of its workers, and none of a generator that another sampler draws from, of which
    the log says so. Its StatefulDistributedSampler in it goes on within a pass; after a checkpoint of a pass's end it
    has nothing to give, which ends the run with an error. In a DataLoader that sampler is exact everywhere.
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
        if loaded and (forgets := _generators_it_forgets(loader)):
            logger.warning(
                "the order of the samples may not be that of the run that was interrupted: the state of the %s has "
                "nothing of the generator of %s; shuffle=True or set_epoch would be exact",
                type(loader).__name__,
                ", ".join(forgets),
            )
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
            if _has_states(loader):
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
        indices = Indices(_lists_of(loader), skip)
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
        indices = Indices(_lists_of(loader), skip, idle, begin)
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


class StreamReader(IndexReader):
    """A DataLoader over an IterableDataset whose workers persist.

    What was trained on is read again and dropped, by workers that begin with the seed they were given in the first
    pass, and with the random state they had when this one was opened: the one they told with their last batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[int, tuple[bytes, ...]] = {}  # the workers' states when the pass was opened

    def open(self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        self._settle(skip)
        if self._rebuilt is not None and not skip:
            self._seeded_here, self._began = False, dict(self._states)
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def load_state_dict(self, loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
        """See `IndexReader`."""
        super().load_state_dict(loader, state)
        self._began = dict(self._states)

    def _states_at(self, loader: DataLoader[Any], batch_idx: int) -> dict[int, tuple[bytes, ...]]:
        return self._began if batch_idx else super()._states_at(loader, 0)

    def _start(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[FromWorker]:
        self._rebuilt = None
        if skip:
            logger.warning(
                _AGAIN, skip, "the loader's dataset is an IterableDataset, whose samples have no indices"
            )
        else:
            self._began = dict(self._states) if self._seeded_with is not None else {}
        now = random_state(loader)
        begin = self._seed(loader, skip, opened_with, now)
        inside = InWorker(loader.collate_fn, loader.worker_init_fn, self._began, 0)
        self._rebuilt = rebuild_stream(loader, inside.collate, inside.init)
        self._states = dict(self._began)
        iterator: Iterator[FromWorker] = iter(self._rebuilt)
        for _, worker, told in islice(iterator, skip):
            self._states[worker] = merge(self._states.get(worker), told)
        if skip or begin is not None:
            set_random_state(loader, now)
        return iterator


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


def _has_states(loader: Any) -> bool:
    return bool(samplers_state(loader)["states"])


def _generators_it_forgets(loader: Any) -> list[str]:
    """The samplers that draw from a generator that torchdata's loader, which draws it again, does not put back."""
    if not isinstance(loader, DataLoader):
        return []
    owners = [each for each in samplers_of(loader) if not type(each).__module__.startswith("torchdata.")]
    owners = [each for each in owners if isinstance(getattr(each, "generator", None), torch.Generator)]
    return [*dict.fromkeys(type(each).__name__ for each in owners), *samplers_state(loader)["generators"]]


def _draw_out(loader: DataLoader[Any], opened_with: Mapping[str, Any]) -> None:
    """Bring samplers that save their state to the end of a pass."""
    now = random_state(loader)
    set_random_state(loader, opened_with, opening=True)
    for _ in _lists_of(loader):
        pass
    set_random_state(loader, now)


def _persists(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def _is_stream(loader: Any) -> bool:
    """Whether the states that workers tell with their batches are all there is to know of them."""
    plain_loader = type(loader) is DataLoader and loader.in_order and not loader.drop_last
    datapipe = getattr(data, "IterDataPipe", ())  # its workers are seeded anew with each pass
    return (
        plain_loader
        and isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.dataset, datapipe)
    )


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
