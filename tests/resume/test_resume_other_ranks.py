"""Test where a run goes on that is resumed on another number of ranks, or with batches of another size.

The oracle is the samples that the program itself records, in each step of each rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.resume.other_ranks_script import COUNT

pytestmark = pytest.mark.slow

PROGRAM = "import sys\nsys.argv.append({!r})\nfrom tests.resume.other_ranks_script import main\nmain()\n"
STEPS, DONE = COUNT // 8, 5
RANKS_ONLY = {"world_size": "apply"}
ANY_BATCH = {"world_size": "apply", "batch_size": "apply"}


class Part:
    """A part of a run: what its ranks have said, and the samples of all ranks in each of its steps."""

    def __init__(self, folder: Path, kind: str, ranks: int, batch: int, **options: Any) -> None:
        folder.mkdir()
        self.folder = folder
        given = {"kind": kind, "ranks": ranks, "batch": batch, "changed": ANY_BATCH, **options}
        self.ranks = run_ranks(PROGRAM.format(json.dumps(given)), folder, ranks)
        self.errors = [said["error"] for said in self.ranks]
        self.lines: list[str] = self.ranks[0]["lines"]
        parts = [said["steps"] for said in self.ranks]
        assert len({*map(len, parts)}) == 1, "a rank made more steps than another one"
        self.steps = [[sample for part in step for sample in part] for step in zip(*parts, strict=True)]

    def checkpoint(self, name: str) -> str:
        """Return the path of a checkpoint that the part has saved."""
        return str(self.folder / "run" / name)

    def first(self, count: int) -> list[int]:
        """Return the samples of the first steps that have so many, sorted."""
        return sorted(flat(self.steps)[:count])


def flat(steps: list[list[int]]) -> list[int]:
    """Return the samples of all steps."""
    return [sample for step in steps for sample in step]


def sets(steps: list[list[int]]) -> list[list[int]]:
    """Return the samples of each step, sorted: the ranks have another order in it."""
    return [*map(sorted, steps)]


def whole_and_stopped(folder: Path, kind: str) -> tuple[Part, Part]:
    """Return an uninterrupted run of two ranks, and one that is stopped in its first epoch."""
    return Part(folder / "whole", kind, 2, 4), Part(folder / "stopped", kind, 2, 4, stop=DONE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Part, Part]:
    """Return the runs of two ranks with a DistributedSampler."""
    return whole_and_stopped(tmp_path_factory.mktemp("two"), "sampler")


@pytest.mark.parametrize(
    ("ranks", "batch", "kind"),
    [(1, 8, "sampler"), (4, 2, "sampler"), (1, 8, "workers"), (1, 8, "own sampler")],
)
def test_the_same_samples_in_each_step(
    two: tuple[Part, Part], tmp_path: Path, ranks: int, batch: int, kind: str
) -> None:
    """If all ranks together have as many samples in a step as before, each step has the same ones."""
    whole, stopped = two if kind != "own sampler" else whole_and_stopped(tmp_path, kind)

    rest = Part(tmp_path / "rest", kind, ranks, batch, path=stopped.checkpoint(f"iter_{DONE}"))

    assert sets(stopped.steps + rest.steps) == sets(whole.steps)
    line = f"it was saved by 2 ranks, and this run has {ranks}: random numbers differ from here on"
    assert [each for each in rest.lines if line in each and "the steps have the same samples" in each]


@pytest.mark.parametrize(
    ("ranks", "batch", "kind"),
    [
        (1, 4, "sampler"),
        (2, 3, "sampler"),
        (3, 2, "sampler"),
        (1, 48, "sampler"),
        (3, 2, "drop_last"),
        (2, 3, "workers"),
    ],
)
def test_each_sample_once(two: tuple[Part, Part], tmp_path: Path, ranks: int, batch: int, kind: str) -> None:
    """With other batches the pass continues at the next sample: no sample of the epoch comes twice, or never."""
    _, stopped = two

    rest = Part(tmp_path / "rest", kind, ranks, batch, path=stopped.checkpoint(f"iter_{DONE}"))

    assert rest.errors == [None] * ranks
    left = COUNT - 8 * DONE
    assert sorted(flat(stopped.steps) + rest.first(left)) == [*range(COUNT)]
    steps = -(-left // (ranks * batch))
    assert len(flat(rest.steps[:steps])) == left  # the epoch ends there
    after = rest.steps[steps:]
    assert {*flat(after)} == {*range(COUNT)} if kind != "drop_last" else len({*flat(after)}) == 63
    assert any(f"the pass continues after {8 * DONE} of its samples" in line for line in rest.lines) is (
        (8 * DONE) % (ranks * batch) > 0 or batch == 4
    )


def test_a_place_within_a_step_is_saved(two: tuple[Part, Part], tmp_path: Path) -> None:
    """A run that has begun within a step, and is stopped in the same epoch, is resumed after its last sample."""
    _, stopped = two
    second = Part(tmp_path / "second", "sampler", 3, 2, path=stopped.checkpoint("iter_5"), stop=DONE + 2)

    same = Part(tmp_path / "same", "sampler", 3, 2, path=second.checkpoint("iter_7"), changed="refuse")
    third = Part(tmp_path / "third", "sampler", 1, 5, path=second.checkpoint("iter_7"))

    done = flat(stopped.steps + second.steps)
    assert len(done) == 40 + 12
    for rest in (same, third):
        assert rest.errors == [None] * len(rest.ranks)
        assert sorted(done + rest.first(12)) == [*range(COUNT)]


def test_a_sampler_that_saves_its_place(tmp_path: Path) -> None:
    """The state of a sampler, which is of one rank, is not taken by another number of ranks."""
    whole = Part(tmp_path / "whole", "saved sampler", 2, 4)
    stopped = Part(tmp_path / "stopped", "saved sampler", 2, 4, stop=STEPS + DONE)

    rest = Part(tmp_path / "rest", "saved sampler", 1, 8, path=stopped.checkpoint(f"iter_{STEPS + DONE}"))

    assert sets(stopped.steps + rest.steps) == sets(whole.steps)


@pytest.mark.parametrize("kind", ["stream", "own state"])
def test_a_position_of_one_rank(tmp_path: Path, kind: str) -> None:
    """A stream, and a loader with a state of its own, are refused on another number of ranks; with leave the pass
    begins again, and the log says so."""
    stopped = Part(tmp_path / "stopped", kind, 2, 4, stop=DONE)
    path = stopped.checkpoint("iter_5")

    refused = Part(tmp_path / "refused", kind, 1, 8, path=path, changed="refuse")
    rest = Part(tmp_path / "rest", kind, 1, 8, path=path)

    what = "DataLoader" if kind == "stream" else "OwnState"
    line = f"position: \"batch 5 of a pass over one rank's part of a {what}\" in the checkpoint, 'the beginning of the pass'"
    assert refused.steps == []
    assert line in refused.errors[0]
    assert rest.errors == [None]
    assert sets(rest.steps) == [[*range(i, i + 8)] for i in range(0, COUNT, 8)] * 2
    assert any(line in each for each in rest.lines)


def test_what_is_not_of_the_ranks_is_refused(two: tuple[Part, Part], tmp_path: Path) -> None:
    """With an answer for the number of ranks alone, another batch size is refused, and only that is named."""
    path = two[1].checkpoint("iter_5")

    refused = Part(tmp_path / "refused", "sampler", 1, 8, path=path, changed=RANKS_ONLY)
    allowed = Part(tmp_path / "allowed", "sampler", 1, 4, path=path, changed=RANKS_ONLY)

    assert "batch_size: 4 in the checkpoint, 8 in this trainer" in refused.errors[0]
    assert "world_size" not in refused.errors[0]
    assert refused.steps == []
    assert allowed.errors == [None]
