"""Where in its loader a trainer is, so that a run resumed in mid-epoch sees the batches it had not seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from eventloop.trainer import Trainer


class LoaderPosition:
    """The pass over the train loader: which one, and the random state it began with.

    The order of a shuffled pass is decided when it is opened. To find it again after a resume, the pass is opened
    under the random state it was opened with then, the batches that were trained on are taken and dropped (they
    are read once more), and the random state of the checkpoint is put back.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._passes = 0  # opened so far
        self.length: int | None = None
        self._opened_with: dict[str, Any] = {}
        self._generators: list[torch.Tensor] = []  # a checkpoint's, for when the loader is opened
        self._resuming = False
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
        """Yield the batches of the pass, after a resume the ones that are left."""
        self.length = length_of(loader)
        self.skipped = self._trainer.batch_idx if self._resuming else 0
        self._resuming = False
        _set_generators(loader, self._generators)
        self._generators = []
        if self.skipped:
            yield from self._rest(loader, self.skipped)
            return
        self._trainer.batch_idx = 0
        self._seed_sampler(loader, self._passes)
        self._passes += 1
        self._opened_with = random_state(loader)
        yield from loader

    def _rest(self, loader: Iterable[Any], skip: int) -> Iterator[Any]:
        if self.length is not None and skip >= self.length and not _generators_of(loader):
            return  # nothing is left, and no sampler has anything to draw at the end
        self._seed_sampler(loader, self._passes - 1)
        now = random_state(loader)
        set_random_state(loader, self._opened_with)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        set_random_state(loader, now)
        yield from iterator

    def _seed_sampler(self, loader: Iterable[Any], number: int) -> None:
        """Let a distributed sampler shuffle anew; in a run measured in epochs a hook does so, by the epoch."""
        if not self._trainer.by_epoch:
            set_sampler_epoch(loader, number)

    def state_dict(self) -> dict[str, Any]:
        """What `open` needs to find the place again."""
        return {
            "batch_idx": self._trainer.batch_idx,
            "passes": self._passes,
            "opened_with": self._opened_with,
            "generators": [g.get_state() for g in _generators_of(self._trainer.loader)],
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place a checkpoint was taken at."""
        self._trainer.batch_idx = int(state["batch_idx"])
        self._passes = int(state["passes"])
        self._opened_with = dict(state["opened_with"])
        self._generators = list(state["generators"])
        self.evaluated = int(state["evaluated"])
        self._resuming = self._trainer.batch_idx > 0


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Batches of one pass, None where the loader does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def set_sampler_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell the loader's sampler, or its batch sampler's, which epoch begins; does nothing where none asks."""
    for sampler in _samplers_of(loader):
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return


def _samplers_of(loader: Iterable[Any] | None) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]


def _generators_of(loader: Iterable[Any] | None) -> list[torch.Generator]:
    """The random generators a loader and its samplers have of their own."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *_samplers_of(loader))]
    return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())


def random_state(loader: Iterable[Any]) -> dict[str, Any]:
    return {"rng": rng_state(), "generators": [g.get_state() for g in _generators_of(loader)]}


def set_random_state(loader: Iterable[Any], state: Mapping[str, Any]) -> None:
    set_rng_state(state["rng"])
    _set_generators(loader, state["generators"])


def _set_generators(loader: Iterable[Any], states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators_of(loader), states, strict=False):
        generator.set_state(state.clone())  # torch reads a state from the start of its storage
