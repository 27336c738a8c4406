"""Choose how a pass over a loader is opened, and how an interrupted pass is resumed.

`LoaderPosition` uses it. There are three ways:

- For a `DataLoader` over a map-style dataset only the lists of indices are drawn again; no sample is read
  twice.
- A loader with `state_dict` and `load_state_dict` resumes by itself, as exactly as it can.
- For any other iterable the batches that were already trained on are read again and dropped. This is also
  done if `state_dict` raises an error, as that of accelerate's loaders does. Accelerate's loaders read one
  batch ahead: random numbers that a data set without workers draws from a global generator for that batch
  are drawn again.

The order is exactly that of the uninterrupted run if it is decided by

- `set_epoch`, or draws from the global generators of Python, NumPy and torch when the pass is opened, up to
  its first list of indices, as with `shuffle=True` and torch's samplers;
- a generator of Python, NumPy or torch that is an attribute of the loader, of its sampler or batch sampler,
  or of its dataset. Its state is in the checkpoint;
- a sampler with `state_dict` and `load_state_dict`. The checkpoint has its state at the opening of the pass.
  This state must determine the next pass, or be a position in this one, which is then found by drawing.

With a limit of batches the second kind of sampler, with a position in its state, is not exact. State in other
places is not found, such as generators of transforms or a count of passes in an attribute. Use
torchdata's StatefulDataLoader for it. From the state of a dataset in worker processes, only the global
generators are restored, and only for a map-style dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from eventloop.data.index_reader import IndexReader
from eventloop.data.limits import first
from eventloop.data.loader_info import persists, why_not_by_index
from eventloop.data.loader_state import (
    own_random_state,
    random_state,
    saves_itself,
    set_random_state,
    state_dict_error,
)
from eventloop.data.plain_values import plain
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


class Reader(Protocol):
    """The interface of an object that opens the passes over one loader."""

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Begin a pass over the loader, and return its batches without the first `skip`.

        If batches are skipped, the random state of this process is the same after the call as before it.

        Args:
            loader: the loader.
            skip: the number of batches that were already trained on.
            opened_with: the random state with which the pass was first opened.
            limit: the number of batches, those skipped included, after which the pass is cut short; None if
                the loader ends it.
        """

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the state that `open` needs besides its arguments, after `batch_idx` batches of the pass."""

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore a saved state for the next `open`."""


def reader_of(loader: Iterable[Any]) -> Reader:
    """Return the reader that can read a loader and resumes a pass most exactly."""
    if saves_itself(loader):
        return StatefulReader()
    if hasattr(loader, "load_state_dict") and (error := state_dict_error(loader)):
        logger.info(
            "the position in the %s is found by counting its batches, as its state_dict raised %s",
            type(loader).__name__,
            error,
        )
    return PlainReader(why) if (why := why_not_by_index(loader)) else IndexReader()


class PlainReader:
    """The reader of any iterable: it reads the batches that were already trained on again, and drops them.

    A list or tuple is sliced instead.

    Args:
        why: the reason why no other reader fits, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        iterator: Iterator[Any]
        length = length_of(loader) if limit is None else limit
        if not skip:
            return first(iter(loader), limit)
        if isinstance(loader, list | tuple):
            return islice(loader, skip, limit)
        if length is not None and skip >= length and not any(own_random_state(loader).values()):
            return iter(())  # no batch is left, and no sampler draws at the end
        logger.warning(
            "the first %d batches of the pass, which were trained on, are read again and dropped: %s",
            skip,
            self._why,
        )
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        set_random_state(loader, now)
        return first(iterator, limit, skip)

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return an empty state, because the number of batches is enough."""
        return {}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Warn if the loader has persistent workers, whose random states no checkpoint holds."""
        if persists(loader):
            logger.warning(
                "the loader's persistent workers start with other random numbers than those of the "
                "interrupted run, because %s: use persistent_workers=False for an exact resume",
                self._why,
            )


class StatefulReader:
    """The reader of a loader that saves its own position, such as torchdata's StatefulDataLoader.

    A resumed run is as exact as the loader is. torchdata 0.11 resumes at the right sample with
    `shuffle=True`, also with workers. It saves neither the random state of its workers, nor that of a
    generator from which a user's sampler draws. With torchdata's StatefulDistributedSampler, it resumes
    within a pass, but after a checkpoint at the end of a pass it has no batches, which ends the run with an
    error. In a plain DataLoader that sampler is exact everywhere.

    At the end of a pass that a limit cuts short, the loader's state is one within the pass. A resumed run
    opens that pass, leaves it, and opens the next one.
    """

    def __init__(self) -> None:
        self._began = self._loaded = False
        self._cut = False  # whether a limit cuts the passes short
        self._leaves = False  # whether the loaded state is of the end of a pass that was cut short

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        began, loaded, self._cut = self._began, self._loaded, limit is not None
        self._began, self._loaded = True, False
        if skip and not (began or loaded):
            why = f"the checkpoint has no state of the {type(loader).__name__}"
            return PlainReader(why).open(loader, skip, opened_with, limit)
        if skip and not loaded:
            loader.load_state_dict(loader.state_dict())  # continues the pass that a stop interrupted
        now = rng_state()
        if loaded and self._leaves and not skip:
            iter(loader)
            set_rng_state(now)
        iterator: Iterator[Any] = iter(loader)
        if skip:
            set_rng_state(now)
        return first(iterator, limit, skip)

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the loader's own state.

        Raises:
            TypeError: the state contains values that could not be loaded with `weights_only=True`.
        """
        name = type(loader).__name__
        state = plain(loader.state_dict(), f"train loader ({name}.state_dict())")
        return {"stateful": state, "cut": self._cut and not batch_idx}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore the loader's own state, if the checkpoint has one."""
        if "stateful" in state:
            loader.load_state_dict(state["stateful"])
            self._loaded, self._leaves = True, state.get("cut", False)
