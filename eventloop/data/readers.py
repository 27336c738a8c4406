"""Choose how a pass over a loader is opened, and how an interrupted pass is resumed.

`LoaderPosition` uses it. There are three ways:

- For a `DataLoader` over a map-style dataset only the lists of indices are drawn again; no sample is read
  twice.
- A loader with `state_dict` and `load_state_dict` resumes by itself, as exactly as it can. torchdata's
  StatefulDataLoader does so if its data set has a state; else it is read like a `DataLoader`.
- For any other iterable the batches that were already trained on are read again and dropped. This is also
  done if `state_dict` raises an error, as that of accelerate's loaders does, and for accelerate's loader that
  reads on rank 0 for all ranks.

The order is exactly that of the uninterrupted run if it is decided by

- `set_epoch`, or draws from the global generators of Python, NumPy and torch when the pass is opened, up to
  its first list of indices, as with `shuffle=True` and torch's samplers;
- a generator of Python, NumPy or torch that is an attribute of the loader, of its sampler or batch sampler,
  or of its dataset. Its state is in the checkpoint;
- a sampler with `state_dict` and `load_state_dict`, or an IterableDataset with these methods that is read in
  this process. The checkpoint has its state at the opening of the pass. This state must determine the next
  pass, or be a position in this one, which is then found by drawing.

With a limit of batches the second kind of sampler, with a position in its state, is not exact. State in other
places is not found, such as generators of transforms or a count of passes in an attribute. Use
torchdata's StatefulDataLoader for it. From the state of a dataset in worker processes, only the global
generators are restored, and only for a map-style dataset. Where batches are read again, a warning says so if
the last of them differs from the batch that was trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from eventloop.data.index_reader import IndexReader
from eventloop.data.limits import first
from eventloop.data.loader_info import has_workers, is_stream, parts_of, why_not_by_index
from eventloop.data.loader_state import (
    has_own_state,
    random_state,
    saves_itself,
    set_random_state,
    state_dict_error,
)
from eventloop.data.plain_reader import PlainReader
from eventloop.state.plain_values import plain

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
    """Return the reader for a loader: of those that can read it, the most exact one after a resume."""
    if has_own_state(loader):
        return StatefulReader()
    if hasattr(loader, "load_state_dict") and (error := state_dict_error(loader)):
        logger.info(
            "the position in the %s is found by counting its batches, as its state_dict raised %s",
            type(loader).__name__,
            error,
        )
    return PlainReader(why) if (why := why_not_by_index(loader)) else IndexReader()


class StatefulReader:
    """The reader of a loader that saves its own position, such as torchdata's StatefulDataLoader.

    A resumed run is as exact as the loader is; a warning names the random numbers and samples that the state
    of its kind may lack. The loader begins with the random state at the opening of the pass, so that it may
    draw its order again.

    At the end of a pass that a limit cuts short, the loader's state is one within the pass. A resumed run
    opens that pass, leaves it, and opens the next one.
    """

    def __init__(self) -> None:
        self._began = self._loaded = self._resumed = False
        self._cut = False  # whether a limit cuts the passes short
        self._leaves = False  # whether the loaded state is of the end of a pass that was cut short
        self._ended = False  # True if the state that was loaded is that of a pass without batches left

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        if skip and self._ended:
            self._ended = False
            return iter(())
        began, loaded, self._cut = self._began, self._loaded, limit is not None
        self._began, self._loaded, self._ended = True, False, False
        if skip and not (began or loaded):
            why = f"the checkpoint has no state of the {type(loader).__name__}"
            return PlainReader(why).open(loader, skip, opened_with, limit)
        if skip and not loaded:
            loader.load_state_dict(loader.state_dict())  # continues the pass that a stop interrupted
        now = random_state(loader)
        if skip:
            set_random_state(loader, opened_with)
        if skip or loaded:
            self._resumed = True
            _begin_loaded(loader)
        if not skip:
            if loaded and self._leaves:
                iter(loader)
            return first(_next_pass(loader, now) if self._resumed else iter(loader), limit)
        iterator: Iterator[Any] = iter(loader)
        set_random_state(loader, now)
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
            own = state["stateful"]  # Accelerate's loaders read ahead, and know the end at their last batch
            self._ended = isinstance(own, Mapping) and own.get("_iterator_finished") is True
            _warn_of_lacks(loader)


def _begin_loaded(loader: Any) -> None:
    """Let a loader begin the pass of the state that was loaded; torchdata's do so when asked for a state."""
    for part in parts_of(loader).values():
        if saves_itself(part):
            part.state_dict()


def _next_pass(loader: Any, now: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the batches of a whole pass, in a run that was resumed.

    The pass begins with the random state `now`, whatever the loader draws to find the end of the former one.
    The first pass that torchdata's loaders open may be the rest of the former one, which is empty.
    """
    for _ in range(2):
        empty = True
        set_random_state(loader, now)
        for batch in loader:
            empty = False
            yield batch
        if not empty:
            return


def _warn_of_lacks(loader: Any) -> None:
    """Warn of what the state of a loader may lack; nothing tells whether its batches depend on that."""
    lacks = []
    if not isinstance(loader, DataLoader):
        lacks.append("random generators of its parts")
    if has_workers(loader):
        lacks.append("random numbers that are drawn in its workers")
    if is_stream(loader):
        lacks.append("samples that its data set has read ahead, as into a shuffle buffer")
    if lacks:
        logger.warning(
            "the %s goes on by its own state, which may lack %s: if there are such, the batches are not "
            "exactly those of the interrupted run; a torch DataLoader restores them or reads them again",
            type(loader).__name__,
            " and ".join(lacks),
        )
