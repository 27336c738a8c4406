"""Make a separate pass over the train loader without disturbing the pass that trains.

`update_bn_stats` of `eventloop.model.batchnorm_statistics` uses it, for `PreciseBN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from eventloop.data.loader_state import random_state, saves_itself, set_random_state, stateful_parts


@contextmanager
def apart(loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Make a context for a separate pass over a loader; it yields the iterable to read.

    For a `DataLoader` the iterable is a copy, which shares dataset and samplers; for any other loader it is
    the loader itself. When the context ends, the states of the global random generators and of the loader's
    own generators are restored.
    """
    state = random_state(loader)
    try:
        yield _copy(loader) if isinstance(loader, DataLoader) else loader
    finally:
        set_random_state(loader, state)


def position_of(loader: Any) -> object | None:
    """Return a part of a loader whose position a separate pass would move, or None if no part has one.

    Training would then miss the batches of the separate pass. Such parts have `state_dict` and
    `load_state_dict`: a loader that is no `DataLoader`, a sampler, or an IterableDataset that is read in
    this process.
    """
    alone: list[object] = [] if isinstance(loader, DataLoader) or not saves_itself(loader) else [loader]
    return next(iter([*alone, *stateful_parts(loader).values()]), None)


def _copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Copy a DataLoader, because persistent workers serve one pass at a time."""
    alone: DataLoader[Any] = object.__new__(type(loader))
    own = vars(alone)  # a DataLoader refuses to have its attributes set
    own.update(vars(loader))
    if "base_dataloader" in own:  # accelerate's, which reads this loader and looks like it
        own["base_dataloader"] = _copy(own["base_dataloader"])
        return alone
    own["_iterator"] = None
    if "_initial_iter_for_state_dict" in own:  # torchdata's flag that it has an iterator already
        own["_initial_iter_for_state_dict"] = False
    return alone
