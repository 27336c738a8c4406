"""The comparison of two runs: finds what was planted, and calls equal what is equal."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from eventloop.costs.records import HandlerCost
from eventloop.reporting.diff.bootstrap import difference
from eventloop.reporting.diff.comparing import LEAST, Diff, DiffRow, compare
from eventloop.reporting.report import Report
from tests.reporting.compared_runs import OPTIMIZER, POINTS, STEP, handler, noise, run

ITERATION = "an iteration"

PAIRS = 20
PLANTED = 0.05 * STEP
EQUAL = ("noise", "unknown")


def short(row: DiffRow) -> str:
    """The name of a row, without the event of most handlers."""
    return row.name.removesuffix(", after_train_iter")


def row(diff: Diff, name: str) -> DiffRow:
    """One row of a comparison."""
    return next(each for each in diff.rows if short(each) == name)


def different(diff: Diff) -> list[str]:
    """The names of the rows that are not called equal."""
    return [short(each) for each in diff.rows if each.verdict not in EQUAL]


# --- what is equal, and what is not ------------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_equal_pairs_are_called_equal() -> None:
    """In at least 19 of them no row is different, whatever its interval is."""
    found = [different(compare(run(2 * i), run(2 * i + 1))) for i in range(PAIRS)]

    assert sum(not names for names in found) >= PAIRS - 1, found


@pytest.mark.slow
def test_a_planted_5_percent_is_found_in_its_phase() -> None:
    """In each of twenty pairs the phase is slower, by what was planted, and nothing else but the iteration is."""
    for i in range(PAIRS):
        diff = compare(run(2 * i), run(2 * i + 1, forward=PLANTED))

        assert {*different(diff)} <= {ITERATION, "forward"}
        assert row(diff, "forward").verdict == "slower"
        assert row(diff, "forward").difference == pytest.approx(PLANTED, rel=0.4)


@pytest.mark.slow
def test_a_planted_5_percent_is_found_in_its_handler() -> None:
    """In each of twenty pairs the handler and the hooks phase are faster, and nothing else but the iteration is."""
    for i in range(PAIRS):
        diff = compare(run(2 * i, mine=PLANTED), run(2 * i + 1))

        assert {*different(diff)} <= {ITERATION, "hooks", "mine"}
        assert row(diff, "mine").verdict == row(diff, "hooks").verdict == "faster"
        assert row(diff, "mine").difference == pytest.approx(-PLANTED, rel=0.1)


def test_the_first_iterations_do_not_decide() -> None:
    """A compilation in the first tenth changes no row."""
    slow_start = np.ones(POINTS)
    slow_start[: POINTS // 10] = 50.0

    diff = compare(run(0, factors=np.ones(POINTS)), run(0, factors=slow_start))

    assert different(diff) == []
    assert row(diff, ITERATION).difference == 0


def test_what_the_load_changes_within_a_run_is_noise_between_runs() -> None:
    """A machine that was slower for parts of a run may have been so for the whole of another."""
    turns = np.repeat([1.0, 1.2, 1.0, 1.25], POINTS // 4) * noise(np.random.default_rng(1))
    all_along = noise(np.random.default_rng(2)) * (1 + np.random.default_rng(3).exponential(0.3, POINTS))

    for loaded in (turns, all_along):
        diff = compare(run(0, factors=loaded), run(0, factors=1.1 * noise(np.random.default_rng(4))))

        assert row(diff, ITERATION).low is not None
        assert different(diff) == []


@pytest.mark.parametrize(("share", "verdict"), [(0.9 * LEAST, "noise"), (1.2 * LEAST, "slower")])
def test_a_difference_of_less_than_1_and_a_half_percent_is_noise(share: float, verdict: str) -> None:
    """However narrow its interval is: another process of the same program differs by as much."""
    calm = np.ones(POINTS)

    diff = compare(run(0, factors=calm), run(0, factors=calm, forward=share * STEP))

    found = row(diff, ITERATION)
    assert (found.verdict, found.low == found.high == found.difference) == (verdict, True)
    assert found.noise == pytest.approx(LEAST * diff.iteration)


# --- rows --------------------------------------------------------------------------------------------------------


def test_handlers_of_one_run_come_first_then_the_largest_difference() -> None:
    """They say in which run they are, and have the time of an iteration, but no interval."""
    a = run(0, handlers={"gone": 20e-6})
    b = run(1, handlers={"new": 40e-6}, forward=PLANTED)

    new, gone, *others = compare(a, b).rows

    assert (short(new), new.verdict, new.a, new.low) == ("new", "only in B", None, None)
    assert (short(gone), gone.verdict, gone.b) == ("gone", "only in A", None)
    assert [new.difference, gone.difference] == pytest.approx([40e-6, -20e-6], rel=0.1)
    sizes = [abs(each.difference) for each in others]
    assert sizes == sorted(sizes, reverse=True)


def test_handlers_outside_of_iterations_are_rows_of_one_run_only() -> None:
    """Their time is not that of an iteration; `eventloop report A B` compares their calls."""
    saves = handler("save", np.array([0.5]), event="after_train_epoch", in_iteration=False, calls=1)
    a, b = (with_handler(run(seed), saves) for seed in (0, 1))

    assert "save, after_train_epoch" not in [each.name for each in compare(a, b).rows]
    assert compare(run(0), b).rows[0].name == "save, after_train_epoch"


def with_handler(report: Report, *added: HandlerCost) -> Report:
    """The report with further handlers."""
    assert report.costs is not None
    return replace(report, costs=replace(report.costs, handlers=[*report.costs.handlers, *added]))


def test_the_optimizers_handler_is_without_the_phases_that_it_runs() -> None:
    """What makes the backward pass slower is in one row, not in two."""
    diff = compare(run(0), run(1, backward=4 * PLANTED))

    assert row(diff, "backward").verdict == "slower"
    assert row(diff, OPTIMIZER).verdict == "noise"
    assert row(diff, OPTIMIZER).a == pytest.approx(5e-6, rel=0.1)


def test_work_that_is_rare_is_compared_by_its_mean() -> None:
    """Most points of a handler that works in each hundredth iteration have none of it."""
    now_and_then = np.zeros(POINTS // 4)
    now_and_then[::3] = 300e-6
    a, b = run(0, handlers={"save": now_and_then}), run(1, handlers={"save": 10 * now_and_then})

    found = row(compare(a, b), "save")

    assert (found.compared, found.verdict) == ("mean", "slower")
    assert found.a == pytest.approx(100e-6, rel=0.1)


def test_rare_work_that_is_new_is_found() -> None:
    """The handler was there before, and did nothing in most iterations of both runs."""
    saves = np.full(POINTS // 4, 1e-6)
    saves[::5] = 600e-6

    found = row(compare(run(0, handlers={"save": 1e-6}), run(1, handlers={"save": saves})), "save")

    assert (found.compared, found.verdict) == ("mean", "slower")


def test_one_interruption_does_not_hide_what_a_handler_adds() -> None:
    """Its mean in the first run is mostly that interruption; the decile is compared all the same."""
    interrupted = np.full(POINTS // 4, 1e-6)
    interrupted[40] = 1e-3

    found = row(compare(run(0, handlers={"busy": interrupted}), run(1, handlers={"busy": PLANTED})), "busy")

    assert (found.compared, found.verdict) == ("decile", "slower")


@pytest.mark.parametrize("trend", [[], [1e-4] * 12])
def test_a_handler_without_enough_points_is_unknown(trend: list[float]) -> None:
    """Its calls were not all clocked, or an older version wrote the file: it has its mean and no interval."""
    a, b = (
        with_handler(run(seed), replace(handler("tight", np.ones(80) * 1e-3), trend=trend)) for seed in (0, 1)
    )

    found = row(compare(a, b), "tight")

    assert (found.verdict, found.low, found.noise) == ("unknown", None, None)
    assert found.a == found.b == pytest.approx(80 * 1e-3 / (POINTS * 8))


def test_a_comparison_repeats_itself() -> None:
    """The bootstrap has a fixed seed; JSON has every field back."""
    a, b = run(0), run(1)

    encoded = msgspec.json.encode(compare(a, b))

    assert encoded == msgspec.json.encode(compare(a, b))
    assert msgspec.json.decode(encoded, type=Diff) == compare(a, b)


# --- the interval ------------------------------------------------------------------------------------------------


def test_the_interval_contains_the_true_difference() -> None:
    """In most of many pairs of correlated series: 95 % are meant."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(60):
        a, b = noise(random, 200), noise(random, 200) + 0.05
        found = difference(a[np.newaxis], b[np.newaxis])
        inside += (
            found.low - 0.006 <= 0.05 <= found.high + 0.006
        )  # 0.3 % of each process are not within a run

    assert inside >= 51


def test_correlated_points_have_a_wider_interval() -> None:
    """Points that are slow together say less than as many that are slow one by one."""
    random = np.random.default_rng(0)
    steps = np.repeat(random.normal(1, 0.05, 32), 10)
    mixed, other = random.permutation(steps), np.ones(320)

    wide, narrow = (difference(other[np.newaxis], own[np.newaxis]) for own in (steps, mixed))

    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)


# --- the gate ----------------------------------------------------------------------------------------------------


def test_the_gate_fails_rows_whose_whole_interval_is_above_the_limit() -> None:
    """10 % are above 5 %. The parts of an iteration count as parts of it: 10 % of a small handler do not."""
    slower = compare(run(0), run(1, forward=2 * PLANTED), 5.0)
    small = compare(run(0), run(1, mine=5e-6), 5.0)

    assert {*slower.failed} == {"forward", ITERATION}
    assert (slower.fail_above, small.failed) == (5.0, [])


@pytest.mark.slow
def test_the_gate_is_silent_on_noise_and_on_what_became_faster() -> None:
    """Also with a limit of nothing; a handler of one run only fails in the hooks phase, if it does."""
    new = {"new": 40e-6}

    assert compare(run(0), run(1), 0.0).failed == []
    assert compare(run(0, forward=PLANTED), run(1), 0.0).failed == []
    assert compare(run(0), run(1, handlers=new), 0.0).failed == []
    assert compare(run(0), run(1, handlers=new, hooks=PLANTED), 1.0).failed == ["hooks", ITERATION]
