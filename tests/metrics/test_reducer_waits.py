"""Ranks that do not come to a reduction of metrics: the others log their own, and nobody waits for long."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from eventloop.bus import Bus
from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.metrics import reduce as reducer
from eventloop.metrics.packet import Packet
from eventloop.metrics.reduce import Reducer
from tests.conftest import DEADLINE
from tests.support.meeting import Meeting, Rank, look_in_turn


@pytest.fixture
def meeting() -> Meeting:
    """Two ranks'."""
    return Meeting(2)


@pytest.fixture
def ranks(meeting: Meeting) -> list[Rank]:
    """Two."""
    return [Rank(meeting, number) for number in range(2)]


def process_group(monkeypatch: pytest.MonkeyPatch, *, gloo: bool) -> None:
    """Let there seem to be one, of two ranks."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "is_gloo_available": gloo}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)


def test_nobody_waits_beyond_the_limit(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose others do not come logs its own values, says so once, and reduces again once they have."""
    ranks[0].log(0, loss=0.0)
    ranks[0].look()
    assert ranks[0].logged == []

    monkeypatch.setattr(reducer, "WAIT_SECONDS", 0.0)
    ranks[0].log(1, loss=0.0)
    ranks[0].look()
    assert ranks[0].scalars == [(0, {"loss": 0.0}), (1, {"loss": 0.0})]

    monkeypatch.setattr(reducer, "WAIT_SECONDS", DEADLINE)
    for iteration in (0, 1):
        ranks[1].log(iteration, loss=1.0)
    for number, rank in enumerate(ranks):
        rank.log(2, loss=float(number))
    look_in_turn(*ranks)
    assert ranks[0].scalars[2:] == ranks[1].scalars[2:] == [(2, {"loss": 0.5})]
    (late,) = [record.message for record in caplog.records if "has waited" in record.message]
    assert late.startswith("rank 0 logs its own metrics: it has waited ")
    assert late.endswith(" s for the other ranks, and reduces again once all have answered")


def test_a_run_that_has_ended_waits_less(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the seconds that the close leaves are all there are; the next run waits as long as ever."""
    ranks[0].log(0, loss=0.0)
    ranks[0].look()
    assert ranks[0].logged == []

    ranks[0].reducer.hurry(0.0)
    ranks[0].look()
    assert ranks[0].scalars == [(0, {"loss": 0.0})]

    process_group(monkeypatch, gloo=True)
    ranks[0].reducer.begin_run()
    ranks[0].log(1, loss=0.0)
    ranks[0].look()
    assert len(ranks[0].logged) == 1


def test_a_rank_that_is_gone(ranks: list[Rank], meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    """What waits, and all that comes, is logged with the rank's own values, which it says once."""
    for iteration in range(2):
        ranks[0].log(iteration, loss=float(iteration))
    ranks[0].look()
    meeting.leave()
    ranks[0].look()
    ranks[0].log(2, loss=2.0)
    ranks[0].look()

    assert ranks[0].scalars == [(iteration, {"loss": float(iteration)}) for iteration in range(3)]
    (message,) = [record.message for record in caplog.records]
    assert message == (
        "rank 0 logs its own metrics from here on: the exchange with the other ranks failed "
        "(RuntimeError: Connection closed by peer)"
    )
    assert not ranks[0].reducer.reduces


def test_a_run_that_failed_waits_for_nobody(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    """What waits is logged at once, with the rank's own values."""
    ranks[0].log(0, loss=0.0)
    ranks[0].look()
    ranks[0].reducer.stop()
    ranks[0].look()

    assert ranks[0].scalars == [(0, {"loss": 0.0})]
    assert caplog.records == []


def test_a_run_after_one_that_failed_says_that_it_does_not_reduce(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks may be at different places by then: values that are taken for those of all would be this one's alone."""
    process_group(monkeypatch, gloo=True)
    ranks[0].reducer._world = dist.group.WORLD
    ranks[0].reducer.stop()

    ranks[0].reducer.begin_run()

    assert not ranks[0].reducer.reduces
    assert "metrics are no longer reduced: an earlier run failed or lost a rank" in caplog.text


def test_a_close_keeps_its_deadline(meeting: Meeting) -> None:
    """A bus that closes while values wait for another rank closes in time, and counts what it has not delivered."""
    rank, seen = Rank(meeting, 0), list[ScalarsLogged]()
    bus = Bus()
    subscription = bus.subscribe(seen.append, ScalarsLogged, offload="thread")
    rank.put(0, loss=0.0)
    bus.post(rank.reducer.reduce(rank.storage.collect(), 0), ScalarsLogged)

    assert not bus.close(0.1).complete
    assert (seen, subscription.stats.dropped) == ([], 1)


def test_nothing_is_kept_of_what_was_told(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rank that logs for nobody, nor one whose others do not come, grows."""
    for iteration in range(10):
        for rank in ranks:
            rank.log(iteration, loss=0.0)
    look_in_turn(*ranks)
    monkeypatch.setattr(reducer, "WAIT_SECONDS", 0.0)
    for iteration in range(10, 20):
        ranks[0].log(iteration, loss=0.0)
    ranks[0].look()

    assert [len(rank.logged) for rank in ranks] == [20, 10]
    assert [rank.reducer.waiting for rank in ranks] == [0, 0]


# --- processes without others ------------------------------------------------------------------------------


def test_one_process_alone_reduces_nothing() -> None:
    """Its packets are posted as they are."""
    alone, storage = Reducer(["data_time"]), EventStorage()
    alone.begin_run()

    assert isinstance(alone.reduce(storage.collect(), 0), Packet)
    assert not alone.reduces


def test_without_gloo_nothing_is_reduced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build of PyTorch that has no backend for the host says so, and each rank logs its own."""
    process_group(monkeypatch, gloo=False)
    alone = Reducer([])
    alone.begin_run()

    assert not alone.reduces
    assert "metrics are not reduced: this build of PyTorch lacks gloo" in caplog.text
