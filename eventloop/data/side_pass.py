"""Make a separate pass over the train loader without disturbing the pass that trains.

`update_bn_stats` of `eventloop.model.batchnorm_statistics` uses it, for `PreciseBN`.
"""

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
    """Make a context for a separate pass over a loader, which yields the iterable to read.

    Afterwards, also after an error, the loader's position, the global random states and those of the loader's
    own generators are restored.

    For a `DataLoader` the iterable is a copy with copies of its samplers, which shares the dataset. Any other
    loader is returned itself. If it saves its own state, the separate pass begins at its position, and
    afterwards `put_back` is called with the loader and its former state. `put_back` is also called for a
    `DataLoader` whose state has changed through a dataset that keeps its position. A warning is logged if
    there is no state, but a number has changed among the attributes of what was read.
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
    """Call `put_back` after the block if the loader's state has changed, or `always`.

    An unchanged state is not enough for a loader that was read itself: the state may describe its newest
    pass.
    """
    if not saves_itself(loader):
        reads = _reads_in_order(loader)
        before = _numbers(reads)
        yield
        _warn_moved(reads, before)
        return
    state = deepcopy(loader.state_dict())
    try:
        yield
    finally:
        if always or not same_state(state, loader.state_dict()):
            put_back(loader, state)


def _reads_in_order(loader: Any) -> object:
    """Return the object that may keep its position in this process and is not copied, or None."""
    if not isinstance(loader, DataLoader):
        return loader
    return loader.dataset if isinstance(loader.dataset, IterableDataset) and not loader.num_workers else None


def _warn_moved(reads: object, before: Mapping[str, int | float]) -> None:
    now = _numbers(reads)
    if moved := [name for name in before if now.get(name) != before[name]]:
        logger.warning(
            "a pass for precise statistics has changed %s of the %s it read: if that is its position, "
            "training misses batches; give the loader state_dict and load_state_dict, or give PreciseBN a "
            "data_loader of its own",
            ", ".join(moved),
            type(reads).__name__,
        )


def keeps_place(loader: Iterable[Any]) -> bool:
    """Return whether a separate pass from `apart` begins at the loader's position, not at its beginning."""
    return saves_itself(loader) and not isinstance(loader, DataLoader)


def load_back(loader: Any, state: Mapping[str, Any]) -> None:
    """Restore the state of a loader; a running pass does not go on from it, and has to be opened again."""
    loader.load_state_dict(state)


def _copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Copy a DataLoader and its samplers.

    Persistent workers serve one pass at a time, and samplers may keep their position or count their passes.
    """
    if "base_dataloader" in vars(loader):  # accelerate's, which reads this loader and looks like it
        return _copy_wrapper(loader)
    alone, copies = copy(loader), dict[int, Any]()
    own = vars(alone)  # a DataLoader refuses to have its samplers set
    own["_iterator"] = None
    if "_initial_iter_for_state_dict" in own:  # torchdata's flag that it has an iterator already
        own["_initial_iter_for_state_dict"] = False
    for name in ("sampler", "batch_sampler"):
        own[name] = _copy_sampler(own[name], copies)
    return alone


def _copy_wrapper(loader: Any) -> DataLoader[Any]:
    alone: DataLoader[Any] = object.__new__(type(loader))
    vars(alone).update(vars(loader), base_dataloader=_copy(loader.base_dataloader))
    return alone


def _copy_sampler(sampler: Any, copies: dict[int, Any]) -> Any:
    """Copy a sampler and the samplers among its attributes, each once; copies share data and generators."""
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
