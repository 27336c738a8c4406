"""The slow rank among all ranks: what a rank waits for others is discounted, and even ranks are never blamed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eventloop.costs.ranks import (
    ENOUGH,
    LATEST,
    WINDOW,
    SlowRankWatch,
    Straggler,
    common_windows,
    lasting_slow_rank,
    rank_times,
    slow_rank,
)
from eventloop.costs.records import Phases, TrendPoint

USUAL = {"data": 1.0, "forward": 5.0, "backward": 10.0, "optimizer": 2.0, "hooks": 1.0, "unaccounted": 0.5}
"""Milliseconds of an iteration."""


def phases(iterations: float = WINDOW, **longer: float) -> Phases:
    """Return the phases of usual iterations, some of which are so many milliseconds `longer`."""
    iterations = round(iterations)
    usual = dict.fromkeys(longer, 0.0) | USUAL
    each = {name: (usual[name] + longer.get(name, 0.0)) * 1e-3 * iterations for name in usual}
    return Phases(iterations=iterations, **each)


def slow_by(milliseconds: float, phase: str = "data", ranks: int = 2) -> list[Phases]:
    """Return a window in which rank 1 is slow, and all others wait for it in backward."""
    waits = phases(backward=milliseconds)
    return [phases(**{phase: milliseconds}) if rank == 1 else waits for rank in range(ranks)]


EVEN = [phases(), phases()]
Expected = tuple[int, str] | None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{"backward": 20}, {"data": 20}], (1, "data")),
        ([{"backward": 20}, {"forward": 20}], (1, "forward")),
        ([{"backward": 20}, {"hooks": 20}], (1, "hooks")),
        ([{"backward": 20}, {"optimizer": 20}], (1, "optimizer")),
        ([{"hooks": 20}, {"backward": 20}], (0, "hooks")),
        ([{"forward": 20}, {"data": 20}], (1, "data")),  # waits in forward: FSDP, a hand-written loop
        ([{"forward": 20}, {"hooks": 20}], (1, "hooks")),
        ([{"hooks": 20}, {"data": 20}], (1, "data")),  # a handler with a collective waits
        ([{"unaccounted": 20}, {"forward": 20}], (1, "forward")),  # no collective but that of the trainer
        ([{"ranks": 20}, {"forward": 20}], (1, "forward")),  # a measured wait for the other rank
        ([{"backward": 20}, {"checkpoint": 20}], (1, "checkpoint")),  # its own wait, for which others wait
        ([{"background": 20}, {"ranks": 20}], (0, "background")),
        ([{"ranks": 20}, {"ranks": 20}], None),  # for a third one, whose record is not here
        ([{"backward": 20}, {"data": 12, "hooks": 8}], (1, "data")),
        ([{"backward": 20, "data": 8}, {"data": 28}], (1, "data")),
        ([{"backward": 20}, {"backward": 20}, {"hooks": 20}, {"backward": 20}], (2, "hooks")),
        ([{"backward": 30}, {"data": 20, "backward": 10}, {"data": 30}], (2, "data")),
        ([{"backward": 20}, {"backward": 20}], None),  # equally long: nobody knows whose backward it is
        ([{}, {}], None),
        ([{"unaccounted": 20}, {}], None),  # the loop itself is no phase to be slow in
        ([{"backward": 1.5}, {"data": 1.5}], None),  # not clearly
        ([{"backward": 6, "forward": 30}, {"data": 6, "forward": 30}], None),
        ([{"data": 20}], None),
    ],
)
def test_the_slow_rank_is_told_by_what_others_wait(ranks: list[dict[str, float]], expected: Expected) -> None:
    """Backward, and any phase with a collective, takes longer on the ranks that wait, which are not to blame."""
    found = slow_rank([phases(**longer) for longer in ranks])

    assert (None if found is None else (found.rank, found.phase)) == expected


def test_own_times_and_the_wait_add_up() -> None:
    """What a rank waited is taken out of the phase that it waited in; the sum is the iteration."""
    fast, slow = rank_times([phases(backward=20), phases(data=20)])

    assert fast.own == pytest.approx({name: usual * 1e-3 for name, usual in USUAL.items()})
    assert fast.waited == pytest.approx(20e-3)
    assert slow.waited == pytest.approx(0.0, abs=1e-9)
    assert sum(fast.own.values()) + fast.waited == pytest.approx(phases(backward=20).wall / WINDOW)


def test_measured_waits_are_no_work_of_a_rank() -> None:
    """Those for other ranks are added to the discounted ones; a wait for a checkpoint is the rank's own time."""
    fast, slow = rank_times([phases(backward=20, ranks=5), phases(checkpoint=20)])

    assert fast.waited == pytest.approx(25e-3)
    assert "ranks" not in fast.own
    assert slow.own["checkpoint"] == pytest.approx(20e-3)
    assert fast.own["checkpoint"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (
            2,
            "rank 1 is slow in data: 21.0 ms of an iteration of 39.5 ms; it takes 20.0 ms longer than rank 0, which waits for it",
        ),
        (3, "it takes 20.0 ms longer than the usual rank, and all wait for it"),
    ],
)
def test_a_sentence_names_rank_phase_and_times(world_size: int, words: str) -> None:
    """The log, the report and the trace have the same sentence."""
    found = slow_rank(slow_by(20, ranks=world_size))

    assert found is not None
    assert words in found.text


def named(windows: list[list[Phases]]) -> list[tuple[int, int, str]]:
    """Return what a watch reports: the number of iterations after which it does, the rank and the phase."""
    watch = SlowRankWatch()
    found = [(number, watch.add(window)) for number, window in enumerate(windows, start=1)]
    return [(number * WINDOW, each.rank, each.phase) for number, each in found if each is not None]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([slow_by(20)] * 50, [(32, 1, "data")]),  # once, though it stays slow
        ([*[EVEN] * 20, *[slow_by(20, "hooks")] * 20], [(112, 1, "hooks")]),
        ([*[slow_by(20)] * 20, *[EVEN] * 20, *[slow_by(20)] * 20], [(32, 1, "data"), (192, 1, "data")]),
        ([*[slow_by(20)] * 12, *[slow_by(20, "forward")] * 20], [(32, 1, "data"), (72, 1, "forward")]),
        ([slow_by(20), slow_by(20), slow_by(20), slow_by(20), EVEN] * 10, [(36, 1, "data")]),
        ([*[slow_by(200)] * (ENOUGH - 1), *[EVEN] * 20], []),  # a stall of a moment
        ([slow_by(20), slow_by(20)[::-1]] * 30, []),  # first one rank, then the other
        ([slow_by(20), EVEN] * 30, []),
        ([EVEN] * 60, []),
    ],
)
def test_a_rank_is_reported_once_while_it_stays_slow(
    windows: list[list[Phases]], expected: list[tuple[int, int, str]]
) -> None:
    """Within 40 iterations, for each phase anew only after the ranks have been even."""
    assert named(windows) == expected


def test_noise_names_none() -> None:
    """On ranks that are interrupted at random, for as long as ten iterations, in 8,000 iterations."""
    noise = random.Random(3)

    def interrupted() -> Phases:
        longer = noise.uniform(2, 200) if noise.random() < 0.15 else 0.0
        return phases(**{noise.choice([*USUAL]): longer})

    windows = [[interrupted(), interrupted()] for _ in range(2_000)]

    assert named(windows) == []
    assert lasting_slow_rank(windows) is None


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([slow_by(20)] * 50, (1, "data")),
        ([*[EVEN] * 30, *[slow_by(20)] * 20], (1, "data")),
        ([*[slow_by(20)] * 20, *[slow_by(40)[::-1]] * 20], (0, "data")),  # which cost more
        ([*[EVEN] * 2000, *[slow_by(20)] * 10], None),  # next to nothing of the run
        ([slow_by(20)] * (ENOUGH - 1), None),
        ([EVEN] * 50, None),
        ([], None),
    ],
)
def test_a_run_has_the_slow_rank_that_cost_most(windows: list[list[Phases]], expected: Expected) -> None:
    """A rank that was slow for a part of the run counts with that part."""
    found = lasting_slow_rank(windows)

    assert (None if found is None else (found.rank, found.phase)) == expected


def test_the_figures_are_those_of_the_slow_part() -> None:
    """Even iterations before do not thin them out."""
    found = lasting_slow_rank([*[EVEN] * 2 * LATEST, *[slow_by(20)] * 2 * LATEST])

    assert isinstance(found, Straggler)
    assert found.longer == pytest.approx(20e-3, rel=0.15)


def points(*iterations: int, begin: int = 0) -> list[TrendPoint]:
    """Return points of so many iterations each."""
    found = []
    for number in iterations:
        found.append(TrendPoint(first_iter=begin, phases=phases(number)))
        begin += number
    return found


@pytest.mark.parametrize(
    ("trends", "expected"),
    [
        ([points(1, 1, 1, 1, 1, 1, 1, 1), points(1, 1, 1, 1, 1, 1, 1, 1)], [4, 4]),
        ([points(2, 2, 2, 2, 1), points(4, 4, 4)], [4, 4]),  # written at other times
        ([points(8, 8), points(8, 8, 8)], [8, 8]),
        ([points(8, 8, begin=16), points(8, 8, 8, 8)], [8, 8]),
        ([points(8), points(8, begin=8)], []),
        ([points(8), []], []),
        ([], []),
    ],
)
def test_windows_are_of_iterations_that_all_ranks_have(
    trends: list[list[TrendPoint]], expected: list[int]
) -> None:
    """Records of unequal length have the iterations up to the end of the shorter one in common."""
    windows = common_windows(trends)

    assert [[each.iterations for each in window] for window in windows] == [
        [n] * len(trends) for n in expected
    ]
    sums: Any = [sum(each.wall for each in own) for own in zip(*windows, strict=True)]
    assert sums == pytest.approx([phases(sum(expected)).wall] * len(sums))
