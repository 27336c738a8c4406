"""Test that two ranks resume from one checkpoint, or from none, and that an error of one is raised on both."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that the ranks work in."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """Return what each rank has to say of each case."""
    script = Path(__file__).with_name("one_checkpoint_script.py").read_text(encoding="utf-8")
    return run_ranks(script, folder)


def weights_of(path: Path) -> str:
    """Return a digest of the weights in a checkpoint, as torch reads them."""
    state = torch.load(path / "state.pth", weights_only=True)["state_dict"]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()


def texts(ranks: Ranks, case: str) -> list[list[str]]:
    """Return class and text of the error on each rank, whose trainers are bitwise as before."""
    assert [said[case]["unchanged"] for said in ranks] == [True, True]
    return [said[case]["error"][:2] for said in ranks]


# --- one checkpoint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name"),
    [("renamed", "iter_3"), ("renamed before", "iter_4"), ("replaced", "iter_4")],
)
def test_ranks_resume_from_one_checkpoint(ranks: Ranks, folder: Path, case: str, name: str) -> None:
    """A checkpoint that is completed, or removed, between the looks of two ranks is the newest of both or of
    none."""
    number = int(name[-1])
    for said in (rank[case] for rank in ranks):
        assert (said["error"], said["path"], said["iter"]) == (None, f"run/{name}", number)
        assert said["weights"] == weights_of(folder / "source" / "run" / name)


def test_no_checkpoint_on_rank_0_is_none_on_all(ranks: Ranks) -> None:
    """Where rank 0 finds none, both raise FileNotFoundError, so both begin anew."""
    for (kind, text), said in zip(texts(ranks, "none"), ranks, strict=True):
        assert (kind, "no checkpoint to resume from" in text, said["none"]["iter"]) == (
            "FileNotFoundError",
            True,
            0,
        )


def test_one_named_checkpoint_that_is_removed(ranks: Ranks) -> None:
    """A checkpoint that was asked for by name is not replaced by another one: all raise, and name rank 1."""
    for kind, text in texts(ranks, "replaced by name"):
        assert kind == "CheckpointError"
        assert "rank 1 on host b cannot read " in text
        assert "which rank 0 on host a has read: no checkpoint at run/iter_3" in text


def test_best_weights_are_those_of_rank_0(ranks: Ranks, folder: Path) -> None:
    """`load_checkpoint("best")` loads one checkpoint on all ranks."""
    (best,) = (folder / "source" / "run").glob("best_accuracy_*")
    assert [said["best"]["error"] for said in ranks] == [None, None]
    assert [said["best"]["weights"] for said in ranks] == [weights_of(best)] * 2


def test_a_path_is_loaded_by_one_rank_alone(ranks: Ranks, folder: Path) -> None:
    """`load_checkpoint(path)` waits for no other rank."""
    assert ranks[0]["alone"]["weights"] == weights_of(folder / "source" / "run" / "iter_2")
    assert ranks[1]["alone"]["unchanged"]


# --- errors of one rank ------------------------------------------------------------------------------------


def test_disks_that_ranks_do_not_share(ranks: Ranks) -> None:
    """Where rank 1 does not see the checkpoint of rank 0, no rank begins anew: the error names both hosts."""
    for kind, text in texts(ranks, "no checkpoint there"):
        assert kind == "CheckpointError"
        assert "rank 1 on host b cannot read " in text
        assert "no_checkpoint_there/1/run/iter_3, which rank 0 on host a has read" in text
        assert "expected a work_dir on a file system that all ranks share" in text


def test_damage_on_one_disk(ranks: Ranks) -> None:
    """A bit that is flipped on rank 1's disk only is an error on both."""
    for kind, text in texts(ranks, "damaged there"):
        assert kind == "CheckpointError"
        assert "rank 1 on host b" in text
        assert "state.pth is damaged: its SHA-256 is not that of what was saved" in text


def test_another_checkpoint_under_the_same_name(ranks: Ranks) -> None:
    """An intact checkpoint that is not the one rank 0 has read is refused by the SHA-256 of its manifest."""
    for kind, text in texts(ranks, "another one there"):
        assert kind == "CheckpointError"
        assert "rank 1 on host b finds another checkpoint at " in text
        assert "than rank 0 on host a has read: expected a manifest with the SHA-256 " in text


@pytest.mark.parametrize(
    ("case", "kind", "own", "what"),
    [
        ("other shapes", "CheckpointError", "does not fit the model", "the resume"),
        ("no memory", "RuntimeError", "not enough memory on this rank", "the comparison of the weights"),
        ("refused", "ValueError", "not on this rank", "the resume"),
        ("refused by a hook", "ValueError", "not on this rank", "the resume"),
        ("argument", "ValueError", "changed must be", "the resume"),
        ("best refused", "ValueError", "not on this rank", "load_checkpoint('auto')"),
    ],
)
def test_what_one_rank_refuses_is_loaded_on_none(
    ranks: Ranks, case: str, kind: str, own: str, what: str
) -> None:
    """Rank 1 raises its own error, rank 0 one of the same kind that names rank 1; all are bitwise as before."""
    first, second = texts(ranks, case)
    assert second[0] == first[0] == kind
    assert own in second[1]
    assert first[1].startswith(f"{what} failed on rank 1 on host b, so on all ranks: {kind}: ")
    assert own in first[1]


@pytest.mark.parametrize("case", ["spoiled", "spoiled weights"])
def test_other_weights_in_the_memory_of_one_rank(ranks: Ranks, case: str) -> None:
    """If a handler changes the weights on rank 1 alone, the compared digests say so before they are loaded."""
    for kind, text in texts(ranks, case):
        assert kind == "CheckpointError"
        assert text.startswith(
            "rank 1 on host b would load other weights of run/iter_3 than rank 0 on host a: "
        )


# --- the directory of a run --------------------------------------------------------------------------------


def test_the_directory_of_a_run_is_rank_0s(ranks: Ranks) -> None:
    """Ranks whose clocks differ have one directory."""
    assert [said["directory"] for said in ranks] == [{"path": "runs/of_rank_0"}] * 2


@pytest.mark.parametrize(("case", "failing"), [("no directory", 0), ("no directory there", 1)])
def test_a_directory_that_one_rank_cannot_create(ranks: Ranks, case: str, failing: int) -> None:
    """Rank 0 cannot create it for all, or rank 1 on its own disk: both raise."""
    errors = [said[case]["error"] for said in ranks]
    for _, text in errors:
        assert "work_dir 'runs/" in text
        assert "cannot be written: " in text
    if failing == 1:
        assert errors[0][1].startswith("creating the directory of the run failed on rank 1 on host b")
