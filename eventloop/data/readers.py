"""Choose how a pass over a loader is opened, and how a pass that was cut short is resumed.

`LoaderPosition` uses it. There are three ways:

- For a `DataLoader` over a map-style dataset only the lists of indices are drawn again; no sample is read
  twice.
- A loader with `state_dict` and `load_state_dict` resumes by itself.
- For any other iterable the batches that were trained on are read again and dropped. This is also done if
  `state_dict` raises, as that of accelerate's loaders does. Those read one batch ahead: random numbers that a
  data set without workers draws from a global generator for that batch are drawn again.

The order is exactly that of the uninterrupted run if it is decided by

- `set_epoch`, or draws from the global generators of Python, NumPy and torch when the pass is opened, up to
  its first list of indices, as with `shuffle=True` and torch's samplers;
- a generator of Python, NumPy or torch that is an attribute of the loader, of a sampler, of the dataset, or
  of their parts, such as transforms and other datasets, also in a short list, tuple or dict. Its state is in
  the checkpoint;
- a sampler with `state_dict` and `load_state_dict`. The checkpoint has its state when the pass was opened,
  which must decide the next pass, or its position in this one; the position is then found by drawing;
- a global generator that is drawn from during the pass, if no other code draws from it meanwhile. If reading
  the samples draws from it too, they are read again, which is exact without workers. If the training draws
  from it too (dropout draws from torch's), the order is not exact, and a warning is logged.

State that a sampler keeps elsewhere (in a closure, in a module, in a list of more than 32 items, more than
four objects deep) is not found. A warning is logged if a number among its attributes differs from the
checkpoint's. A warning is also logged if a stream, or a combination of loaders, draws from a global generator
during the pass and the training does too. Of the state that a dataset has in its worker processes only the
global generators are restored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from eventloop.data.index_reader import IndexReader
from eventloop.data.loader_info import is_stream, persists, why_not_by_index
from eventloop.data.plain_reader import PlainReader
from eventloop.data.plain_values import plain
from eventloop.data.rng import (
    rng_state,
    samplers_of,
    samplers_state,
    saves_itself,
    set_rng_state,
    state_dict_error,
)
from eventloop.data.stream_reader import StreamReader
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


class Reader(Protocol):
    """The interface of an object that opens the passes over one loader."""

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`.

        If batches are skipped, the random state of this process is the same after the call as before it.

        Args:
            opened_with: the random state with which the pass was first opened.
        """

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the state that `open` needs besides its arguments, after `batch_idx` batches of the pass."""

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore a state for the pass that is opened next."""


def reader_of(loader: Iterable[Any]) -> Reader:
    """Return the most exact reader for a loader."""
    if saves_itself(loader):
        return StatefulReader()
    if hasattr(loader, "load_state_dict") and (error := state_dict_error(loader)):
        logger.info(
            "the position in the %s is found by counting its batches, as its state_dict raised %s",
            type(loader).__name__,
            error,
        )
    if persists(loader) and is_stream(loader):
        return StreamReader()
    return PlainReader(why) if (why := why_not_by_index(loader)) else IndexReader()


class StatefulReader:
    """The reader of a loader that saves its own position, like torchdata's StatefulDataLoader.

    A resumed run is as exact as the loader is. torchdata 0.11 resumes at the right sample with
    `shuffle=True`, also with workers. It does not save the random state of its workers, nor that of a
    generator that another sampler draws from; a warning is logged for the latter. With its
    StatefulDistributedSampler in it, it resumes within a pass, but after a checkpoint at the end of a pass it
    has no batches, which ends the run with an error. In a plain DataLoader that sampler is exact everywhere.
    """

    def __init__(self) -> None:
        self._began = False
        self._loaded = False
        self._put_back: Any = None  # a state from which the loader has to go on

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        began, loaded = self._began, self._loaded
        self._began, self._loaded = True, False
        if skip and not (began or loaded):
            why = f"the checkpoint has no state of the {type(loader).__name__}"
            return self._batches(loader, PlainReader(why).open(loader, skip, opened_with), skip)
        if skip and not loaded:
            loader.load_state_dict(self._state_of(loader))  # the pass a stop cut short
        self._put_back = None
        if loaded and (forgets := _generators_it_forgets(loader)):
            logger.warning(
                "the order of the samples may not be that of the interrupted run: the state of the %s does "
                "not contain the generator of %s; use shuffle=True or set_epoch for an exact resume",
                type(loader).__name__,
                ", ".join(forgets),
            )
        now = rng_state()
        iterator: Iterator[Any] = iter(loader)
        if skip:
            set_rng_state(now)
        return self._batches(loader, iterator, skip)

    def put_back(self, state: Any) -> Any:
        """Note the state that a loader had before a separate pass; the current pass is reopened from it.

        Returns:
            The state to restore: after several separate passes the one before the first.
        """
        if self._put_back is None:
            self._put_back = state
        return self._put_back

    def _batches(self, loader: Any, iterator: Iterator[Any], done: int) -> Iterator[Any]:
        length = length_of(loader)
        while True:
            for batch in iterator:
                yield batch
                done += 1
                if self._put_back is not None:
                    break
            else:
                return
            iterator = iter(())  # ends the old one first, which may move the loader once more
            now = rng_state()
            state, self._put_back = self._put_back, None
            loader.load_state_dict(state)
            iterator = iter(loader)
            if length is not None and done >= length:
                if (
                    next(iterator, None) is not None
                ):  # from the state of its end the loader began its next pass
                    loader.load_state_dict(state)
                iterator = iter(())
            set_rng_state(now)

    def _state_of(self, loader: Any) -> Any:
        return loader.state_dict() if self._put_back is None else self._put_back

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the loader's own state.

        Raises:
            TypeError: the state has a value that could be saved, but not loaded with `weights_only=True`.
        """
        return {
            "stateful": plain(self._state_of(loader), f"train loader ({type(loader).__name__}.state_dict())")
        }

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore the loader's own state, if the checkpoint has one."""
        if "stateful" in state:
            loader.load_state_dict(state["stateful"])
            self._loaded, self._put_back = True, None


def _generators_it_forgets(loader: Any) -> list[str]:
    """Return the names of the samplers whose generators are not in the state of torchdata's loader."""
    if not isinstance(loader, DataLoader):
        return []
    owners = [each for each in samplers_of(loader) if not type(each).__module__.startswith("torchdata.")]
    owners = [each for each in owners if isinstance(getattr(each, "generator", None), torch.Generator)]
    return [*dict.fromkeys(type(each).__name__ for each in owners), *samplers_state(loader)["generators"]]
