"""How a pass over a loader is opened, and how one that was cut short is gone on with.

Of a `DataLoader` over a map-style dataset only the lists of indices are drawn again, and no sample is read twice.
A loader with `state_dict` and `load_state_dict` is asked to go on by itself. Of anything else the batches that were
trained on are read again and dropped; so it is where `state_dict` raises, as that of accelerate's loaders does. These
read one batch ahead: what a data set without workers draws for that one from a global generator is drawn anew.

The order is exactly that of the uninterrupted run where it is decided by

- `set_epoch`, or what the global generators of Python, NumPy and torch give when the pass is opened, up to its first list
  of indices: what `shuffle=True` and torch's samplers do;
- a generator of Python, NumPy or torch that is an attribute of the loader, of one of its samplers or of its dataset, or
  of what these are made of, as transforms and other datasets are, also in a short list, tuple or dict: its state is in
  the checkpoint;
- a sampler with `state_dict` and `load_state_dict`, whose state as of the opening of the pass is in the checkpoint; it is
  all that decides the next pass, or its place in this one, which is then found by drawing;
- a global generator that is drawn from as the pass goes, if nobody else draws from it meanwhile. If the reading of
  the samples does too, they are read again, which is as exact without workers; if the training does (dropout draws from
  torch's), nothing is, and one line of the log says so.

What a sampler keeps elsewhere (in a closure, in a module, in a list of more than 32, further down than in four objects) is
not found. Where a number among its attributes tells that it is another than it was, one line of the log says so; another
one where a stream, or loaders that are combined, draw from a global generator as the pass goes and the training does too. What a dataset counts
or draws from in its workers is theirs: only the global generators there are put back.
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
    error_of_state,
    rng_state,
    samplers_of,
    samplers_state,
    saves_itself,
    set_rng_state,
)
from eventloop.data.stream_reader import StreamReader
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


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
    if hasattr(loader, "load_state_dict") and (error := error_of_state(loader)):
        logger.info(
            "the place in the %s is kept by counting its batches, as its state_dict raised %s",
            type(loader).__name__,
            error,
        )
    if persists(loader) and is_stream(loader):
        return StreamReader()
    return PlainReader(why) if (why := why_not_by_index(loader)) else IndexReader()


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
        self._put_back: Any = None  # a state, until the loader has gone on from there

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
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
                "the order of the samples may not be that of the run that was interrupted: the state of the %s has "
                "nothing of the generator of %s; shuffle=True or set_epoch would be exact",
                type(loader).__name__,
                ", ".join(forgets),
            )
        now = rng_state()
        iterator: Iterator[Any] = iter(loader)
        if skip:
            set_rng_state(now)
        return self._batches(loader, iterator, skip)

    def put_back(self, state: Any) -> Any:
        """The loader was used for another pass, and had this state before: the pass under way is opened there anew.
        Returned is the state it is to have: after several passes that of before the first."""
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
                if next(iterator, None) is not None:  # with the state of its end it begins its next pass
                    loader.load_state_dict(state)
                iterator = iter(())
            set_rng_state(now)

    def _state_of(self, loader: Any) -> Any:
        return loader.state_dict() if self._put_back is None else self._put_back

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """The loader's own.

        Raises:
            TypeError: there is something in it that could be saved, and not be loaded with `weights_only=True`.
        """
        return {
            "stateful": plain(self._state_of(loader), f"train loader ({type(loader).__name__}.state_dict())")
        }

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Give the loader its own, if there is one."""
        if "stateful" in state:
            loader.load_state_dict(state["stateful"])
            self._loaded, self._put_back = True, None


def _generators_it_forgets(loader: Any) -> list[str]:
    """The samplers that draw from a generator that torchdata's loader, which draws it again, does not put back."""
    if not isinstance(loader, DataLoader):
        return []
    owners = [each for each in samplers_of(loader) if not type(each).__module__.startswith("torchdata.")]
    owners = [each for each in owners if isinstance(getattr(each, "generator", None), torch.Generator)]
    return [*dict.fromkeys(type(each).__name__ for each in owners), *samplers_state(loader)["generators"]]
