"""Make a separate pass over a loader without disturbing the pass that trains.

Evaluations and predictions use it, and `update_bn_stats` of `eventloop.model.batchnorm_statistics`, for
`PreciseBN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from eventloop.data.loader_info import persists
from eventloop.data.loader_state import random_state, saves_itself, set_random_state, stateful_parts
from eventloop.state.undo import Undo


def apart(undo: Undo, loader: Iterable[Any]) -> Iterable[Any]:
    """Return an iterable for a separate pass over a loader, and let `undo` restore random states after it.

    For a `DataLoader` the iterable is a copy, which shares dataset and samplers; for any other loader it is
    the loader itself. The states are those of the global random generators and of the loader's own ones.
    """
    undo.step(set_random_state, loader, random_state(loader))
    return _copy(loader) if isinstance(loader, DataLoader) else loader


def open_aside(trained_on: Iterable[Any] | None, loader: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over a loader, and restore the random state of the training.

    Persistent workers draw their seed in the first pass of a process. In a resumed run that is another pass
    than in an uninterrupted one, and the training must get the same random numbers.
    """
    if not persists(loader):
        return iter(loader)
    trains_with = random_state(trained_on)
    iterator = iter(loader)
    set_random_state(trained_on, trains_with)
    return iterator


def position_of(loader: Any) -> object | None:
    """Return a part of a loader whose position a separate pass would move, or None without such a part.

    Training would then miss the batches of the separate pass. Such a part has `state_dict` and
    `load_state_dict`: a loader that is not a `DataLoader`, a sampler, or an IterableDataset that is read in
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
