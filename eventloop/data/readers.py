"""Choose how a pass over a loader is opened, and how an interrupted pass is resumed.

`LoaderPosition` uses it. There are three ways to resume a pass:

- For a `DataLoader` over a map-style dataset only the lists of indices are drawn again; no sample is read
  twice.
- A loader with `state_dict` and `load_state_dict` restores its own position, as exactly as it can. The
  StatefulDataLoader of torchdata does so if its data set has a state; otherwise it is read like a
  `DataLoader`.
- For any other iterable the batches that were already trained on are read again and dropped. This is also
  done if `state_dict` raises an error, as it does for Accelerate's loaders, and for Accelerate's loader that
  reads on rank 0 for all ranks.

The batches come in exactly the order of the uninterrupted run if the order is decided by

- `set_epoch`, or draws from the global generators of Python, NumPy and torch when the pass is opened, up to
  its first list of indices, as with `shuffle=True` and torch's samplers;
- a generator of Python, NumPy or torch that is an attribute of the loader, of its sampler or batch sampler,
  or of its dataset. Its state is in the checkpoint;
- a sampler with `state_dict` and `load_state_dict`, or an IterableDataset with these methods that is read in
  this process. The checkpoint has its state at the opening of the pass. This state must determine the next
  pass, or be a position in the current pass, which is then found by drawing.

With a limit of batches, a sampler whose state is a position is not exact. State in other places is not found,
such as generators of transforms, or a count of passes in an attribute; use torchdata's StatefulDataLoader for
it. Of the state in worker processes only the global generators are restored, and only for a map-style
dataset. If batches are read again, and the last of them differs from the batch that was trained on, a warning
is logged.
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

        If batches are skipped, the call leaves the random state of this process unchanged.

        Args:
            loader: the loader.
            skip: the number of batches that were already trained on.
            opened_with: the random state with which the pass was first opened.
            limit: the number of batches, those skipped included, after which the pass is cut short; None for
                all batches of the loader.
        """

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the state that `open` needs besides its arguments, after `batch_idx` batches of the pass."""

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore a saved state for the next `open`."""


def reader_of(loader: Iterable[Any]) -> Reader:
    """Return the reader for a loader that resumes its passes most exactly."""
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

    A resumed run is as exact as the loader's own state; a warning names the random numbers and samples that
    the state may lack. A resumed pass begins with the random state of its first opening, so that the loader
    may draw its order again.

    At the end of a pass that a limit cuts short, the state of the loader is a position within the pass. A
    resumed run opens that pass, leaves it, and opens the next one.
    """

    def __init__(self) -> None:
        self._began = False  # whether a pass was opened
        self._loaded = False  # whether a state was loaded, and no pass was opened since
        self._resumed = False  # whether a pass was resumed in this run
        self._cut = False  # whether a limit cuts the passes short
        self._leaves = False  # whether the loaded state is of the end of a pass that was cut short
        self._ended = False  # whether the pass of the loaded state has no batches left

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        if skip and self._ended:
            self._ended = False
            return iter(())
        had_pass, loaded, self._cut = self._began, self._loaded, limit is not None
        self._began, self._loaded, self._ended = True, False, False
        if skip and not (had_pass or loaded):
            why = f"the checkpoint has no state of the {type(loader).__name__}"
            return PlainReader(why).open(loader, skip, opened_with, limit)
        if skip and not loaded:
            # within this process a stop has interrupted the pass: the loader shall continue it
            loader.load_state_dict(loader.state_dict())
        state_before = random_state(loader)
        if skip:
            set_random_state(loader, opened_with)
        if skip or loaded:
            self._resumed = True
            _begin_loaded(loader)
        if not skip:
            if loaded and self._leaves:
                iter(loader)  # opens the pass that was cut short, and leaves it
            return first(_next_pass(loader, state_before) if self._resumed else iter(loader), limit)
        iterator: Iterator[Any] = iter(loader)
        set_random_state(loader, state_before)
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
            # Accelerate's loaders read ahead, so their state says at the last batch that the pass has ended
            own = state["stateful"]
            self._ended = isinstance(own, Mapping) and own.get("_iterator_finished") is True
            _warn_of_lacks(loader)


def _begin_loaded(loader: Any) -> None:
    """Let torchdata's loaders begin the pass of a loaded state, which a call of `state_dict` does."""
    for part in parts_of(loader).values():
        if saves_itself(part):
            part.state_dict()


def _next_pass(loader: Any, state_before: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the batches of a whole pass, in a run that was resumed.

    The first iterator of torchdata's loaders may be the rest of the former pass, which is empty. Then a
    second one is opened. Both begin with the same random state, so that the numbers drawn for the empty rest
    do not change the order of the pass.
    """
    for _ in range(2):
        is_empty = True
        set_random_state(loader, state_before)
        for batch in loader:
            is_empty = False
            yield batch
        if not is_empty:
            return


def _warn_of_lacks(loader: Any) -> None:
    """Warn of state that a loader's own state may lack, without knowing whether its batches depend on it."""
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
