"""Another pass over a loader, of which the one that trains does not notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from eventloop.data.rng import random_state, saves_itself, set_random_state
from eventloop.state.rollback import same_state

logger = logging.getLogger("eventloop")

PutBack = Callable[[Any, Mapping[str, Any]], None]


@contextmanager
def apart(loader: Iterable[Any], put_back: PutBack) -> Iterator[Iterable[Any]]:
    """What to make another pass over; afterwards, also after an error, the loader's place, the global random states and
    those of the loader's own generators are what they were.

    A `DataLoader` is run as a copy with copies of its samplers, which shares the dataset. What else saves its own state
    is run itself, and begins where it is; `put_back` is then given the loader and the state it had. So it is with a
    `DataLoader` whose state its copy has changed, through a dataset that keeps its place. Where there is no state, but
    a number that has changed, a warning says so.
    """
    alone = _copy(loader) if isinstance(loader, DataLoader) else loader
    with _random_state_kept(loader), _place_kept(loader, put_back, always=alone is loader):
        yield alone


@contextmanager
def _random_state_kept(loader: Iterable[Any]) -> Iterator[None]:
    state = random_state(loader)
    try:
        yield
    finally:
        set_random_state(loader, state)


@contextmanager
def _place_kept(loader: Any, put_back: PutBack, *, always: bool) -> Iterator[None]:
    """With `always` also where the loader looks as it did: what its state tells may be of the newest pass."""
    if not saves_itself(loader):
        reads = _reads_in_order(loader)
        before = _numbers(reads)
        yield
        _tell_moved(reads, before)
        return
    state = deepcopy(loader.state_dict())
    try:
        yield
    finally:
        if always or not same_state(state, loader.state_dict()):
            put_back(loader, state)


def _reads_in_order(loader: Any) -> object:
    """What may keep a place here, and is not copied."""
    if not isinstance(loader, DataLoader):
        return loader
    return loader.dataset if isinstance(loader.dataset, IterableDataset) and not loader.num_workers else None


def _tell_moved(reads: object, before: Mapping[str, int | float]) -> None:
    now = _numbers(reads)
    if moved := [name for name in before if now.get(name) != before[name]]:
        logger.warning(
            "a pass for precise statistics has changed %s of the %s it read: if that is its place, training misses "
            "batches; give the loader state_dict and load_state_dict, or PreciseBN a data_loader of its own",
            ", ".join(moved),
            type(reads).__name__,
        )


def keeps_place(loader: Iterable[Any]) -> bool:
    """Whether a pass that `apart` gives begins where the loader is."""
    return saves_itself(loader) and not isinstance(loader, DataLoader)


def load_back(loader: Any, state: Mapping[str, Any]) -> None:
    """Give a loader its state back; a pass under way that is to go on has to be opened anew."""
    loader.load_state_dict(state)


def _copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Its persistent workers serve one pass at a time, and its samplers may keep their place or count their passes."""
    if "base_dataloader" in vars(loader):  # accelerate's, which passes for the loader that it reads
        return _copy_wrapper(loader)
    alone, copies = copy(loader), dict[int, Any]()
    own = vars(alone)  # a DataLoader refuses to have its samplers set
    own["_iterator"] = None
    if "_initial_iter_for_state_dict" in own:  # torchdata's, that it has one already
        own["_initial_iter_for_state_dict"] = False
    for name in ("sampler", "batch_sampler"):
        own[name] = _copy_sampler(own[name], copies)
    return alone


def _copy_wrapper(loader: Any) -> DataLoader[Any]:
    alone: DataLoader[Any] = object.__new__(type(loader))
    vars(alone).update(vars(loader), base_dataloader=_copy(loader.base_dataloader))
    return alone


def _copy_sampler(sampler: Any, copies: dict[int, Any]) -> Any:
    """A copy, of the samplers that are its attributes too, each once; they share their data and generators."""
    if not hasattr(sampler, "__dict__") or hasattr(sampler, "__next__"):
        return sampler
    if id(sampler) not in copies:
        twin = copies[id(sampler)] = copy(sampler)
        for name, value in vars(sampler).items():
            if isinstance(value, Sampler) or id(value) in copies:
                vars(twin)[name] = _copy_sampler(value, copies)
    return copies[id(sampler)]


def _numbers(owner: object) -> dict[str, int | float]:
    attributes = vars(owner) if hasattr(owner, "__dict__") else {}
    return {name: value for name, value in attributes.items() if type(value) in (int, float)}
