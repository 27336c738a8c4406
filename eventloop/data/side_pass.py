"""Make a separate pass over a loader that leaves the training's pass and random numbers unchanged.

Evaluations and predictions use it. So does `update_bn_stats` of `eventloop.model.batchnorm_statistics`, for
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
    the loader itself. The global random generators are restored, and generators that are attributes of the
    loader and its parts.
    """
    undo.step(set_random_state, loader, random_state(loader))
    return _copy(loader) if isinstance(loader, DataLoader) else loader


def open_aside(trained_on: Iterable[Any] | None, loader: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over a loader without advancing the random generators of the training.

    A loader with persistent workers draws their seed in the first pass of a process. A resumed run makes this
    pass at another time than an uninterrupted one, and the training must draw the same numbers in both.

    Args:
        trained_on: the loader of the training, whose generators are restored with the global ones.
        loader: the loader of the separate pass.
    """
    if not persists(loader):
        return iter(loader)
    state_of_training = random_state(trained_on)
    iterator = iter(loader)
    set_random_state(trained_on, state_of_training)
    return iterator


def position_of(loader: Any) -> object | None:
    """Return a part of a loader whose position a separate pass would advance; None without such a part.

    The training would then miss the batches of the separate pass. Such a part has `state_dict` and
    `load_state_dict`: it is a loader that is not a `DataLoader`, a sampler, or an IterableDataset that is
    read in this process.
    """
    itself: list[object] = [] if isinstance(loader, DataLoader) or not saves_itself(loader) else [loader]
    return next(iter([*itself, *stateful_parts(loader).values()]), None)


def _copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a shallow copy of a DataLoader that starts workers of its own.

    With `persistent_workers=True` the workers of the original serve its pass, and cannot serve another one at
    the same time.
    """
    copied: DataLoader[Any] = object.__new__(type(loader))
    attributes = vars(copied)  # written directly, because a DataLoader refuses to have some attributes set
    attributes.update(vars(loader))
    if "base_dataloader" in attributes:  # a loader of Accelerate, which reads this inner DataLoader
        attributes["base_dataloader"] = _copy(attributes["base_dataloader"])
        return copied
    attributes["_iterator"] = None  # the original's iterator has its persistent workers
    if "_initial_iter_for_state_dict" in attributes:  # of torchdata: whether its `state_dict` has made one
        attributes["_initial_iter_for_state_dict"] = False
    return copied
