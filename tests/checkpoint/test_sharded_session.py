"""Test what a rank prepares for a save that several ranks write; here one process is all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_sharded
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.sharded.job import SHARD
from eventloop.checkpoint.sharded.session import Session
from eventloop.state.tensors import bytes_of, tensors_of
from tests.support.saving import DEADLINE


def state_of(**weights: torch.Tensor) -> dict[str, Any]:
    """A state with these weights, as a rank gathers it."""
    return {"meta": {"iter": 1}, "state_dict": weights, "ranks": {"rng": torch.arange(5)}}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """The saves of one rank."""
    return Session(tmp_path, 0, 1)


@pytest.mark.parametrize("process", [False, True])
def test_tensors_without_values_stand_for_those_in_shards(
    session: Session, make_saver: Callable[..., Saver], tmp_path: Path, process: bool
) -> None:
    """`state.pth` has the shape and the type of each tensor that is in the shards, which have its values."""
    weights = {"a": torch.randn(3, 4), "b": torch.ones(2).bfloat16(), "a_tied": torch.zeros(())}
    copied, part = session.prepare("x", state_of(**weights))
    make_saver(process=process).save(copied, Job(tmp_path / "x", part=part)).result(DEADLINE)

    rest = torch.load(tmp_path / "x" / "state.pth", weights_only=True)["state_dict"]
    assert {name: (each.device.type, each.shape, each.dtype) for name, each in rest.items()} == {
        name: ("meta", each.shape, each.dtype) for name, each in weights.items()
    }
    found = {f"state_dict.{name}": torch.full_like(each, 7.0) for name, each in weights.items()}
    assert load_sharded(tmp_path / "x", found) == []
    assert all(found[f"state_dict.{name}"].equal(each) for name, each in weights.items())


def test_only_what_is_copied_counts(session: Session) -> None:
    """Rank 0 counts the bytes of its chunks and of its own state, not those of the places of other tensors."""
    copied, _ = session.prepare("x", state_of(a=torch.zeros(100)))

    assert bytes_of(tensors_of(copied)) == 100 * 4 + 5 * 8


@pytest.mark.parametrize(
    "other",
    [{"a": torch.ones(4)}, {"b": torch.ones(3)}, {"a": torch.ones(3).half()}, {}],
    ids=["shape", "name", "type", "none"],
)
def test_other_tensors_get_another_plan(session: Session, other: dict[str, torch.Tensor]) -> None:
    """A save with tensors of other names, shapes or types than the one before writes these."""
    session.prepare("x", state_of(a=torch.zeros(3)))
    copied, part = session.prepare("y", state_of(**other))

    assert [*map(id, copied[SHARD])] == [*map(id, other.values())]
    assert [*json.loads(part.index_json)] == [f"state_dict.{name}" for name in other]
