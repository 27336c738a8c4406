"""Test that a run with `limit_batches` resumes bitwise, within a limited pass and at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook
from tests.resume.test_resume_samplers import LOADERS, whole_and_parts
from tests.support.interrupted import EPOCHS, Case, difference, interrupted, stop_after, uninterrupted
from tests.support.trainers import MakeTrainer, batches

LIMIT = 6
CASES = [
    (Case("generator", limit=LIMIT), [3, 6, 8]),
    (Case("sampler", limit=LIMIT), [6, 13]),
    (Case("global", limit=LIMIT), [2, 12, 13]),
    (Case("set_epoch", by_epoch=False, limit=LIMIT), [5, 12, 20]),
    (Case("global", 2, limit=LIMIT), [3, 6, 13]),
    (Case("generator", 2, persistent=True, limit=LIMIT), [1, 5, 6, 7, 12]),
    (Case("set_epoch", 2, persistent=True, by_epoch=False, limit=LIMIT), [6, 13]),
]


@pytest.mark.representative(2)
@pytest.mark.parametrize(("case", "stops"), CASES, ids=[f"{c.order}-{c.workers}-{s}" for c, s in CASES])
def test_interrupted_run_equals_the_uninterrupted_one(tmp_path: Path, case: Case, stops: list[int]) -> None:
    """Every loss and the final state equal those of the uninterrupted run with the same limit."""
    whole = uninterrupted(case, tmp_path / "whole")

    parts = interrupted(case, tmp_path / "parts", stops)

    assert difference(whole, parts) is None
    assert len(parts.losses) == (LIMIT * EPOCHS if case.by_epoch else 80)


@pytest.mark.representative(4)
@pytest.mark.parametrize("loader", [name for name in LOADERS if "a place" not in name])
def test_samplers_and_streams(make_trainer: MakeTrainer, tmp_path: Path, loader: str) -> None:
    """Resumed runs get the batches of the uninterrupted run, within a limited pass and at its end."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, LOADERS[loader], [1, 3, 5, 6], limit=3)

    assert parts == whole
    assert len(parts) == 3 * 4


class Saving:
    """A loader that saves its own position, and begins anew when a pass is opened."""

    def __init__(self) -> None:
        self._batches, self._at, self._resumes = batches(5), 0, False

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes:
            self._at = 0
        self._resumes = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self._at < 5:
            self._at += 1
            yield self._batches[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._resumes = state["at"], True


@pytest.mark.representative(1)
@pytest.mark.parametrize("stops", [[2], [3], [4], [1, 3, 5]], ids=str)
def test_a_loader_that_saves_itself(make_trainer: MakeTrainer, tmp_path: Path, stops: list[int]) -> None:
    """A run that is resumed at the end of a limited pass begins the next one at its start."""
    seen: list[float] = []
    for stop in [*stops, 100]:
        trainer = make_trainer(
            train_loader=Saving(), limit_batches=3, hooks=[CheckpointHook(interval=-1)], work_dir=tmp_path
        )
        trainer.bus.subscribe(
            lambda trainer, event: seen.append(float(trainer.batch[0].sum())), "before_train_iter"
        )
        if stop != stops[0]:
            trainer.resume()
        stop_after(trainer, stop)
        trainer.train()

    first = [float(inputs.sum()) for inputs, _ in batches(5)[:3]]
    assert seen == first * 2


def test_another_limit_is_another_length(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A run with another limit is refused like one with another loader, by the length of the pass."""
    trainer = make_trainer(train_loader=batches(5), limit_batches=3)
    stop_after(trainer, 2)
    trainer.train()

    with pytest.raises(CheckpointError, match="loader_length: 3 in the checkpoint, 5 in this trainer"):
        make_trainer(train_loader=batches(5)).resume()
