"""Where in its loader a trainer is, so that a run resumed in mid-epoch sees the batches it had not seen."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch.utils.data import DataLoader

from eventloop.data.index_reader import IndexReader
from eventloop.data.readers import Reader, StatefulReader, reader_of
from eventloop.data.rng import (
    check_own_random_state,
    check_rng_state,
    generators_of,
    load_sampler,
    lost_in,
    own_random_state,
    random_state,
    samplers_given,
    samplers_of,
    samplers_state,
    set_generators,
    set_own_random_state,
    set_random_state,
    set_samplers,
)
from eventloop.state.rollback import Rollback
from eventloop.util.checks import length_of


class PositionedTrainer(Protocol):
    """The parts of a trainer that its place in the loader reads and sets."""

    iter: int
    epoch: int
    batch_idx: int
    max_iters: int | None
    loader: Iterable[Any] | None
    val_loader: Iterable[Any] | None
    test_loader: Iterable[Any] | None

    @property
    def by_epoch(self) -> bool:
        """True when the run is measured in epochs."""


__all__ = ["LoaderPosition", "Within", "length_of", "set_sampler_epoch"]

logger = logging.getLogger("eventloop")

Within = Literal["", "iter", "epoch"]


class LoaderPosition:
    """The pass over the train loader: which one, and the random state it began with.

    The order of a shuffled pass is decided when it is opened. To find it again after a resume, the pass is opened
    under the random state it was opened with then, what was trained on is left out (`eventloop.data.readers`), and
    the random state of the checkpoint is put back.
    """

    def __init__(self, trainer: PositionedTrainer) -> None:
        self._trainer = trainer
        self._passes = 0  # opened so far
        self.length: int | None = None
        self._opened_with: dict[str, Any] = {}
        self._generators: list[
            torch.Tensor
        ] = []  # a checkpoint's, for a loader that is known when it is opened
        self._samplers: Mapping[str, Any] | None = None  # the same
        self._loader_state: Mapping[str, Any] | None = None  # the same
        self._resuming = False
        self._opened_at: tuple[int, int] | None = None  # iteration and epoch
        self._current: tuple[Any, Reader] | None = None
        self._by_index: WeakKeyDictionary[Any, Reader] = WeakKeyDictionary()  # they may keep workers
        # held from outside the trainer, which is full of cycles: workers whose queues are collected together with
        # their loader never hear that they may go, and each is waited for, for five seconds
        finalize(self, self._by_index.clear).atexit = False
        self.skipped = 0
        self.evaluated = 0
        """Scheduled evaluations that were completed since the last training iteration."""

    @property
    def at_end(self) -> bool:
        """True when the epoch has no batch left, as far as the loader's length tells."""
        trainer = self._trainer
        if not trainer.by_epoch:
            return trainer.iter >= (trainer.max_iters or 0)
        return self.length is not None and trainer.batch_idx >= self.length

    @property
    def resuming(self) -> bool:
        """True between loading a checkpoint of mid-epoch and opening the loader."""
        return self._resuming

    def go_on(self) -> None:
        """A call of `train` begins: a pass that a stop cut short goes on where it was."""
        self._resuming = self._trainer.batch_idx > 0

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Open a pass, and return its batches; after a resume the ones that are left."""
        self.length = length_of(loader)
        skip = self.skipped = self._trainer.batch_idx if self._resuming else 0
        self._resuming = False
        self._restore_samplers(loader, skip)
        self._take_back(loader, skip)
        reader = self._reader(loader)
        if self._loader_state is not None:
            reader.load_state_dict(loader, self._loader_state)
            self._loader_state = None
        if not skip:
            self._trainer.batch_idx = 0
            self._passes += 1
        self._seed_sampler(loader, self._passes - 1)
        if not skip:
            self._opened_with = random_state(loader)
            self._opened_at = self._trainer.iter, self._trainer.epoch
        return reader.open(loader, skip, self._opened_with)

    def _take_back(self, loader: Iterable[Any], skip: int) -> None:
        """Open a pass once more as it was where an error came in its first iteration."""
        here = self._trainer.iter, self._trainer.epoch
        if not skip and here == self._opened_at and self._current is not None and self._current[0] is loader:
            set_random_state(loader, self._opened_with, opening=True)
            self._passes -= 1

    def _restore_samplers(self, loader: Iterable[Any], skip: int) -> None:
        """After a resume, give the loader's generators and samplers what the checkpoint has of them.

        In mid-pass the samplers' own states are put back by the reader: the pass is opened as it was, not from here.
        """
        if self._samplers is not None:
            _tell_lost(loader, self._opened_with.get("samplers", {}) if skip else self._samplers)
            set_samplers(loader, self._samplers, opening=not skip)
        self._samplers = None
        set_generators(loader, self._generators)
        self._generators = []

    def _reader(self, loader: Iterable[Any]) -> Reader:
        if self._current is None or self._current[0] is not loader:
            reader = self._by_index.get(loader) if isinstance(loader, DataLoader) else None
            self._current = loader, reader or reader_of(loader)
        reader = self._current[1]
        if isinstance(reader, IndexReader):
            self._by_index[loader] = reader
        return reader

    def _seed_sampler(self, loader: Iterable[Any], number: int) -> None:
        """Let a distributed sampler shuffle anew; in a run measured in epochs a hook does so, by the epoch."""
        if not self._trainer.by_epoch:
            set_sampler_epoch(loader, number)

    def state_dict(self, within: Within = "") -> dict[str, Any]:
        """What `open` needs to find the place again.

        Args:
            within: "iter" or "epoch", what has just ended and is not counted yet.

        Raises:
            TypeError: the loader's own state could be saved, but not be loaded with `weights_only=True`.
        """
        batch_idx = {"": self._trainer.batch_idx, "iter": self._trainer.batch_idx + 1, "epoch": 0}[within]
        loader = self._loader_state
        if loader is None:
            loader = {} if self._current is None else self._current[1].state_dict(self._current[0], batch_idx)
        return {
            "batch_idx": batch_idx,
            "passes": self._passes,
            "opened_with": {} if within == "epoch" else self._opened_with,  # the next pass is opened anew
            "generators": self._generators or [g.get_state() for g in generators_of(self._trainer.loader)],
            "samplers": samplers_state(self._trainer.loader) if self._samplers is None else self._samplers,
            "evaluated": 0 if within else self.evaluated,
            "loader": loader,
            "evaluations": {mode: own_random_state(each) for mode, each in self._evaluated_on().items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check the random states of a position whose layout was checked; raise for a malformed one."""
        opened_with = state["opened_with"]
        if opened_with:
            check_rng_state(opened_with["rng"])
            check_own_random_state(self._trainer.loader, opened_with)
        check_own_random_state(self._trainer.loader, state)
        saved = state.get("evaluations", {})
        for mode, loader in self._evaluated_on().items():
            if mode in saved:
                check_own_random_state(loader, saved[mode])

    def load_samplers(self, state: Mapping[str, Any], rollback: Rollback) -> None:
        """Give samplers of the loaders that are evaluated on their states, before `load_state_dict`."""
        saved = state.get("evaluations", {})
        for mode, loader in self._evaluated_on().items():
            if mode in saved:
                samplers = saved[mode].get("samplers", {})
                _tell_lost(loader, samplers)
                own = own_random_state(loader)
                rollback.on_rollback(
                    f"the generators of {mode}_loader",
                    partial(set_own_random_state, loader, own, opening=False),
                )
                for sampler, its_state in samplers_given(loader, samplers):
                    rollback.snapshot(f"the sampler {type(sampler).__name__} of {mode}_loader", sampler)
                    load_sampler(sampler, its_state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place a checkpoint was taken at; what it is was checked, and `load_samplers` has gone before."""
        self._trainer.batch_idx = int(state["batch_idx"])
        self._passes = int(state["passes"])
        self._opened_with = dict(state["opened_with"])
        self._opened_at = None
        self._generators = list(state["generators"])
        self._samplers = state.get("samplers", {})
        self._loader_state = state.get("loader")
        self.evaluated = int(state["evaluated"])
        self._resuming = self._trainer.batch_idx > 0
        if self._trainer.loader is not None:  # an evaluation that draws from them may come before the pass
            set_generators(self._trainer.loader, self._generators)
            self._generators = []
        saved = state.get("evaluations", {})
        for mode, loader in self._evaluated_on().items():
            if mode in saved:
                set_own_random_state(loader, saved[mode], opening=False)

    def _evaluated_on(self) -> dict[str, Iterable[Any]]:
        """The other loaders, by mode: their samplers may draw from generators of their own, too."""
        trainer = self._trainer
        loaders = {"val": trainer.val_loader, "test": trainer.test_loader}
        return {
            mode: loader
            for mode, loader in loaders.items()
            if loader is not None and loader is not trainer.loader
        }

    def put_back(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Another pass was made over a loader that saves its own place: the one under way, or the next, goes on from
        the state it had."""
        if self._current is not None and self._current[0] is loader:
            reader = self._current[1]
            assert isinstance(reader, StatefulReader)
            state = reader.put_back(state)
        loader.load_state_dict(deepcopy(state))  # it may keep it, and go on in it

    def rescale(self, saved: int, own: int) -> None:
        """A pass of `saved` batches goes on as one of `own`, after as large a part of it."""
        self._trainer.batch_idx = self._trainer.batch_idx * own // max(saved, 1)
        self._resuming = self._trainer.batch_idx > 0


def _tell_lost(loader: Iterable[Any], saved: Mapping[str, Any]) -> None:
    if lost := lost_in(loader, saved):
        logger.warning(
            "the order of the samples may not be that of the run that was interrupted, the checkpoint has nothing that "
            "%s could go on with: let the sampler shuffle by a generator that is an attribute of it, or by set_epoch, or "
            "give it state_dict and load_state_dict",
            ", ".join(lost),
        )


def set_sampler_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of the loader, as accelerate's have it, else of its sampler or its batch sampler's sampler."""
    for owner in (loader, *samplers_of(loader)):
        set_epoch = getattr(owner, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return
