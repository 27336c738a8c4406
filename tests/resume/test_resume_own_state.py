"""Test resumes with loaders that save their own state, as torchdata's do."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.resume.test_resume_samplers import BATCH, PER_EPOCH, STOPS, Numbered, Stream, whole_and_parts
from tests.support.trainers import MakeTrainer


class Placing:
    """A loader that draws its order when a pass begins, and saves its place.

    When it is asked for a state it begins the pass that was loaded. A pass at whose end it was saved is empty.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self._place, self._loaded, self._order = 0, False, list[int]()

    def _begin(self) -> None:
        self._order = torch.randperm(PER_EPOCH, generator=self.generator).tolist()
        random.shuffle(self._order)

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:
            self._begin()
            self._place = 0
        self._loaded = False
        while self._place < PER_EPOCH:
            self._place += 1
            yield torch.tensor(self._order[self._place - 1]), torch.ones(BATCH, 2)

    def state_dict(self) -> dict[str, Any]:
        if self._loaded:
            self._begin()
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place, self._loaded = state["place"], True


@pytest.mark.representative(1)
@pytest.mark.parametrize("stops", [[stop] for stop in STOPS] + [STOPS], ids=str)
def test_a_loader_that_draws_its_order_again(
    make_trainer: MakeTrainer, tmp_path: Path, stops: list[int]
) -> None:
    """A loader that is restored draws its order with the random state of its pass, and the next pass is whole."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, Placing, stops)

    assert parts == whole


class Saving(DataLoader[Any]):
    """A DataLoader that saves a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


LACKS = {
    "stream": (
        lambda: Saving(Stream(), BATCH),
        "Saving .* may lack samples that its data set has read ahead",
    ),
    "workers": (
        lambda: Saving(Numbered(), BATCH, num_workers=1),
        "may lack random numbers that are drawn in its",
    ),
    "neither": (lambda: Saving(Numbered(), BATCH), None),
    "own": (Placing, "the Placing goes on by its own state, which may lack random generators of its parts"),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize(("loader", "line"), LACKS.values(), ids=LACKS)
def test_what_a_state_may_lack_is_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: Any, line: str | None
) -> None:
    """A resume warns in one line of what the state of such a loader may lack, and says what restores it."""
    whole_and_parts(make_trainer, tmp_path, loader, [3])

    found = [each for each in caplog.messages if "its own state" in each]
    assert len(found) == (line is not None)
    if line is not None:
        assert re.search(f"{line}.*; a torch DataLoader restores them or reads them again$", found[0])


class Late:
    """A loader that has a length once it is iterated, as Lightning's CombinedLoader."""

    def __init__(self) -> None:
        self._began = False

    def __len__(self) -> int:
        if not self._began:
            raise RuntimeError("Please call `iter(loader)` first.")
        return PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        self._began = True
        return ((torch.tensor(number), torch.ones(BATCH, 2)) for number in range(PER_EPOCH))


def test_a_loader_whose_length_is_known_later(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A loader whose `len` raises before it is iterated is trained on, and resumed at any place."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, Late, STOPS)

    assert parts == whole
