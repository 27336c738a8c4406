"""Where in its loader a trainer is, so that a run resumed in mid-epoch sees the batches it had not seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.checkpoint import rng_state, set_rng_state

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
        self._passes = 0
        self._length: int | None = None
        self._opened_with: dict[str, Any] = {}
        self._resuming = False
        self._to_evaluate = False
        self.skipped = 0

    @property
    def at_end(self) -> bool:
        """True when the pass has no batch left, as far as the loader's length tells."""
        return self._length is not None and self._trainer.batch_idx >= self._length

    @property
    def resuming(self) -> bool:
        """True between loading a checkpoint of mid-epoch and opening the loader."""
        return self._resuming

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the pass, after a resume the ones that are left."""
        self._length = length_of(loader)
        generator: torch.Generator | None = getattr(loader, "generator", None)
        skip = self._trainer.batch_idx if self._resuming else 0
        self._resuming = False
        self.skipped = skip
        if not skip:
            self._trainer.batch_idx = 0
            self._opened_with = {"rng": rng_state()}
            if generator is not None:
                self._opened_with["generator"] = generator.get_state()
            yield from loader
            return
        now = rng_state()
        set_rng_state(self._opened_with["rng"])
        if generator is not None and "generator" in self._opened_with:
            generator.set_state(self._opened_with["generator"])
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        set_rng_state(now)
        yield from iterator

    def take_evaluation(self) -> bool:
        """True once after resuming from a checkpoint that was saved before the validation it was due."""
        due, self._to_evaluate = self._to_evaluate, False
        return due

    def next_pass(self, loader: Iterable[Any]) -> None:
        """Count a pass of an iteration-based run, and let a distributed sampler shuffle anew."""
        self._passes += 1
        set_sampler_epoch(loader, self._passes)

    def state_dict(self) -> dict[str, Any]:
        """What `open` needs to find the place again."""
        return {
            "batch_idx": self._trainer.batch_idx,
            "passes": self._passes,
            "opened_with": self._opened_with,
            "to_evaluate": False,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place a checkpoint was taken at."""
        self._trainer.batch_idx = int(state["batch_idx"])
        self._passes = int(state["passes"])
        self._opened_with = dict(state["opened_with"])
        self._resuming = self._trainer.batch_idx > 0
        self._to_evaluate = bool(state["to_evaluate"])


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Batches of one pass, None where the loader does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def set_sampler_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell the loader's sampler, or its batch sampler's, which epoch begins; does nothing where none asks."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return
