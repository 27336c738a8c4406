"""Metrics of a training reduced over the ranks: what is logged, and that no rank crashes another, whatever it has."""

from __future__ import annotations

import math
from random import Random

import pytest

from eventloop.metrics.reduce import LAST
from eventloop.metrics.statistics import LogStatistics
from tests.support.meeting import ROUNDS, Meeting, Rank, poll_in_turn, poll_ranks

NAN, INF = math.nan, math.inf


@pytest.fixture
def meeting() -> Meeting:
    """Two ranks'."""
    return Meeting(2)


@pytest.fixture
def ranks(meeting: Meeting) -> list[Rank]:
    """Two, that take the maximum of `data_time` and of a group `memory`."""
    return [Rank(meeting, number, ["data_time", "memory"]) for number in range(2)]


def log(ranks: list[Rank], *iterations: int) -> None:
    """Log the number of each rank as its loss; the mean of two ranks is 0.5."""
    for iteration in iterations:
        for number, rank in enumerate(ranks):
            rank.log(iteration, loss=float(number))


def losses(*iterations: int, value: float = 0.5) -> list[tuple[int, dict[str, float]]]:
    """What a rank has logged: a loss at each iteration."""
    return [(iteration, {"loss": value}) for iteration in iterations]


# --- what is logged ----------------------------------------------------------------------------------------


def test_means_of_each_iteration(ranks: list[Rank]) -> None:
    """All ranks log the mean of their values of an iteration; their histories keep their own values."""
    for number, rank in enumerate(ranks):
        for iteration in range(3):
            rank.put(iteration, loss=iteration + 10.0 * number)
        rank.post(2)

    poll_in_turn(*ranks)

    assert ranks[0].scalars == [(0, {"loss": 5.0}), (1, {"loss": 6.0}), (2, {"loss": 7.0})]
    assert ranks[1].logged == ranks[0].logged
    assert [rank.storage.latest()["loss"] for rank in ranks] == [(2.0, 2), (12.0, 2)]


def test_maxima(ranks: list[Rank]) -> None:
    """The names and groups of `maxima` take the maximum; a name that only begins alike does not."""
    names = ["data_time", "memory", "memory/resident", "memory_share"]
    for number, rank in enumerate(ranks):
        rank.storage.put_scalars(dict.fromkeys(names, float(2 * number)))
        rank.post(0)

    poll_in_turn(*ranks)

    assert ranks[0].scalars == [(0, dict(zip(names, [2.0, 2.0, 2.0, 1.0], strict=True)))]
    assert ranks[1].logged == ranks[0].logged


def test_mean_of_an_interval(ranks: list[Rank]) -> None:
    """A name with a smoothing hint is logged once an interval: the mean of its iterations' means, or maxima."""
    for number, rank in enumerate(ranks):
        rank.put(0, True, loss=1.0 + number, data_time=3.0 * number)
        rank.put(1, True, loss=2.0 + number, data_time=1.0 - number)
        rank.post(1)

    poll_in_turn(*ranks)

    assert ranks[0].scalars == [(1, {"loss": 2.0, "data_time": 2.0})]
    assert ranks[1].logged == ranks[0].logged


def test_values_of_a_validation_are_a_ranks_own(ranks: list[Rank]) -> None:
    """Values of a validation, of which the ranks have shares of unequal lengths, are not reduced."""
    for number, rank in enumerate(ranks):
        rank.storage.mode = "val"
        for _ in range(number + 1):
            rank.put(0, score=7.0 + number)
        rank.storage.mode = "train"
        rank.log(0, loss=float(number))

    poll_in_turn(*ranks)

    assert [sorted(map(str, rank.scalars)) for rank in ranks] == [
        ["(0, {'loss': 0.5})", "(0, {'score': 7.0})"],
        ["(0, {'loss': 0.5})", "(0, {'score': 8.0})", "(0, {'score': 8.0})"],
    ]


@pytest.mark.parametrize(
    ("own", "other", "mean", "largest"),
    [
        (NAN, 1.0, NAN, NAN),
        (INF, 1.0, INF, INF),
        (-INF, 1.0, -INF, 1.0),
        (INF, -INF, NAN, INF),
        (NAN, INF, NAN, NAN),
        (-INF, -INF, -INF, -INF),
    ],
)
def test_numbers_that_are_not_finite(
    ranks: list[Rank], own: float, other: float, mean: float, largest: float
) -> None:
    """They are reduced as they are: a NaN of one rank is the mean, and the maximum, whichever rank has it."""
    for iteration, values in enumerate([(own, other), (other, own)]):
        for rank, value in zip(ranks, values, strict=True):
            rank.log(iteration, loss=value, data_time=value)

    poll_in_turn(*ranks)

    for rank in ranks:
        logged = [scalars for _, scalars in rank.scalars]
        assert logged == [pytest.approx({"loss": mean, "data_time": largest}, nan_ok=True)] * 2


def test_what_all_have_alike_stays_what_it_is() -> None:
    """The mean of three times 0.1, as a learning rate, is 0.1: no rounding of the sum is seen."""
    meeting = Meeting(3)
    ranks = [Rank(meeting, number) for number in range(3)]
    for number, rank in enumerate(ranks):
        rank.log(0, lr=0.1, loss=float(number))

    poll_in_turn(*ranks)

    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    assert [rank.scalars for rank in ranks] == [[(0, {"lr": 0.1, "loss": 1.0})]] * 3


def test_statistics_are_of_what_is_reduced(ranks: list[Rank]) -> None:
    """The statistics of `custom_cfg` are computed from the reduced values."""
    for number, rank in enumerate(ranks):
        statistics = LogStatistics([{"data_src": "loss", "method_name": "max", "log_name": "most"}])
        for iteration in range(2):
            rank.put(iteration, loss=iteration + 4.0 * number)
        rank.posted.append(statistics.wrap(rank.reducer.reduce(rank.storage.collect(), 1)))

    poll_in_turn(*ranks)

    assert ranks[0].scalars == [(0, {"loss": 2.0}), (1, {"loss": 3.0, "most": 3.0})]


# --- how the ranks come together ---------------------------------------------------------------------------


def test_a_rank_that_is_behind(ranks: list[Rank], meeting: Meeting) -> None:
    """The logs that both have are reduced at once, those that one rank has more when the other has come there too."""
    log(ranks, *range(9))
    log(ranks[:1], 9)
    poll_ranks(*ranks)

    assert [len(rank.logged) for rank in ranks] == [9, 9]
    assert meeting.operations == ["largest", "largest", "total", "largest"]

    ranks[1].log(9, loss=1.0)
    poll_in_turn(*ranks)

    assert ranks[0].scalars == ranks[1].scalars == losses(*range(10))


def test_ranks_that_end_at_unlike_iterations(ranks: list[Rank]) -> None:
    """The last logs of a training meet, also where one rank has begun its next training, which is reduced too."""
    log(ranks, 2)
    ranks[1].log(3, loss=1.0)
    for rank in ranks:
        rank.post(LAST)
    ranks[0].log(1, loss=0.0)
    poll_ranks(*ranks)
    ranks[1].log(1, loss=1.0)

    poll_in_turn(*ranks)

    assert ranks[0].scalars == [*losses(2), *losses(1)]
    assert ranks[1].scalars == [*losses(2), *losses(3, value=1.0), *losses(1)]


def test_values_that_are_on_a_device(
    ranks: list[Rank], meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log whose values have arrived does not wait for the next one's, which another exchange takes."""
    arrived: list[bool] = []
    log(ranks, 0)
    for number, rank in enumerate(ranks):
        rank.put(1, loss=float(number))
        packet = rank.storage.collect()
        monkeypatch.setattr(packet, "ready", lambda: bool(arrived))
        rank.posted.append(rank.reducer.reduce(packet, 1))
    poll_ranks(*ranks)

    assert [rank.scalars for rank in ranks] == [losses(0)] * 2

    arrived.append(True)
    poll_in_turn(*ranks)

    assert [rank.scalars[1:] for rank in ranks] == [losses(1)] * 2
    assert meeting.operations == ["largest", "total"] * 2


@pytest.mark.parametrize(("iteration", "inside"), [(1, True), (0, False)], ids=["iteration", "step"])
def test_values_of_unlike_places(ranks: list[Rank], iteration: int, inside: bool) -> None:
    """Values of one name in another iteration, or before it instead of within, are not reduced with each other."""
    ranks[0].log(0, loss=0.0)
    ranks[1].storage.iter, ranks[1].storage.in_iteration = iteration, inside
    ranks[1].storage.put_scalar("loss", 1.0)
    ranks[1].post(0)

    poll_in_turn(*ranks)

    assert [rank.scalars for rank in ranks] == [losses(0, value=0.0), losses(iteration, value=1.0)]


def test_values_that_not_all_ranks_put(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    """Every rank logs its own values of that interval, and warns once; the next interval is reduced."""
    for iteration in range(3):
        if iteration < 2:
            ranks[0].put(iteration, image_score=5.0)
        log(ranks, iteration)

    poll_in_turn(*ranks)

    own = {"image_score": 5.0, "loss": 0.0}
    assert ranks[0].scalars == [(0, own), (1, own), *losses(2)]
    assert ranks[1].scalars == [*losses(0, 1, value=1.0), *losses(2)]
    assert sorted(record.message for record in caplog.records) == [
        f"rank {number} logs its own metrics up to iteration 0: not every rank put the same names in the same "
        "iterations"
        for number in range(2)
    ]


@pytest.mark.representative(2)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_do_as_they_like(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever each puts, and whenever it logs and looks, they come to the same collectives, and no value is lost."""
    chance = Random(seed)
    meeting = Meeting(3)
    ranks = [Rank(meeting, number, ["most"]) for number in range(3)]
    put = [0, 0, 0]
    for _ in range(ROUNDS):
        number = chance.randrange(3)
        rank, iteration = ranks[number], put[number]
        rank.put(iteration, loss=float(number), **({"most": float(number)} if chance.random() < 0.9 else {}))
        put[number] += 1
        if iteration % 3 == 2 or chance.random() < 0.1:
            rank.post(iteration)
        chance.choice(ranks).poll()
    for rank in ranks:
        rank.post(LAST)
    poll_in_turn(*ranks)

    assert "cannot be had" not in caplog.text
    for number, rank in enumerate(ranks):
        assert [iteration for iteration, _ in rank.scalars] == [*range(put[number])]
        for _, scalars in rank.scalars:
            assert scalars["loss"] in (number, 1.0)
            assert scalars.get("most", number) in (number, 2.0)
